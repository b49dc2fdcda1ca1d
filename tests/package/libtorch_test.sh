#!/usr/bin/env bash
# Builds and runs the libtorch example against an installed Tandem. 77: no Python here has torch.
#   libtorch_test.sh <source folder> <build folder> <C++ compiler>
set -euo pipefail
source=$1 build=$2 cxx=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

torch=
for python in "$source/build/venv/bin/python" python3; do
  torch=$("$python" -c 'import torch; print(torch.utils.cmake_prefix_path)' 2>/dev/null) && break
done
if [ -z "$torch" ]; then
  echo "skipped: the example needs torch in build/venv (./test.sh installs it) or in python3"
  exit 77
fi
cmake --install "$build" --prefix "$work/prefix" >"$work/log"
{
  cmake -G Ninja -S "$source/examples/libtorch" -B "$work/build" -DCMAKE_PREFIX_PATH="$torch;$work/prefix" \
    -DCMAKE_CXX_COMPILER="$cxx" && cmake --build "$work/build"
} >"$work/log" 2>&1 || { cat "$work/log" && exit 1; }
"$work/build/tandem_example_libtorch"
