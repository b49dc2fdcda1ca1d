#!/usr/bin/env bash
# Reports the lines of the project that the tests execute, file by file, from a separate build (build/coverage, Clang
# 16). The report has no threshold, so CI leaves it out.
#
#   scripts/coverage.sh [arguments of ctest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh
. scripts/python.sh
install_packages "$BUILD_PACKAGES" "$LINT_PACKAGES" "$CI_PACKAGES"

build coverage
rm -f build/coverage/*.profraw
# Python, compiled kernels and mutated kernels execute no line that other tests do not.
LLVM_PROFILE_FILE=$PWD/build/coverage/%2m.profraw ctest --preset coverage -j "$(nproc)" --no-tests=error \
  -LE '^(python|kernels|mutation)' -E '^CpuFeatureSweep\.Long' "$@" >build/ctest-coverage.log ||
  say "Some tests failed (build/ctest-coverage.log), and the lines that these tests executed count."
mapfile -t objects < <(find build/coverage -type f -executable \( -name '*_test' -o -name tandem \) -printf '-object=%p\n')
llvm-profdata-16 merge -o build/coverage/all.profdata build/coverage/*.profraw
llvm-cov-16 report "${objects[@]}" -instr-profile=build/coverage/all.profdata -show-region-summary=false \
  -show-branch-summary=false -ignore-filename-regex='/tests/|^/usr/' 2>/dev/null
