#!/bin/sh
# Builds every fuzz target (Clang 16, libFuzzer, address and undefined-behaviour sanitizers) and runs each for at least
# SECONDS from a copy of its kept corpus. A crash leaves its input in the build folder, prints it, and fails.
#
#   tests/fuzz/run.sh [SECONDS]            default 60
#   BUILD=folder tests/fuzz/run.sh 10      another build folder than build/asan
set -eu
seconds=${1:-60}
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD:-$root/build/asan}

cd "$root"
log=$(mktemp)
work=$(mktemp -d)
trap 'rm -rf "$log" "$work"' EXIT
trap 'exit 130' INT TERM
if ! { cmake --preset asan -B "$build" && cmake --build "$build" --target fuzzers; } >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi

export LLVM_PROFILE_FILE="$work/%p.lines" # the coverage build counts lines; nothing reads these files

# All fuzzers run at once and share the cores.
for corpus in tests/fuzz/corpus/*.tar.gz; do
  name=$(basename "$corpus" .tar.gz)
  tar -xzf "$corpus" -C "$work"
  (
    code=0
    "$build/tests/fuzz/${name}_fuzzer" -max_total_time="$seconds" -max_len=4096 -timeout=20 -rss_limit_mb=2048 \
      -artifact_prefix="$build/$name-" "$work/$name" >"$work/$name.log" 2>&1 || code=$?
    echo "$code" >"$work/$name.code"
  ) &
done
wait

failed=0
for corpus in tests/fuzz/corpus/*.tar.gz; do
  name=$(basename "$corpus" .tar.gz)
  if [ "$(cat "$work/$name.code")" = 0 ]; then
    echo "$name: $(tail -n 1 "$work/$name.log")"
  else
    tail -n 60 "$work/$name.log" >&2
    failed=1
  fi
done
exit $failed
