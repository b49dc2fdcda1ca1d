#!/usr/bin/env bash
# The whole proof of the forward that needs no GPU: on a virtual one, with its checker on and each problem under several
# schedules. The outcome goes to a JSON file whose fields docs/results/README.md explains; what fails is printed with the
# command that repeats it.
#
#   tools/gpu/prove_virtual.sh <build folder> [<file.json>] [--device vgpu:b200|vgpu:h200] [--only grid,product,fuzz]
#
# The build folder may come from another machine: tests/kernels/kernels_test and tests/support/tandem_fuzz are all that
# is read of it. Environment:
#   TANDEM_NVRTC, TANDEM_CACHE_DIR, COMMIT  as of tools/gpu/prove.sh
#   SCHEDULES, FUZZ  under which each problem runs (3: all early, all late, random); random problems (2000)
#   JOBS, SECONDS_EACH  processes (one a core); the most that a step may take (1800)
#   TAKE             of the shares that a step is cut into, 8 a process, so many are done: 1 to try it (all)
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$here/tools/gpu/proof.sh"

device=vgpu:b200 only=''
places=()
while [ $# -gt 0 ]; do
  case $1 in
    --only | --device)
      [ $# -gt 1 ] || die "$1 needs a value"
      declare "${1#--}=$2"
      shift
      ;;
    -*) die "unknown flag: $1" ;;
    *) places+=("$1") ;;
  esac
  shift
done
case $device in
  vgpu:b200) name=blackwell ;;
  vgpu:h200) name=hopper-virtual ;;
  *) die "--device must be vgpu:b200 or vgpu:h200, not $device" ;;
esac
build=${places[0]:-} json=${places[1]:-$here/docs/results/$name-forward-proof.json}
[ -n "$build" ] || die "usage: tools/gpu/prove_virtual.sh <build folder> [<file.json>] [--device <model>] [--only <steps>]"
tests=$build/tests/kernels/kernels_test fuzz=$build/tests/support/tandem_fuzz
for file in "$tests" "$fuzz"; do
  [ -e "$file" ] || die "$file is not there: build it (cmake --build $build) or carry it here"
done
use_nvrtc
export TANDEM_CACHE_DIR=${TANDEM_CACHE_DIR:-$scratch/cache}
export SECONDS_EACH=${SECONDS_EACH:-1800}
jobs=${JOBS:-$(nproc)} schedules=${SCHEDULES:-3} problems=${FUZZ:-2000}
shares=$((8 * jobs)) # of a step: more than processes, since some take longer

# The step's share n, whose output shows the problem under way before the outcome.
share() { # <step> <n>
  local each=$(((problems + shares - 1) / shares)) first code=0 log=$scratch/$1.$2
  first=$((each * $2))
  local judge=("$tests" --device "$device" --schedules "$schedules" --part "$2/$shares" --gtest_brief=1)
  case $1 in
    grid) "${judge[@]}" ;;
    product) "${judge[@]}" --gtest_also_run_disabled_tests '--gtest_filter=KernelsProduct.*' ;;
    fuzz)
      [ "$first" -lt "$problems" ] || return 0
      [ $((first + each)) -le "$problems" ] || each=$((problems - first))
      "$fuzz" --device "$device" --schedules "$schedules" --seed $((1 + first)) --count "$each" --threads 1 --verbose
      ;;
  esac > "$log" 2>&1 || code=$?
  [ "$code" = 0 ] || echo "$code" > "$log.code"
}

# All shares in processes side by side, then what went wrong in any of them, and the counts.
all_shares() { # <step>
  local code=0 file
  trap : TERM # the time is up: what there is is reported
  seq 0 $((${TAKE:-shares} - 1)) | xargs -P "$jobs" -I{} bash -c 'share "$@"' share "$1" {}
  for file in "$scratch/$1".*.code; do
    [ -e "$file" ] || continue
    code=$(< "$file")
    [ "$code" != 77 ] || break
    grep -vE '^case: |^--|^refused: |^\[|^Note: |^vgpu:|: Failure$|^Failed$' "${file%.code}"
    [ "$code" -ge 124 ] || continue
    echo "a process ended with $code; its last problem: $(grep -E '^(case: |--)' "${file%.code}" | tail -n 1)"
  done
  cat "$scratch/$1".*[0-9] | awk -v jobs="$jobs" -v schedules="$schedules" '
    /^(case: |--)/ { cases++ }
    /^  repeat: / { failed++ }
    /problems, / { refused += $4 }
    /NOT TESTED|NOT RUN/ { why = $0 }
    END {
      if (why != "") print why
      printf "%d problems, %d refused, %d failed, each under %d schedules, in %d processes\n", cases, refused, failed,
        schedules, jobs
    }'
  return "$code"
}
export -f share all_shares
export scratch tests fuzz device schedules problems shares jobs

for name in grid product fuzz; do
  if [ -n "$only" ] && [[ ",$only," != *",$name,"* ]]; then continue; fi
  step "$name" ' problems, |NOT TESTED|NOT RUN' bash -c "all_shares $name"
done
finish "$json" "$device" none
