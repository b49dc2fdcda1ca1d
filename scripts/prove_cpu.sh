#!/usr/bin/env bash
# Runs the whole proof of the CPU engine, on each of its instruction sets that this machine has. CI runs this proof only
# on the best instruction set. Writes a JSON file whose fields docs/results/README.md explains.
#
#   scripts/prove_cpu.sh <build folder> [<file.json>]
#
# Environment: COMMIT, SECONDS_EACH: see tools/gpu/prove.sh; FUZZ, the random problems of each instruction set (1000).
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=tools/gpu/proof.sh
. "$here/tools/gpu/proof.sh"
build=${1:?usage: scripts/prove_cpu.sh <build folder> [<file.json>]} json=${2:-$here/docs/results/cpu-proof.json}
tests=$build/tests/cpu/cpu_test fuzz=$build/tests/support/tandem_fuzz soak=$build/tests/support/tandem_soak
for file in "$tests" "$fuzz" "$soak"; do
  [ -x "$file" ] || die "$file must exist: build it (cmake --build $build) or copy it here"
done

for target in best generic avx2 avx512; do
  unset TANDEM_CPU_TARGET
  if [ $target != best ]; then
    export TANDEM_CPU_TARGET=$target
    # The program prints a reason and fails if the machine lacks the target, or if the target is the best set.
    "$tests" --gtest_list_tests > "$scratch/log" || { tail -n 1 "$scratch/log"; continue; }
  fi
  step "tests, $target" 'tests ran' "$tests"
  step "fuzz, $target" ' problems, ' "$fuzz" --device cpu --seed 1000 --count "${FUZZ:-1000}"
done
unset TANDEM_CPU_TARGET
for type in f32 bf16; do
  step "continuous batching, $type" ' steps, ' "$soak" --steps 100000 --dtype $type
done
TANDEM_NVRTC=none
finish "$json" "$(uname -m), $(awk -F': ' '/^model name/ { print $2; exit }' /proc/cpuinfo), $(nproc) cores" none
