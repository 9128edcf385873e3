#!/usr/bin/env bash
# Builds the native tests of the ops against a libvegas.so; with "cuda", for a GPU as well, which takes nvcc.
# usage: tests/native/build.sh LIBVEGAS.so PROGRAM [cuda]
set -euo pipefail
library=$(realpath "$1")
program=$2
here=$(dirname "$(realpath "$0")")
compiler=("${CXX:-c++}" -Wall -Wextra -Wno-missing-field-initializers)
[ "${3:-}" != cuda ] || compiler=("${CUDACXX:-nvcc}" -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers -DWITH_CUDA)
"${compiler[@]}" ${CXXFLAGS:-} -std=c++20 -O2 -I"$here/../../csrc/include" -o "$program" "$here"/*.cpp "$library" \
  -Xlinker -rpath -Xlinker "$(dirname "$library")"
