#!/bin/sh
# Runs the command end to end on small files: results, exit codes, messages, and the files after an interruption.
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
tail -n 5 output | tr '\n' ' ' | grep -q "Summary: Every layer is exact, .*\. $" ||
  fail "the demo does not end with its summary"
[ "$(awk '{ if (length > 80) print }' output | wc -l)" = 0 ] || { fail "the demo has lines of more than 80 columns"; cat output; }
if grep -q "$(printf '\033')" output; then fail "colours in a pipe"; fi
if ! grep -q "skipped: NVRTC compiles the GPU kernels" output; then
  grep -q "The checker found no race" output || fail "the demo did not run on the virtual GPU"
  tr '\n' ' ' <output | grep -q "ran forward_f16_[^ ]* and backward_f16_" || fail "the demo does not say which kernels ran"
  [ -s timeline.svg ] || fail "timeline.svg is missing"
  tr '\n' ' ' <output | grep -q "ran [^ ]* and backward_f16_d128_128x256" || fail "the demo has no gradients by a pair of CTAs"
  grep -q "B200[^<]*, backward\|b200, backward" timeline-backward.svg || fail "the timeline of the gradients has no title"
  TANDEM_VGPU_CHECK=off "$tandem" demo "$examples/minilm" --seconds 0.01 >output
  grep -q "The checker was off" output || fail "the demo did not say that the checker was off"
  if grep -q "The checker found" output; then fail "the demo reports of a checker that was off"; fi
fi
for file in result.safetensors result/out.npy result/lse.npy result/dq.npy again/lse.npy bench.json bench.svg attention.svg; do
  [ -s "$file" ] || fail "$file is missing"
done
if command -v xmllint >/dev/null; then xmllint --noout attention.svg bench.svg || fail "pictures are no XML"; fi

# Unusable input is refused in one sentence.
head -c 1000 "$minilm" >cut.safetensors
printf '\223NUMPY\001\000v\000' >cut.npy
TANDEM_LOG=maybe expect 2 'TANDEM_LOG ("maybe") must be "1" or "0"' verify --seqlen-q 8
# Commands that open no context read the variables too.
for command in "vgpu check --device vgpu:b200" "vgpu run" "vgpu trace" explain "cache list"; do
  # shellcheck disable=SC2086  # words
  TANDEM_SM100=no_pair expect 2 'TANDEM_SM100 ("no_pair") must consist of the words' $command
done
TANDEM_CPU_TARGET=mmx expect 2 'TANDEM_CPU_TARGET ("mmx") must be one of "' verify --seqlen-q 8
expect 2 "missing.safetensors: cannot be opened: No such file or directory" attend missing.safetensors
expect 2 "cut.safetensors: header length" attend cut.safetensors
expect 2 "cut.npy: header length 118 must be at most the 0 bytes that follow" attend cut.npy cut.npy cut.npy
expect 2 'has no tensor "q"' attend "$minilm"
expect 2 "files (2) must be one .safetensors file" attend a.npy b.npy
expect 2 'must be f32, bf16, f16 or f64' verify --dtype f12
expect 2 "must be float16: q, k and v share one type" attend result/out.npy result/dq.npy result/lse.npy
expect 2 "--window (3) must be LEFT,RIGHT" verify --window 3
expect 2 "the window has no keys" verify --window=-5,3 --seqlen-q 8
expect 2 "--scale (nan) must be a finite number" verify --scale nan --seqlen-q 8
expect 2 "must be a multiple of k.heads (2)" verify --heads-q 3 --heads-k 2 --seqlen-q 8
expect 2 "device" verify --device toaster
expect 2 "see tandem verify --help" verify --no-such-flag
expect 2 "see tandem --help" nonsense
expect 2 '--heads-q (8/1) must be a whole number of at least 0; see tandem verify --help' verify --heads-q 8/1
expect 2 '--seconds (0) must be a finite number above 0; see tandem bench --help' bench --seconds 0

# The message quotes a number out of range as the user typed it.
expect 2 '--heads-q (99999999999999999999) must be a whole number from 0 to 9223372036854775807' verify --heads 99999999999999999999
expect 2 '--heads-q (-3) must be a whole number of at least 0' verify --heads=-3
expect 2 '--threads (5000) must be a whole number from 0 to 1024' verify --threads 5000
expect 2 '--threads (1e1) must be a whole number from 0 to 1024' verify --threads 1e1
expect 2 '--seed (-1) must be a whole number from 0 to 18446744073709551615' verify --seed=-1
expect 2 '--softcap (-1.23456789) must be a finite number of at least 0' verify --softcap=-1.23456789
expect 2 '--scale (1e999) must be a number that float64 can represent' verify --scale 1e999
expect 2 '--dropout (1.000) must be a number of at least 0 and below 1' verify --dropout 1.000
expect 2 '--lengths-q (x) must be a whole number of at least 0' verify --lengths-q 3,x
expect 2 '--seqused (99999999999) must fit into 32 bits' verify --seqused 99999999999 --seqlen 8
expect 2 '--window (1,99999999999999999999) must be LEFT,RIGHT' verify --window 1,99999999999999999999
expect 2 '--schedule (2147483648) must be a whole number from 0 to 2147483647' vgpu check --schedule 2147483648

# The message suggests the nearest command, flag or value.
expect 2 'verfy is not a command of tandem: did you mean verify?; see tandem --help' verfy
expect 2 'chekc is not a command of tandem vgpu: did you mean check?' vgpu chekc
expect 2 '--seqlen-qq is not a flag of tandem verify: did you mean --seqlen-q?' verify --seqlen-qq 8
expect 2 '--causl is not a flag of tandem attend: did you mean --causal?' attend x.npy --causl
expect 2 '--zzzzzzzzzz is not a flag of tandem verify; see' verify --zzzzzzzzzz
expect 2 '--bias (f23) must be f32, same or bool: did you mean f32?' verify --bias f23
expect 2 '--preset (lama) must be llama, gpt-oss, gpt-oss-window, qwen, deepseek or video: did you mean llama?' explain --preset lama
expect 2 'x is one argument too many for tandem verify' verify x

# Outputs are opened before the work, which would take hours here. If an output cannot be written, no file remains.
mkdir taken
echo text >file
huge="--seqlens 1000000 --dtypes f32 --heads 64"
# shellcheck disable=SC2086
{
  expect 2 "/no/such/folder/b.json: cannot be written" bench $huge --json /no/such/folder/b.json
  expect 2 "--svg (taken) must be a file, not a folder" bench $huge --svg taken --json good.json
  [ ! -e good.json ] || fail "bench wrote one output although the other cannot be written"
}
expect 2 "--out (x.npy) must be a folder: add a / to a name with a suffix" \
  attend "$minilm" --names $names --out x.npy
expect 2 "--out (x.npz) must be a folder" attend "$minilm" --names $names --out x.npz
expect 2 "--out (file/sub) must be a folder: $work/file is a file" attend missing.safetensors --out file/sub
expect 2 "--out (file) must be a folder" attend missing.safetensors --out file
expect 2 "missing.safetensors: cannot be opened" attend missing.safetensors --out fresh
[ ! -e fresh ] || fail "a folder was made for results that do not exist"
expect 2 "--picture (taken) must be a file" demo "$examples/minilm" --picture taken
expect 2 "/no/such/t.svg: cannot be written" demo "$examples/minilm" --timeline /no/such/t.svg
expect 2 "/no/such/x.cubin: cannot be written" explain --save-cubin /no/such/x.cubin
expect 2 "/no/such/x.json: cannot be written" vgpu check --json /no/such/x.json
expect 2 "--out (x.bin) must be a folder" vgpu run --out x.bin
expect 2 "--svg (taken) must be a file" vgpu trace --svg taken
expect 0 "a.b/dv.npy" attend "$minilm" --names $names --grad --out a.b/

# The message names a NaN in an input, with its effect.
python3 - <<'PY' || fail "numpy is missing"
import numpy
for name in "qkv":
    x = numpy.ones((2, 8, 2, 16), "float32")
    if name == "k":
        x[1, 3, 0, 5] = x[1, 7, 1, 0] = numpy.nan
    numpy.save(name, x)
PY
expect 0 "k contains 2 NaN, the first at (1, 3, 0, 5): results that depend on it are NaN" attend q.npy k.npy v.npy
if grep -q "q contains\|v contains" output; then fail "NaN is named where there is none"; fi
expect 0 "k contains 2 NaN" attend q.npy k.npy v.npy --verify

# An empty problem must not count as a success.
for command in verify attend "vgpu run" "vgpu check" "vgpu trace"; do
  case $command in
    attend) python3 -c 'import numpy
for n in "qkv": numpy.save("none-" + n, numpy.zeros((1, 0, 2, 16), "float32"))' &&
      expect 0 "Nothing ran: every result is empty." attend none-q.npy none-k.npy none-v.npy ;;
    *) # shellcheck disable=SC2086
      expect 0 "Nothing ran: every result is empty." $command --seqlen 0 ;;
  esac
  if grep -q "PASS" output; then fail "$command: an empty problem passes"; fi
done

# A lack of memory is exit code 2, because no result is wrong.
expect 2 "too little memory" verify --seqlen 100000000000 --head-dim 256
expect 2 "cannot be written" attend "$minilm" --names $names --out /no/such/folder/x.safetensors
expect 2 "must be a folder with .safetensors files" demo "$work/result"

# An interruption ends the command and leaves no file. (io/file.h has separate tests of an interrupted write.)
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
