#!/usr/bin/env bash
# The second command: installs missing packages, builds everything and runs every test.
#
#   ./test.sh [arguments of ctest, such as -R decode, or -L python]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh
. scripts/python.sh

install_packages "$BUILD_PACKAGES" "$PYTHON_PACKAGES"
build release || exit 1
if ! python_environment; then
  [ "${CI:-}" != true ] || die "the Python tests' environment could not be made"
  rm -rf build/venv
  loudly "$TORCH and its companions could not be installed: THE PYTHON TESTS ARE SKIPPED"
fi
if ! nvrtc_environment; then
  [ "${CI:-}" != true ] || die "NVRTC, which the tests compile GPU kernels with, could not be installed"
  loudly "$NVRTC could not be installed: THE TESTS THAT COMPILE GPU KERNELS ARE SKIPPED"
fi
if ! nvdisasm_program; then
  [ "${CI:-}" != true ] || die "nvdisasm, which the tests read compiled kernels with, could not be installed"
  loudly "$NVDISASM could not be installed: THE TESTS THAT READ COMPILED KERNELS ARE SKIPPED"
fi
progress=()
if [ -t 1 ]; then progress=(--progress); fi
exec ctest --preset release -j "$(nproc)" "${progress[@]}" "$@"
