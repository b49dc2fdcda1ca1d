#!/usr/bin/env bash
# Everything that only a GPU can prove about the forward, on this machine; the outcome goes to a JSON file whose fields
# docs/results/README.md explains.
#
#   tools/gpu/prove.sh <build folder> [<file.json>] [--only tests,fuzz,threads,processes,memcheck,racecheck,synccheck]
#
# The build folder may come from another machine: tests/kernels/{kernels_test,kernels_worker,libcounting_nvrtc.so} and
# tests/support/tandem_fuzz are all that is read of it. Environment:
#   TANDEM_NVRTC      the compiler; else the newest one of python3's site-packages, CUDA_HOME and /usr/local/cuda
#   TANDEM_CACHE_DIR  where compiled kernels stay; else a new folder, so that all are compiled
#   COMMIT            what was built, where this is no checkout
#   FUZZ, SECONDS_EACH  random problems (2000); the most that a step may take (900)
set -uo pipefail
die() {
  printf '%s\n' "$*" >&2
  exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${BUILD:-} json=$here/docs/results/hopper-forward-proof.json only=''
places=()
while [ $# -gt 0 ]; do
  case $1 in
    --only)
      only=${2:?--only needs names}
      shift
      ;;
    -*) die "unknown flag: $1" ;;
    *) places+=("$1") ;;
  esac
  shift
done
build=${places[0]:-$build} json=${places[1]:-$json}
[ -n "$build" ] || die "usage: tools/gpu/prove.sh <build folder> [<file.json>] [--only <steps>]"
tests=$build/tests/kernels/kernels_test fuzz=$build/tests/support/tandem_fuzz
worker=$build/tests/kernels/kernels_worker counting=$build/tests/kernels/libcounting_nvrtc.so
for file in "$tests" "$fuzz" "$worker" "$counting"; do
  [ -e "$file" ] || die "$file is not there: build it (cmake --build $build) or carry it here"
done
counting=$(realpath "$counting")

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

find_nvrtc() {
  {
    python3 -c 'import site, sys; print(*site.getsitepackages(), site.getusersitepackages(), *sys.path, sep="/nvidia\n")'
    printf '%s\n' "${CUDA_HOME:-/usr/local/cuda}/lib64" /usr/local/cuda/lib64
  } 2>/dev/null | while read -r folder; do
    [ ! -d "$folder" ] || find -L "$folder" -maxdepth 3 -name 'libnvrtc.so.1[0-9]' 2>/dev/null
  done | awk -F. '{ print $NF, NR, $0 }' | sort -k1,1nr -k2,2n | head -n 1 | cut -d' ' -f3-
}
export TANDEM_NVRTC=${TANDEM_NVRTC:-$(find_nvrtc)}
[ -n "$TANDEM_NVRTC" ] || die "no NVRTC found: pip install nvidia-cuda-nvrtc, or set TANDEM_NVRTC to libnvrtc.so"
export TANDEM_CACHE_DIR=${TANDEM_CACHE_DIR:-$scratch/cache}

steps=() failures=0
record() { steps+=("$@"); } # <name> <command> <verdict> <seconds> <summary>

# Runs a command, shows what it prints where it fails, and keeps its last line of the pattern.
step() { # <name> <pattern of the summary> <command...>
  local name=$1 pattern=$2 start=$SECONDS verdict=ok code=0 summary
  shift 2
  printf '\n==== %s: %s\n' "$name" "$*"
  timeout "${SECONDS_EACH:-900}" "$@" > "$scratch/log" 2>&1 || code=$?
  if [ "$code" = 77 ]; then
    verdict='not run'
  elif [ "$code" != 0 ]; then
    verdict=FAILED
    failures=$((failures + 1))
  fi
  [ "$verdict" = ok ] || grep -vE '^\[ +(RUN|OK) +\]' "$scratch/log" | head -n 60
  summary=$(grep -E "$pattern" "$scratch/log" | tail -n 1)
  [ "$code" != 124 ] || summary="stopped after ${SECONDS_EACH:-900} s"
  printf '%s, %d s: %s\n' "$verdict" $((SECONDS - start)) "$summary"
  record "$name" "$*" "$verdict" $((SECONDS - start)) "$summary"
}

# Processes that start at once with no kernel compiled; good when one of them compiles and the others take it from there.
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

# The tests in as many processes as there are cores, up to 12: they compile and judge on the host.
shards() {
  local pids=() code=0 count
  count=$(nproc)
  [ "$count" -le 12 ] || count=12
  for i in $(seq 0 $((count - 1))); do
    GTEST_TOTAL_SHARDS=$count GTEST_SHARD_INDEX=$i "$tests" --gtest_brief=1 > "$scratch/shard.$i" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
  cat "$scratch"/shard.*
  echo "$(awk '/\[  PASSED  \]/ { n += $4 } END { print n + 0 }' "$scratch"/shard.*) tests passed in $count processes"
  return "$code"
}
export -f shards
export tests

sanitize() { # <tool> <flags...>
  local program
  for program in "$(command -v compute-sanitizer)" {"${CUDA_HOME:-/usr/local/cuda}",/usr/local/cuda}/bin/compute-sanitizer; do
    [ ! -x "$program" ] || break
  done
  if [ ! -x "$program" ]; then
    printf '\n==== %s\nnot run: compute-sanitizer is not on this machine\n' "$1"
    record "$1" "compute-sanitizer --tool $1" "not run" 0 "compute-sanitizer is not on this machine"
    return
  fi
  step "$1" 'ERROR SUMMARY|RACECHECK SUMMARY' "$program" --tool "$@" --error-exitcode 9 --print-limit 20 "$tests" \
    '--gtest_filter=*.Small'
}

for name in tests fuzz threads processes memcheck racecheck synccheck; do
  if [ -n "$only" ] && [[ ",$only," != *",$name,"* ]]; then continue; fi
  case $name in
    tests) step tests ' tests passed in |NOT TESTED' bash -c shards ;;
    fuzz) step fuzz ' problems, |NOT RUN' "$fuzz" --device cuda --seed 1 --count "${FUZZ:-2000}" ;;
    threads) step threads ' compiled$' bash -c 'cold 1 64' ;;
    processes) step processes ' compiled$' bash -c 'cold 8 8' ;;
    memcheck) sanitize memcheck --leak-check no ;;
    *) sanitize "$name" ;;
  esac
done

commit=${COMMIT:-$(git -C "$here" describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null || echo unknown)}
device=$(nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
python3 - "$json" "$commit" "$device" "$TANDEM_NVRTC" "$failures" "${steps[@]}" << 'PYTHON'
import ctypes, datetime, json, pathlib, sys

path, commit, device, nvrtc, failures, *flat = sys.argv[1:]
name, capability, driver = [x.strip() for x in device.split(",")] if device else ["none", "none", "none"]
major, minor = ctypes.c_int(), ctypes.c_int()
ctypes.CDLL(nvrtc).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
fields = ("name", "command", "verdict", "seconds", "summary")
steps = [dict(zip(fields, flat[n : n + 5])) for n in range(0, len(flat), 5)]
for step in steps:
    step["seconds"] = int(step["seconds"])
proof = {
    "commit": commit,
    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "device": f"{name}, compute capability {capability}",
    "driver": driver,
    "nvrtc": f"{major.value}.{minor.value}",
    "steps": steps,
    "false_alarms": [],
    "failures": int(failures),
}
pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
pathlib.Path(path).write_text(json.dumps(proof, indent=2) + "\n")
PYTHON
printf '\n%d of %d steps failed; written to %s\n' "$failures" $((${#steps[@]} / 5)) "$json"
[ "$failures" = 0 ]
