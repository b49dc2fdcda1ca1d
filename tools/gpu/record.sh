#!/usr/bin/env bash
# Records the results of a Hopper GPU for the tests' kernels and a dozen problems. On machines without a GPU the virtual
# GPU must reproduce them.
#
#   tools/gpu/record.sh <build folder> [<root>]
#
# Writes vgpu/tests/instructions/recorded/hopper.txt and tests/kernels/recorded/hopper.txt under the root, by default
# this checkout. The build folder may come from another machine: vgpu/tests/instructions/vgpu_instructions_test and
# tests/kernels/kernels_test are the only files that the script reads. Every test runs in a separate process, so that a
# failing kernel does not stop other tests. Environment:
#   TANDEM_NVRTC  the compiler, see common.sh
#   COMMIT        what was built, where this is no checkout
#   LOG           a file for what the tests print; the failures, and how vgpu:h200 differs, are shown in any case
#   DEVICE        what is recorded: cuda, or vgpu:h200 to try this script without a GPU
#   JOBS          tests at once (8)
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$here/tools/gpu/common.sh"
[ $# = 1 ] || [ $# = 2 ] || die "usage: tools/gpu/record.sh <build folder> [<root>]"
build=$1 root=${2:-$here} device=${DEVICE:-cuda}
instructions=$build/vgpu/tests/instructions/vgpu_instructions_test kernels=$build/tests/kernels/kernels_test
for file in "$instructions" "$kernels"; do
  [ -x "$file" ] || die "$file must exist: build it (cmake --build $build) or copy it here"
done
use_nvrtc

export TANDEM_VGPU_THREADS=${TANDEM_VGPU_THREADS:-2}
name=$(nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
if [ "$device" != cuda ]; then
  name="$device, none, none"
elif [[ "$name" != *", 9.0, "* ]]; then
  die "the GPU ($name) must be a Hopper GPU: run this script on an H100 or H200"
fi
head_of_file() {
  echo "# By tools/gpu/record.sh; the format is explained in $1."
  echo "device ${name%%, *}"
  echo "driver ${name##*, }"
  echo "date $(date -u +%F)"
  echo "commit $(commit_of_build)"
}

# Runs each test into a separate file: <program> <Suite.Name> <flags...>
record() {
  local program=$1 test=$2 code=0
  shift 2
  TANDEM_RECORD=$scratch/$test.part TANDEM_RECORD_DEVICE=$device timeout 120 "$program" \
    --gtest_filter="$test" "$@" > "$scratch/$test.log" 2>&1 || code=$?
  grep -q "Running 1 test" "$scratch/$test.log" || code="not run"
  [ "$code" = 0 ] || printf 'FAILED (%s): %s\n' "$code" "$test" | tee "$scratch/$test.failed"
}
export -f record
export scratch device

mapfile -t tests < <("$instructions" --gtest_list_tests --gtest_filter='-Coverage.*:Recorded.*' |
  awk '/^[^ ].*\.$/ { suite = $1; next } /^  / { print suite $1 }')
[ ${#tests[@]} -gt 50 ] || die "$instructions (${#tests[@]} tests) must list more than 50 tests: build it again"
printf '%s\n' "${tests[@]}" | xargs -P "${JOBS:-8}" -I{} bash -c "record '$instructions' {}"
compiled=KernelsRecorded.SameAsARealHopper
record "$kernels" $compiled --device "$device"

gather() { # <file under the root> <page of its format> <tests...>
  local to=$root/$1 explained=$2
  shift 2
  mkdir -p "$(dirname "$to")"
  head_of_file "$explained" > "$to"
  for test in "$@"; do
    [ ! -e "$scratch/$test.part" ] || cat "$scratch/$test.part" >> "$to"
  done
  wc -lc "$to"
}
gather vgpu/tests/instructions/recorded/hopper.txt vgpu/tests/instructions/recording.h "${tests[@]}"
gather tests/kernels/recorded/hopper.txt tests/kernels/recorded_test.cpp $compiled

[ -z "${LOG:-}" ] || for test in "${tests[@]}" $compiled; do
  printf '==== %s\n' "$test"
  cat "$scratch/$test.log"
done > "$LOG"
for test in "${tests[@]}" $compiled; do
  [ ! -e "$scratch/$test.failed" ] || head -c 2000 "$scratch/$test.log"
done
grep -h '^DIFFERS' "$scratch"/*.log
printf '%s tests, %s failed, %s launches left something else than vgpu:h200\n' $((${#tests[@]} + 1)) \
  "$(find "$scratch" -name '*.failed' | wc -l)" "$(cat "$scratch"/*.log | grep -c '^DIFFERS')"
[ "$(find "$scratch" -name '*.failed' | wc -l)" = 0 ]
