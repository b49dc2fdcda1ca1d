#!/usr/bin/env bash
# Runs every proof about the kernels that needs a GPU. The script writes a JSON file whose fields docs/results/README.md
# explains: docs/results/hopper-proof.json for a Hopper GPU, blackwell-gpu-proof.json for a Blackwell one.
#
#   tools/gpu/prove.sh <build folder> [<file.json>] [--only tests,fuzz,gradients,threads,processes,large,
#                       large-memcheck,memcheck,racecheck,races,race-minimal,synccheck]
#                      [--in <folder>]
#
# --in keeps the outcome of each step; 500 random problems are one step. A finished step does not run again, so the same
# command continues after an interruption. Compilers keep all cores busy, so that steps at once gain nothing.
#
# The build folder may come from another machine: tests/kernels/{kernels_test,kernels_worker,libcounting_nvrtc.so} and
# tests/support/tandem_fuzz are the only files that the script reads, and src/libtandem.so.0 for the large shapes.
# Environment:
#   TANDEM_NVRTC      the compiler; else the newest one of python3's site-packages, CUDA_HOME and /usr/local/cuda
#   TANDEM_CACHE_DIR  where compiled kernels stay; else a new folder, so that all are compiled
#   COMMIT            the commit of the build, if this is no checkout
#   FUZZ, SECONDS_EACH  random problems of each pass (2000); the most that a step may take (900)
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$here/tools/gpu/proof.sh"
build=${BUILD:-} json='' only='' kept=''
places=()
while [ $# -gt 0 ]; do
  case $1 in
    --only)
      only=${2:?--only must have names: write them after the flag}
      shift
      ;;
    --in)
      kept=${2:?--in must have a folder: write it after the flag}
      mkdir -p "$kept"
      shift
      ;;
    -*) die "the flag ($1) must be --only or --in: correct it" ;;
    *) places+=("$1") ;;
  esac
  shift
done
build=${places[0]:-$build} json=${places[1]:-$json}
[ -n "$build" ] || die "usage: tools/gpu/prove.sh <build folder> [<file.json>] [--only <steps>]"
tests=$build/tests/kernels/kernels_test fuzz=$build/tests/support/tandem_fuzz
worker=$build/tests/kernels/kernels_worker counting=$build/tests/kernels/libcounting_nvrtc.so
for file in "$tests" "$fuzz" "$worker" "$counting"; do
  [ -e "$file" ] || die "$file must exist: build it (cmake --build $build) or copy it here"
done
counting=$(realpath "$counting")
# The outcomes of another proof must not be counted.
if [ -n "$kept" ]; then
  proof="$(commit_of_build), ${FUZZ:-2000} random problems"
  [ -e "$kept/proof" ] || echo "$proof" > "$kept/proof"
  [ "$(< "$kept/proof")" = "$proof" ] || die "$kept (steps of $(< "$kept/proof")) must belong to $proof: use another folder"
fi

use_nvrtc
export TANDEM_CACHE_DIR=${TANDEM_CACHE_DIR:-$scratch/cache}

# Starts processes together without a compiled kernel. One process must compile the kernel, and the rest must read it.
cold() { # <processes> <threads of each>
  local pids=() code=0 compiled
  : > "$scratch/count"
  rm -rf "$scratch/cold"
  for _ in $(seq "$1"); do
    TANDEM_TEST_NVRTC=$TANDEM_NVRTC TANDEM_TEST_COUNT=$scratch/count TANDEM_CACHE_DIR=$scratch/cold \
      env TANDEM_NVRTC="$counting" "$worker" "$2" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
  compiled=$(stat -c %s "$scratch/count")
  echo "$1 processes of $2 threads: $compiled compiled"
  [ "$code" = 0 ] || return "$code"
  [ "$compiled" = 1 ]
}
export -f cold
export scratch counting worker

# Runs the tests in one process per core, up to 20, because they compile and compare on the host.
shards() {
  local pids=() failed=() code=0 count
  count=$(nproc)
  [ "$count" -le 20 ] || count=20
  for i in $(seq 0 $((count - 1))); do
    GTEST_TOTAL_SHARDS=$count GTEST_SHARD_INDEX=$i "$tests" --gtest_brief=1 > "$scratch/shard.$i" 2>&1 &
    pids+=($!)
  done
  for i in "${!pids[@]}"; do
    wait "${pids[i]}" && continue
    code=$?
    printf 'process %d of %d ended with %d\n' "$i" "$count" "$code"
    grep -hE '^\[  FAILED  \] [A-Z]' "$scratch/shard.$i"
    failed+=("$scratch/shard.$i")
  done
  [ ${#failed[@]} = 0 ] || cat "${failed[@]}"
  echo "$(awk '/\[  PASSED  \]/ { n += $4 } END { print n + 0 }' "$scratch"/shard.*) tests passed in $count processes"
  return "$code"
}
export -f shards
export tests

# Runs random problems in several steps.
random() { # <name> <cases>
  local all=${FUZZ:-2000} each=500 first
  for ((first = 1; first <= all; first += each)); do
    [ $((first + each)) -le $((all + 1)) ] || each=$((all - first + 1))
    step "$1-$first" ' problems, |NOT RUN' "$fuzz" --device cuda --lengths 8 --cases "$2" --seed "$first" --count "$each"
  done
}

# Sets `found`, the path of one of CUDA's programs, or prints and records that the machine lacks it.
find_program() { # <step> <program>
  for found in "$(command -v "$2")" {"${CUDA_HOME:-/usr/local/cuda}",/usr/local/cuda}/bin/"$2"; do
    [ ! -x "$found" ] || return 0
  done
  printf '\n==== %s\nnot run: %s is not on this machine\n' "$1" "$2"
  record "$1" "$2" "not run" 0 "$2 is not on this machine"
  return 1
}

sanitize() { # <step> <tool> <flags and command...>
  local name=$1
  shift
  find_program "$name" compute-sanitizer || return 0
  step "$name" 'ERROR SUMMARY|RACECHECK SUMMARY' "$found" --error-exitcode 9 --print-limit 20 --tool "$@"
}

# Every report on forced schedules, pages, splits and cascades must be a known one.
sanitizer='' nvcc=''
races() {
  TANDEM_LINE_INFO=1 "$sanitizer" --tool racecheck --racecheck-report analysis --print-limit 1000 \
    "$tests" '--gtest_filter=KernelsSchedules.*:KernelsPages.*:KernelsSplits.*:KernelsCascade.*' > "$scratch/races" 2>&1
  grep -E '^\[  FAILED|RACECHECK SUMMARY' "$scratch/races"
  grep -q '^\[  PASSED' "$scratch/races" && python3 "$here/tools/gpu/race_reports.py" "$scratch/races"
}
# race_minimal shows which releases racecheck does not follow.
minimal_races() {
  local release count
  "$nvcc" -arch=sm_90a -cudart static -o "$scratch/race_minimal" "$here/tools/gpu/race_minimal.cu" || return
  for release in all warp barrier bulk; do
    "$scratch/race_minimal" "$release" || return
    count=$("$sanitizer" --tool racecheck "$scratch/race_minimal" "$release" | sed -n 's/.*SUMMARY: \([0-9]*\).*/\1/p')
    echo "reports on race_minimal $release: ${count:-none}"
    if [ "$release" = all ]; then [ "${count:-0}" = 0 ]; else [ "${count:-0}" -gt 0 ]; fi || return
  done
}
export -f races minimal_races
export here

# Checks random large shapes, with guard bands and float64; 40 of them under memcheck. The proofs need torch.
large() { # <step> <flags of large_shapes.py...>
  local name=$1
  shift
  if ! python3 -c 'import torch' 2>/dev/null; then
    record "$name" "tools/gpu/large_shapes.py $*" "not run" 0 "python3 has no torch on this machine"
  elif [ "$name" = large ]; then
    step large ' shapes, ' python3 "$here/tools/gpu/large_shapes.py" "$@"
  else
    sanitize "$name" memcheck python3 "$here/tools/gpu/large_shapes.py" "$@"
  fi
}

export TANDEM_LIBRARY=${TANDEM_LIBRARY:-$build/src/libtandem.so.0}
for name in tests fuzz gradients threads processes large large-memcheck memcheck racecheck races race-minimal synccheck; do
  if [ -n "$only" ] && [[ ",$only," != *",$name,"* ]]; then continue; fi
  case $name in
    tests) step tests ' tests passed in |NOT TESTED' bash -c shards ;;
    fuzz) random fuzz gpu ;;
    gradients) random gradients backward ;;
    threads) step threads ' compiled$' bash -c 'cold 1 64' ;;
    processes) step processes ' compiled$' bash -c 'cold 8 8' ;;
    large) large large --seed 1 --count 300 ;;
    large-memcheck) large large-memcheck --bounds-only --seed 1001 --count 40 ;;
    races)
      find_program races compute-sanitizer && export sanitizer=$found &&
        step races 'reports explained' bash -c races
      ;;
    race-minimal)
      find_program race-minimal compute-sanitizer && export sanitizer=$found &&
        find_program race-minimal nvcc && export nvcc=$found &&
        step race-minimal 'race_minimal' bash -c minimal_races
      ;;
    memcheck) sanitize memcheck memcheck --leak-check no "$tests" '--gtest_filter=*.Small' ;;
    *) sanitize "$name" "$name" "$tests" '--gtest_filter=*.Small' ;;
  esac
done

device=$(nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
IFS=, read -r name capability driver <<< "${device:-none,none,none}"
case $capability in
  *10.*) of=blackwell-gpu ;;
  *) of=hopper ;;
esac
: "${json:=$here/docs/results/$of-proof.json}"
finish "$json" "$name, compute capability ${capability# }" "${driver# }"
