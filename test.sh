#!/usr/bin/env bash
# The second command: installs missing packages, builds everything and runs every test.
#
#   ./test.sh [arguments of ctest, such as -R decode, or -L python]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh
. scripts/python.sh

install_packages "$BUILD_PACKAGES" "$PYTHON_PACKAGES"
mkdir -p build
# pip downloads packages while the compilers run. The calls after the build repeat what failed, and report it.
(python_packages && nvrtc_environment && nvdisasm_program) >build/downloads.log 2>&1 &
built=true
build release || built=false
wait
$built || exit 1
if ! python_environment; then
  [ "${CI:-}" != true ] || die "the Python tests' environment must be created: read the errors above"
  rm -rf build/venv
  loudly "$TORCH and its companions could not be installed: THE PYTHON TESTS ARE SKIPPED"
fi
if ! nvrtc_environment; then
  [ "${CI:-}" != true ] || die "NVRTC must be installed for the tests that compile GPU kernels: read pip's errors above"
  loudly "$NVRTC could not be installed: THE TESTS THAT COMPILE GPU KERNELS ARE SKIPPED"
fi
if ! nvdisasm_program; then
  [ "${CI:-}" != true ] || die "nvdisasm must be installed for the tests that read compiled kernels: read pip's errors above"
  loudly "$NVDISASM could not be installed: THE TESTS THAT READ COMPILED KERNELS ARE SKIPPED"
fi
progress=()
if [ -t 1 ]; then progress=(--progress); fi
exec ctest --preset release -j "$(nproc)" "${progress[@]}" "$@"
