# Functions that run a proof in steps and write its JSON file, whose fields docs/results/README.md explains. Other
# scripts source this file. Environment: COMMIT, SECONDS_EACH (tools/gpu/prove.sh). The caller sets `kept`, a folder or
# nothing: a step whose outcome is in the folder does not run again.
# shellcheck shell=bash
# shellcheck source=tools/gpu/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

steps=() failures=0
record() { steps+=("$@"); } # <name> <command> <verdict> <seconds> <summary>

# Runs a command, prints its output if it fails, and keeps the last line that matches the pattern.
step() { # <name> <pattern of the summary> <command...>
  local name=$1 pattern=$2 start=$SECONDS verdict=ok code=0 summary before
  shift 2
  if [ -n "${kept:-}" ] && [ -e "$kept/$name" ]; then
    mapfile -t before < "$kept/$name"
    printf '\n==== %s: done before, %s\n' "$name" "${before[2]}"
    [ "${before[2]}" != FAILED ] || failures=$((failures + 1))
    record "${before[@]}"
    return
  fi
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
  [ "$code" != 124 ] || summary="stopped after ${SECONDS_EACH:-900} s${summary:+: $summary}"
  printf '%s, %d s: %s\n' "$verdict" $((SECONDS - start)) "$summary"
  before=("$name" "$*" "$verdict" $((SECONDS - start)) "$summary")
  record "${before[@]}"
  [ -z "${kept:-}" ] || printf '%s\n' "${before[@]}" > "$kept/$name"
}

# Writes the file and exits with the verdict.
finish() { # <file.json> <device> <driver>
  python3 - "$1" "$(commit_of_build)" "$2" "$3" "$TANDEM_NVRTC" "$failures" "${steps[@]}" << 'PYTHON'
import ctypes, datetime, json, pathlib, sys

path, commit, device, driver, nvrtc, failures, *flat = sys.argv[1:]
major, minor = ctypes.c_int(), ctypes.c_int()
if nvrtc != "none":
    ctypes.CDLL(nvrtc).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
fields = ("name", "command", "verdict", "seconds", "summary")
steps = [dict(zip(fields, flat[n : n + 5])) for n in range(0, len(flat), 5)]
for step in steps:
    step["seconds"] = int(step["seconds"])
proof = {
    "commit": commit,
    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "device": device,
    "driver": driver,
    "nvrtc": nvrtc if nvrtc == "none" else f"{major.value}.{minor.value}",
    "steps": steps,
    "false_alarms": [],
    "failures": int(failures),
}
pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
pathlib.Path(path).write_text(json.dumps(proof, indent=2) + "\n")
PYTHON
  printf '\n%d of %d steps failed; written to %s\n' "$failures" $((${#steps[@]} / 5)) "$1"
  [ "$failures" = 0 ]
}
