#!/usr/bin/env bash
# Runs the whole proof of the forward on a virtual GPU, under its checker and several schedules. A failure is printed
# with the command that repeats it. The outcome is a JSON file whose fields docs/results/README.md explains.
#
#   tools/gpu/prove_virtual.sh <build folder> [<file.json>] [--device vgpu:b200|vgpu:h200] [--in <folder>] [--share I/N]
#                              [--only grid,product,fuzz,deletions,schedules,backward,gradients]
#
# Gradients are a separate proof: --only backward,gradients, and a file.
# Steps consist of shares. --in keeps their outcomes; a finished share does not run again. --share runs every N-th share
# from I on: join the folders of N machines, then run without it. The file is written when no share is missing.
#
# The build folder may come from another machine: tests/kernels/kernels_test, tests/support/tandem_fuzz and
# vgpu/tests/mutation/vgpu_mutation_test are the only files that the script reads. Environment:
#   TANDEM_NVRTC, TANDEM_CACHE_DIR, COMMIT   as of tools/gpu/prove.sh
#   SCHEDULES, FUZZ   under which each problem runs (3: all early, all late, random); random problems (2000)
#   JOBS, SECONDS_EACH   processes (one a core); the most that a share may take (1800)
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$here/tools/gpu/proof.sh"

device=vgpu:b200 only=grid,product,fuzz,deletions,schedules in='' share=0/1
places=()
while [ $# -gt 0 ]; do
  case $1 in
    --only | --device | --in | --share)
      [ $# -gt 1 ] || die "$1 must have a value: write one after the flag"
      declare "${1#--}=$2"
      shift
      ;;
    -*) die "the flag ($1) must be --device, --in, --share or --only: correct it" ;;
    *) places+=("$1") ;;
  esac
  shift
done
case $device in
  vgpu:b200) name=blackwell ;;
  vgpu:h200) name=hopper-virtual ;;
  *) die "--device ($device) must be vgpu:b200 or vgpu:h200: pass one of them" ;;
esac
first=${share%/*} every=${share#*/}
if ! [[ $share =~ ^[0-9]+/[0-9]+$ && $first -lt $every ]]; then die "--share ($share) must be I/N with I from 0 to N - 1: pass such a share"; fi
build=${places[0]:-} json=${places[1]:-$here/docs/results/$name-forward-proof.json}
[ -n "$build" ] || die "usage: tools/gpu/prove_virtual.sh <build folder> [<file.json>] [--device <model>] [--in <folder>]" \
  "[--share I/N] [--only <steps>]"
tests=$build/tests/kernels/kernels_test fuzz=$build/tests/support/tandem_fuzz
mutation=$build/vgpu/tests/mutation/vgpu_mutation_test
for file in "$tests" "$fuzz" "$mutation"; do
  [ -e "$file" ] || die "$file must exist: build it (cmake --build $build) or copy it here"
done
use_nvrtc
export TANDEM_CACHE_DIR=${TANDEM_CACHE_DIR:-$scratch/cache} SECONDS_EACH=${SECONDS_EACH:-1800}
jobs=${JOBS:-$(nproc)} schedules=${SCHEDULES:-3} problems=${FUZZ:-2000}

# The outcomes of another proof must not be counted.
in=${in:-$scratch/shares}
mkdir -p "$in"
proof="$(commit_of_build), $device, $schedules schedules, $problems random problems"
[ -e "$in/proof" ] || echo "$proof" > "$in/proof"
[ "$(< "$in/proof")" = "$proof" ] || die "$in (shares of $(< "$in/proof")) must belong to $proof: use another folder"

# Prints the long cases of vgpu_mutation_test for this device, chosen by their names.
cases() { # <suite>
  local which=-v
  [ "$device" != vgpu:b200 ] || which=-e
  "$mutation" --gtest_list_tests --gtest_filter="*$1.DISABLED_*" | awk '/^[^ ]/ { suite = $1; next } { print suite $1 }' |
    grep -i $which blackwell
}
shares_of() { # <step>: prints the number of its shares
  case $1 in
    deletions) cases Deletion | wc -l ;;
    schedules) cases Clean | wc -l ;;
    *) echo 64 ;;
  esac
}

# Runs share n of a step. The output shows each problem before its outcome.
run_share() { # <step> <n> <shares>
  local each=$(((problems + $3 - 1) / $3)) from fuzz_flags=()
  local judge=("$tests" --device "$device" --schedules "$schedules" --part "$2/$3" --gtest_brief=1)
  case $1 in
    grid) "${judge[@]}" ;;
    product) "${judge[@]}" --gtest_also_run_disabled_tests '--gtest_filter=KernelsExhaustive.*_EveryFeature*' ;;
    gradients)
      "${judge[@]}" --passes backward --gtest_also_run_disabled_tests '--gtest_filter=KernelsExhaustive.*_Gradients*'
      ;;
    fuzz | backward)
      from=$((each * $2))
      [ "$from" -lt "$problems" ] || return 0
      [ $((from + each)) -le "$problems" ] || each=$((problems - from))
      [ "$1" = fuzz ] || fuzz_flags=(--cases backward)
      "$fuzz" "${fuzz_flags[@]}" --device "$device" --schedules "$schedules" --seed $((1 + from)) --count "$each" \
        --threads 1 --verbose
      ;;
    deletions | schedules)
      local suite=Deletion
      [ "$1" = deletions ] || suite=Clean
      "$mutation" --gtest_also_run_disabled_tests --gtest_filter="$(cases $suite | sed -n "$(($2 + 1))p")"
      ;;
  esac
}
# Writes <step>.<n>, its output, and <step>.<n>.done: exit code and seconds.
share() { # <step> <n> <shares>
  local log=$in/$1.$2 code=0 start=$SECONDS
  [ ! -e "$log.done" ] || return 0
  timeout "$SECONDS_EACH" bash -c 'run_share "$@"' share "$@" > "$log" 2>&1 || code=$?
  echo "$code $((SECONDS - start))" > "$log.done"
}
export -f cases run_share share
export in tests fuzz mutation device schedules problems

# Summarises the shares of a step.
summary_of() { # <step>
  cat "$in/$1".*[0-9] | awk -v step="$1" -v schedules="$schedules" '
    /^(case: |--)/ { cases++ }
    /^  repeat: / { failed++ }
    /problems, / { refused += $4 }
    /instructions left out in turn/ { # behind a name of one word or two
      for (i = 2; i <= NF; ++i) {
        if ($i == "instructions") left_out += $(i - 1)
        if ($i ~ /^unnoticed/) unnoticed += $(i - 1)
      }
    }
    /^\[       OK \]/ { passed++ }
    /NOT TESTED|NOT RUN/ { why = $0 }
    END {
      if (why != "") print why
      else if (step == "deletions") printf "%d instructions left out in turn, %d unnoticed, each with its reason; %d kernels\n",
        left_out, unnoticed, passed
      else if (step == "schedules") printf "%d problems, each right and nothing found under 100 schedules\n", passed
      else printf "%d problems, %d refused, %d failed, each under %d schedules\n", cases, refused, failed, schedules
    }'
}

missing=0
for step in grid product fuzz backward gradients deletions schedules; do
  [[ ",$only," = *",$step,"* ]] || continue
  shares=$(shares_of $step)
  printf '\n==== %s: %d shares\n' $step "$shares"
  seq "$first" "$every" $((shares - 1)) | xargs -P "$jobs" -I{} bash -c 'share "$@"' share $step {} "$shares"
  verdict=ok seconds=0 left=0
  for ((n = 0; n < shares; ++n)); do
    log=$in/$step.$n
    if ! read -r code took 2> /dev/null < "$log.done"; then
      left=$((left + 1))
      continue
    fi
    seconds=$((seconds + took))
    case $code in
      0) continue ;;
      77) verdict='not run' ;;
      *) verdict=FAILED ;;
    esac
    grep -vE '^case: |^--|^refused: |^\[|^Note: |^vgpu:|: Failure$|^Failed$' "$log" | head -n 60
    [ "$code" -lt 124 ] || echo "share $n ended with $code; its last problem: $(grep -E '^(case: |--)' "$log" | tail -n 1)"
  done
  missing=$((missing + left))
  printf '%s, %d s of all processes, %d shares missing: %s\n' "$verdict" $seconds $left "$(summary_of $step)"
  [ "$verdict" != FAILED ] || failures=$((failures + 1))
  record $step "tools/gpu/prove_virtual.sh --device $device --only $step" "$verdict" $seconds "$(summary_of $step)"
done
if [ $missing -gt 0 ]; then
  printf '\n%d shares are not done yet; %s is written when none is missing.\n' $missing "$json"
  [ $failures = 0 ]
  exit
fi
finish "$json" "$device" none
