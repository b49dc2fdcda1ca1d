#!/bin/sh
# The command on a real GPU; exit code 77 without a supported one.
#
#   gpu_test.sh <tandem> <examples folder>
set -eu
tandem=$1 examples=$2 here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/cli/expect.sh
. "$here/expect.sh"
unset TANDEM_DEVICE
"$tandem" info >seen
if ! grep -q "^device *cuda" seen; then
  echo "SKIPPED: the command finds no supported GPU here:"
  cat seen
  exit 77
fi
minilm=$examples/minilm/sentences.safetensors
names=layer0.q,layer0.k,layer0.v

expect 0 "on cuda:" verify --seqlen 8
expect 0 "float32 converted to bfloat16 for the GPU" verify --seqlen 300 --causal --forward-only
expect 0 "PASS" verify --dtype f16 --heads 8 --heads-k 2 --seqlen 517 --head-dim 128 --window '100,5' --sink
expect 0 "PASS" verify --dtype bf16 --lengths-q 5,0,300 --lengths-k 9,7,300 --causal --alibi --forward-only
expect 0 "PASS" verify --dtype bf16 --head-dim 192 --head-dim-v 128 --softcap 30 --bias f32 --forward-only
expect 0 "PASS" verify --dtype bf16 --bias bool --seqlen 130 --magnitude 5 --forward-only
expect 0 "on cpu, " verify --seqlen 20 --head-dim 12 --dtype bf16
expect 0 "on cpu, " verify --seqlen 20 --device cpu
expect 0 "PASS" verify --dtype bf16 --heads 8 --heads-k 2 --seqlen 517 --head-dim 128 --causal --backward
expect 0 "kernel     backward_" explain --device cuda --backward --preset llama
expect 0 "exact" attend "$minilm" --names $names --seqused 13,11,7,11 --dtype f32 --verify --out result.safetensors
expect 0 "result/lse.npy" attend "$minilm" --names $names --out result
expect 0 "on cuda:" demo "$examples/minilm" --seconds 0.01
expect 0 "TF/s" bench --seqlens 512,2048 --seconds 0.02 --backward --json bench.json --svg bench.svg
expect 0 "At least" explain --device cuda --preset llama
expect 0 "forward_bf16_" cache warm --device cuda --seqlen 4096 --head-dim 128
for file in result.safetensors result/out.npy bench.json bench.svg attention.svg; do
  [ -s "$file" ] || fail "$file is missing"
done

[ "$failures" = 0 ] || exit 1
echo "the command behaves on a GPU"
