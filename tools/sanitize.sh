#!/usr/bin/env bash
# The CPU kernels and the bindings under AddressSanitizer and UndefinedBehaviorSanitizer: a build of their own in
# build/sanitize, the native tests with leak detection, the tests of the ops in Python, and the fuzzer.
# usage: tools/sanitize.sh [PYTEST_ARGUMENT...]
#
# PYTHON: an interpreter with torch, pybind11, pytest, hypothesis, rich, cmake and ninja. FUZZ_SECONDS: default 30.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=$(command -v "${PYTHON:-python3}")
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
export PATH=$(dirname "$python"):$PATH
build=$root/build/sanitize
package=$build/package
mkdir -p "$package"

torch=$("$python" -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parent)')
cmake -G Ninja -S . -B "$build" -DVEGAS_SANITIZE=ON -DVEGAS_CUDA=OFF -DVEGAS_TORCH_DIR="$torch" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" -DPython_EXECUTABLE="$python" \
  -DCMAKE_INSTALL_PREFIX="$package" >"$build/configure.log" || { cat "$build/configure.log"; exit 1; }
cmake --build "$build" --parallel "${MAX_JOBS:-$(nproc)}" >"$build/build.log" || { tail -40 "$build/build.log"; exit 1; }
rm -rf "$package/vegas_ops"
cp -r vegas_ops "$package"
rm -f "$package"/vegas_ops/*.so
cmake --install "$build" >/dev/null

export UBSAN_OPTIONS=print_stacktrace=1 OMP_WAIT_POLICY=passive
echo "native tests"
CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -g1" \
  tests/native/build.sh "$package/vegas_ops/libvegas.so" "$build/ops_test"
# The threads' buffers of the CPU kernels live as long as the threads do.
"$build/ops_test" --device cpu | tail -n 1

# Python, torch and OpenMP keep what they allocate until the process ends, so leaks are looked for above alone.
# Reports go to files, for pytest swallows what a process says as it dies. libstdc++ is there for its exceptions to be
# intercepted.
rm -f "$build"/report.*
trap 'unset LD_PRELOAD; cat "$build"/report.* 2>/dev/null || true' EXIT
reports=log_path=$build/report
export ASAN_OPTIONS=detect_leaks=0:$reports UBSAN_OPTIONS=$UBSAN_OPTIONS:$reports
library() { "${CXX:-c++}" -print-file-name="$1"; }
export LD_PRELOAD="$(library libasan.so) $(library libstdc++.so)"
export PYTHONPATH=$package PYTHONDONTWRITEBYTECODE=1
cd "$build" # away from the package that is not instrumented
loaded=$("$python" -c 'import vegas_ops; print(vegas_ops.__file__)')
[ "$loaded" = "$package/vegas_ops/__init__.py" ] || { echo "sanitize: $loaded was imported" >&2; exit 1; }
tests=()
for name in test_arguments test_value_checks test_verify test_select test_sparse \
  cases/test_attention_cases cases/test_selection_cases cases/test_memory_cases; do
  tests+=("$root/tests/$name.py")
done
# Not what torch makes of the ops when it traces them: that reaches no code of ours that other tests do not.
pytest -q -p no:cacheprovider --rootdir "$root" -k "not cuda and not opcheck and not compile" "${tests[@]}" "$@"
"$python" "$root/tools/fuzz.py" --device cpu --seconds "${FUZZ_SECONDS:-30}"
