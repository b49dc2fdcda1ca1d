#!/bin/sh
# Runs the command end to end on small files: results, exit codes, messages, and what an interruption leaves.
#
#   command_test.sh <tandem> <examples folder>
set -eu
tandem=$1 examples=$2 here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/cli/expect.sh
. "$here/expect.sh"
export TANDEM_DEVICE=cpu

minilm=$examples/minilm/sentences.safetensors
names=layer0.q,layer0.k,layer0.v

# Every command works, and writes no colours to pipes.
expect 0 "Exact attention" --help
expect 0 "tandem 0." --version
expect 0 "Examples:" attend --help
expect 0 "memory reads" info
expect 0 "PASS" verify --dtype bf16 --seqlen-q 70 --causal --heads-q 4 --heads-k 2
expect 0 "PASS" verify --lengths-q 5,0,30 --lengths-k 9,7,30 --window '*,3' --sink --dropout 0.1
expect 0 "wrote bench.svg" bench --seqlens 64 --head-dims 32 --dtypes f32 --seconds 0.01 --json bench.json --svg bench.svg
expect 0 "head_dim" bench --seqlens 64 --head-dims 32 --dtypes f16 --seconds 0.01 --no-plain --causal-only
expect 0 "exact" attend "$minilm" --names $names --seqused 13,11,7,11 --grad --verify --out result.safetensors
expect 0 "result/dv.npy" attend "$minilm" --names $names --grad --out result
expect 0 "exact" attend result/out.npy result/dq.npy result/dv.npy --verify --dtype f32 --out again
expect 0 "attention.svg" demo "$examples/minilm" --seconds 0.01
if grep -q "$(printf '\033')" output; then fail "colours in a pipe"; fi
if ! grep -q "left out: GPU kernels are compiled by NVRTC" output; then
  grep -q "the checker found no race" output || fail "the demo did not run on the virtual GPU"
  grep -q "^ran forward_f16_.* and backward_f16_" output || fail "the demo does not say which kernels ran"
  [ -s timeline.svg ] || fail "timeline.svg is missing"
  grep -q "^ran .* and backward_f16_d128_128x256" output || fail "the demo has no gradients by a pair of CTAs"
  grep -q "block 1: relay_ds" timeline-backward.svg || fail "the timeline of the gradients is not that of a pair"
  TANDEM_VGPU_CHECK=off "$tandem" demo "$examples/minilm" --seconds 0.01 >output
  grep -q "the checker was off" output || fail "the demo did not say that the checker was off"
  if grep -q "the checker found" output; then fail "the demo tells of a checker that was off"; fi
fi
for file in result.safetensors result/out.npy result/lse.npy result/dq.npy again/lse.npy bench.json bench.svg attention.svg; do
  [ -s "$file" ] || fail "$file is missing"
done
if command -v xmllint >/dev/null; then xmllint --noout attention.svg bench.svg || fail "pictures are no XML"; fi

# Unusable files are refused in one sentence.
head -c 1000 "$minilm" >cut.safetensors
printf '\223NUMPY\001\000v\000' >cut.npy
TANDEM_LOG=maybe expect 2 'TANDEM_LOG ("maybe") must be "1" or "0"' verify --seqlen-q 8
TANDEM_CPU_TARGET=mmx expect 2 'TANDEM_CPU_TARGET ("mmx") must be one of "' verify --seqlen-q 8
expect 2 "missing.safetensors: cannot be opened: No such file or directory" attend missing.safetensors
expect 2 "cut.safetensors: header length" attend cut.safetensors
expect 2 "cut.npy: header length 118 is more than the 0 bytes that follow it" attend cut.npy cut.npy cut.npy
expect 2 'has no tensor "q"' attend "$minilm"
expect 2 "attend takes one .safetensors file" attend a.npy b.npy
expect 2 'must be f32, bf16, f16 or f64' verify --dtype f12
expect 2 "must be float16: q, k and v share one type" attend result/out.npy result/dq.npy result/lse.npy
expect 2 "--window 3: must be LEFT,RIGHT" verify --window 3
expect 2 "inverted window" verify --window=-5,3 --seqlen-q 8
expect 2 "softmax_scale" verify --scale nan --seqlen-q 8
expect 2 "must be a multiple of k.heads (2)" verify --heads-q 3 --heads-k 2 --seqlen-q 8
expect 2 "device" verify --device toaster
expect 2 "see tandem verify --help" verify --no-such-flag
expect 2 "see tandem --help" nonsense
expect 2 '--heads-q: "8/1" must be a number of at least 0; see tandem verify --help' verify --heads-q 8/1
expect 2 '--seconds: "0" must be a number above 0; see tandem bench --help' bench --seconds 0
expect 2 "must be a .safetensors file or a folder" attend "$minilm" --names $names --out x.npy
expect 2 "cannot be written" attend "$minilm" --names $names --out /no/such/folder/x.safetensors
expect 2 "is no folder with .safetensors files" demo "$work/result"

# An interruption ends the command and leaves no file. (The tests of io/file.h interrupt a write.)
mkdir interrupted
"$tandem" bench --seqlens 8192 --head-dims 128 --dtypes f32 --svg interrupted/bench.svg --json interrupted/bench.json >/dev/null 2>&1 &
pid=$!
sleep 0.5
kill -TERM $pid
got=0
wait $pid 2>/dev/null || got=$?
[ "$got" = 143 ] || fail "SIGTERM did not end bench (exit code $got)"
[ -z "$(ls -A interrupted)" ] || fail "an interruption left $(ls -A interrupted)"

[ "$failures" = 0 ] || exit 1
echo "the command behaves"
