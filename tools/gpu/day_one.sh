#!/usr/bin/env bash
# Checks in 20 minutes which parts of the kernels are right on a new GPU (B200, B300), and names the switch that avoids
# each failure. An H100, an H200 and vgpu:b200 run the experiments that apply to them. The page names the skipped ones.
#
#   tools/gpu/day_one.sh [<folder>] [--device cuda:0|vgpu:b200] [--out <folder>] [--only e1-one-cta,e4,...]
#                        [--full] [--mps] [--plant descriptor,n,barrier,swizzle,order,stall,fault]
#
# The folder is a build folder or an unpacked archive of tools/gpu/day_one/pack.sh; the default is the folder above this
# script. An archive needs a driver and bash: no compiler, no network, no Python. Each experiment is one process with a
# timeout, safest first. Each outcome is on disk before the next experiment starts, so the same command continues after
# an interruption. After a failure a tiny kernel must run; if it does not, the script stops and prints the page. The script
# changes no setting of the GPU and never resets it.
#
# Output: page.txt, page.html and a log of each experiment in --out (day_one.<device>). Exit code 1: something failed.
#   --full   ten times the launches; also runs tools/gpu/prove.sh and bench/sweep.py, which need python3, torch and a
#            checkout
#   --mps    starts an MPS server with pipes in --out for one experiment, and ends the server afterwards
#   --plant  makes experiments fail on purpose, to test this script
# Environment: TANDEM_NVRTC (default: the archive's, then as tools/gpu/prove.sh), TANDEM_SM100, TANDEM_CACHE_DIR.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$here/tools/gpu/common.sh"
build='' device=cuda:0 out='' only='' plant='' full='' mps=''
while [ $# -gt 0 ]; do
  case $1 in
    --device | --out | --only | --plant)
      [ $# -gt 1 ] || die "$1 must have a value: write one after the flag"
      declare "${1#--}=$2"
      shift
      ;;
    --full) full=yes ;;
    --mps) mps=yes ;;
    -*) die "the flag ($1) must be --device, --out, --only, --plant, --full or --mps: correct it" ;;
    *) build=$1 ;;
  esac
  shift
done
: "${build:=$here}" "${out:=day_one.${device//:/_}}"
program=$build/tools/gpu/day_one/day_one fuzz=$build/tests/support/tandem_fuzz
for file in "$program" "$fuzz"; do
  [ -x "$file" ] || die "$file must exist: build the target ${file##*/}, or unpack an archive of tools/gpu/day_one/pack.sh"
done
if [ -z "${TANDEM_NVRTC:-}" ] && [ -e "$build/nvrtc" ]; then
  TANDEM_NVRTC=$(find "$build/nvrtc" -name 'libnvrtc.so.1*' | head -n 1)
  export LD_LIBRARY_PATH=$build/nvrtc${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
[ ! -e "$build/commit" ] || export COMMIT=${COMMIT:-$(< "$build/commit")}
[ -n "${TANDEM_NVRTC:-}${VIRTUAL_ENV:-}" ] || use_nvrtc  # the library searches VIRTUAL_ENV
mkdir -p "$out" || die "--out ($out) must be a folder that can be written: pass another one"
export TANDEM_CACHE_DIR=${TANDEM_CACHE_DIR:-$out/cache}
proof="$(commit_of_build) on $device, planted: ${plant:-nothing}, TANDEM_SM100=${TANDEM_SM100:-}"
[ -e "$out/proof" ] || echo "$proof" > "$out/proof"
[ "$(< "$out/proof")" = "$proof" ] || die "$out (outcomes of $(< "$out/proof")) must belong to $proof: use another folder"

# Reduced counts of the fuzzer on a virtual GPU.
problems=60 gradients=40 full_factor=1
[ -z "$full" ] || full_factor=5
[[ $device != vgpu* ]] || problems=3 gradients=2

# name|seconds|title|what avoids a failure
experiments() {
  cat << 'LIST'
tiny|60|A tiny kernel|nothing: the driver or the GPU does not work
e13|240|E13 kernels compile, load, and have their registers|TANDEM_NVRTC=<the archive's nvrtc/libnvrtc.so.13>; another driver
e0|60|E0 fences and additions that the clock model charges|nothing: a measurement
e9|60|E9 loads of tensor memory|nothing: a measurement
e1-one-cta|60|E1 products of one CTA|TANDEM_DEVICE=cpu: no kernel of this GPU is right
e2-one-cta|60|E2 widths that are no multiple of 64, one CTA|not needed: the default uses multiples of 64; do not set exact_n
proof-forward|240|Random problems, forward|see the failed experiment below; else TANDEM_DEVICE=cpu
e3-products|90|E3 order of products without waits|TANDEM_SM100=wait_products
e1-two-ctas|60|E1 products of two CTAs|TANDEM_SM100=no_two_cta (head_dim above 192 or head_dim_v above 128: TANDEM_DEVICE=cpu)
e2-two-ctas|60|E2 widths that are no multiple of 64, two CTAs|not needed: the default uses multiples of 64; do not set exact_n
e14|60|E14 operands with the 64-byte swizzle, two CTAs|TANDEM_SM100=no_two_cta (only gradients of head_dim 129 to 192 use this swizzle)
proof-gradients|240|Random problems, gradients|see the failed experiments; else TANDEM_SM100=no_two_cta,wait_products,no_overlap
e3-calls|300|E3 same bits in thousands of backward calls|TANDEM_SM100=wait_products
e4|30|E4 commits without products|TANDEM_SM100=no_two_cta
e11|30|E11 all pairs of CTAs at once|TANDEM_SM100=no_two_cta if pairs are slower: results are right
e6|120|E6 semaphores when other work holds SMs|sm_limit: pass the number of free SMs
e6-green|120|E6 semaphores in a green context of 16 SMs|sm_limit: pass the number of SMs of the context
e6-mps|180|E6 semaphores under MPS|sm_limit: pass the number of SMs that MPS leaves to the process
e5|240|E5 back-to-back calls and graphs|TANDEM_SM100=no_overlap,no_two_cta
e7|150|E7 cluster launch control|TANDEM_SM100=no_clc
e8|150|E8 clocks of a backward iteration|nothing: a measurement
e10|30|E10 rate of two-CTA products|TANDEM_SM100=no_two_cta if a pair of 128 rows takes over 320 clocks
sweep|300|20 shapes of the sweep|see the log
e12|30|E12 clock and power under load|nothing: a measurement
LIST
  if [ -n "$plant" ]; then
    echo 'stall|8|A planted stall|nothing: planted'
    echo 'fault|60|A planted fault|nothing: planted'
  fi
  if [ -n "$full" ]; then
    echo 'full-proof|4000|The whole proof (tools/gpu/prove.sh)|see the log'
    echo 'full-sweep-forward|4000|The forward beside FlashAttention-4 and cuDNN (bench/sweep.py)|see the log'
    echo 'full-sweep-backward|4000|The backward beside them|see the log'
  fi
}

skipped_because() {
  echo "$1"
  exit 77
}

command_of() { # <name>: sets `command`
  local why=''
  if [[ $1 == full-* && $device == vgpu* ]]; then
    why='only a GPU runs the whole proof and the sweep'
  elif [[ $1 == full-sweep-* ]] && ! python3 -c 'import torch' > /dev/null 2>&1; then
    why='python3 must have torch: install it'
  fi
  if [ -n "$why" ]; then
    command=(skipped_because "$why")
    return
  fi
  case $1 in
    proof-forward) command=("$fuzz" --device "$device" --cases gpu --seed 1 --count "$problems" --seconds 150) ;;
    proof-gradients) command=("$fuzz" --device "$device" --cases backward --passes backward --seed 1 --count "$gradients" --seconds 150) ;;
    full-proof) command=("$here/tools/gpu/prove.sh" "$build" "$out/proof.json" --in "$out/proof-steps") ;;
    full-sweep-forward) command=(python3 "$here/bench/sweep.py" --json "$out/sweep-forward.json") ;;
    full-sweep-backward) command=(python3 "$here/bench/sweep.py" --backward --json "$out/sweep-backward.json") ;;
    *) command=("$program" "$1" --device "$device" --shapes "$here/tools/gpu/day_one/shapes.txt") ;;
  esac
  [ -z "$full" ] || [[ $1 == proof-* || $1 == full-* ]] || command+=(--scale 10)
  [ -z "$plant" ] || [[ $1 == proof-* || $1 == full-* ]] || command+=(--plant "$plant")
}

# Runs a command at most so many seconds. Sets `code`: 124 after a timeout, 125 if even SIGKILL does not end it.
bounded() { # <seconds> <log> <command...>
  local seconds=$1 log=$2 pid
  shift 2
  "$@" > "$log" 2>&1 &
  pid=$!
  for ((tenths = 0; tenths < 10 * seconds; ++tenths)); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  if kill -0 "$pid" 2>/dev/null; then
    kill -KILL "$pid" 2>/dev/null
    code=125
    for ((tenths = 0; tenths < 300; ++tenths)); do
      kill -0 "$pid" 2>/dev/null || { code=124 && break; }
      sleep 0.1
    done
    [ "$code" = 125 ] || wait "$pid" 2>/dev/null
  else
    wait "$pid"
    code=$?
  fi
}

recovers() {
  local code attempt
  for attempt in 1 2 3; do
    bounded 40 "$out/recovery.log" "$program" tiny --device "$device"
    [ "$code" != 0 ] || return 0
    [ "$code" != 125 ] || return 1
    sleep "$attempt"
  done
  return 1
}

# Runs a command as the only client of an MPS server, whose pipes are in --out. A client counts the server's GPUs from 0.
under_mps() { # <seconds> <log> <command...>
  local pipes
  pipes=$(mkdir -p "$out/mps" && cd "$out/mps" && pwd)
  export CUDA_MPS_PIPE_DIRECTORY=$pipes CUDA_MPS_LOG_DIRECTORY=$pipes
  if nvidia-cuda-mps-control -d > "$2" 2>&1; then
    export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30
    bounded "$1" "$2" env -u CUDA_VISIBLE_DEVICES "${@:3}"
    unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
    echo quit | timeout 30 nvidia-cuda-mps-control > "$pipes/quit.log" 2>&1
  else
    echo 'nvidia-cuda-mps-control does not start' >> "$2"
    code=77
  fi
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

# Writes <name>.outcome: verdict, seconds, and the sentence.
run_one() { # <name> <seconds>
  local name=$1 seconds=$2 start=$SECONDS verdict text code=0 command
  command_of "$name"
  if [ "$name" = e6-mps ] && [ -n "$mps" ]; then
    under_mps "$seconds" "$out/$name.log" "${command[@]}"
  else
    bounded "$seconds" "$out/$name.log" "${command[@]}"
  fi
  case $code in
    0) verdict=ok ;;
    3) verdict=measured ;;
    77) verdict=skipped ;;
    *) verdict=FAILED ;;
  esac
  text=$(tail -n 1 "$out/$name.log" | cut -c 1-400)
  [ "$code" != 124 ] || text="stopped after $seconds s${text:+: $text}"
  [ "$code" != 125 ] || text="the process cannot be ended after $seconds s${text:+: $text}"
  [ "$code" -lt 128 ] || text="signal $((code - 128)) ended it${text:+: $text}"
  printf '%s\n%s\n%s\n' "$verdict" $((SECONDS - start)) "$text" > "$out/$name.part"
  mv "$out/$name.part" "$out/$name.outcome"
  printf '%-9s %s: %s\n' "$verdict" "$name" "$text"
  [ "$verdict" = FAILED ] || return 0
  recovers && return 0
  echo "the GPU does not run a tiny kernel after $name" > "$out/stopped"
  return 1
}

stopped=''
rm -f "$out/stopped"
while IFS='|' read -r name seconds _ _; do
  if [ -n "$only" ] && [[ ",$only," != *",$name,"* ]]; then continue; fi
  [ ! -e "$out/$name.outcome" ] || continue
  run_one "$name" $((full_factor * seconds)) < /dev/null || { stopped=yes && break; }
done < <(experiments)
experiments > "$out/experiments"
bash "$here/tools/gpu/day_one/page.sh" "$out" "$proof"
cat "$out/page.txt"
! grep -qx FAILED "$out"/*.outcome && [ -z "$stopped" ]
