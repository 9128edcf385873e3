#!/usr/bin/env bash
# Makes the virtual environment of the Makefile: the right torch, and nvcc where a GPU has none.
# usage: tools/environment.sh VENV PYTHON
set -euo pipefail
venv=$1 python=$2

"$python" - <<'PYTHON' || { echo "vegas_ops: Python 3.10 or newer is needed; name one: make PYTHON=python3.12" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 10))
PYTHON
command -v "${CXX:-c++}" >/dev/null || { echo "vegas_ops: no C++ compiler found; install g++ 11 or newer, or set CXX" >&2; exit 1; }

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

# TORCH_INDEX: an index to take torch from, such as PyTorch's own for CPU-only wheels.
index=()
[ -z "${TORCH_INDEX:-}" ] || index=(--index-url "$TORCH_INDEX")
"${pip[@]}" install --quiet "${TORCH:-torch==2.13.0}" "${index[@]}"

if nvidia-smi -L >/dev/null 2>&1 && ! command -v nvcc >/dev/null && [ "${VEGAS_CUDA:-AUTO}" != OFF ]; then
  echo "vegas_ops: a GPU but no nvcc on PATH; installing the compiler into $venv"
  "${pip[@]}" install --quiet nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
    nvidia-cuda-cccl==13.0.85 nvidia-cuda-runtime==13.0.96
fi
