#!/bin/sh
# tandem vgpu and --device vgpu:h200. Problems are skipped without NVRTC.
#
#   vgpu_test.sh <tandem> <folder of kernels that break rules>
set -eu
tandem=$1 kernels=$2 here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/cli/expect.sh
. "$here/expect.sh"
unset TANDEM_DEVICE TANDEM_VGPU_SCHEDULE TANDEM_VGPU_CHECK TANDEM_VGPU_LETTER TANDEM_VGPU_THREADS
unset TANDEM_VGPU_MAX_INSTRUCTIONS

# ---- PTX files ----
cat >scale.ptx <<'PTX'
.version 8.0
.target sm_90a
.address_size 64
.visible .entry scale(.param .u64 to, .param .f32 factor, .param .u64 from, .param .u32 count)
{
  .reg .pred %p1;
  .reg .b32 %r<5>;
  .reg .f32 %f<3>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [to];
  ld.param.f32 %f1, [factor];
  ld.param.u64 %rd2, [from];
  ld.param.u32 %r1, [count];
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %ctaid.x;
  mov.u32 %r4, %ntid.x;
  mad.lo.s32 %r2, %r3, %r4, %r2;
  setp.ge.u32 %p1, %r2, %r1;
  @%p1 bra done;
  mul.wide.u32 %rd3, %r2, 4;
  add.s64 %rd4, %rd2, %rd3;
  ld.global.f32 %f2, [%rd4];
  mul.f32 %f2, %f2, %f1;
  add.s64 %rd5, %rd1, %rd3;
  st.global.f32 [%rd5], %f2;
done:
  ret;
}
PTX
# launch <file> <bytes of `to`> <more of its fields>
launch() {
  cat >"$1" <<JSON
{
  "grid": [2], "block": [64],
  "buffers": [{"name": "from", "type": "f32", "shape": [100], "fill": "iota", "read_only": true},
              {"name": "to", "type": "f32", "bytes": $2 $3}],
  // in order
  "parameters": [{"pointer": "to"}, {"f32": 0.5}, {"pointer": "from"}, {"u32": 100}]
}
JSON
}
launch scale.json 400 ''
expect 0 "(100,)" vgpu run scale.ptx --launch scale.json --out result
grep -q "49.5" output || fail "run does not say what the largest result is"
grep -q "thread-instructions in" output || fail "run does not say how fast it was"
[ -s result/to.npy ] || fail "no result was written"
[ ! -e result/from.npy ] || fail "what is only read is no result"
expect 0 "no errors, 0 findings by the letter under 4 schedules" vgpu check scale.ptx --launch scale.json --schedules 4
[ "$(head -n 2 output)" = "kernel scale  grid 2 x 1 x 1  block 64 x 1 x 1
on vgpu:h200" ] || fail "check does not print the problem first"
launch good.json 400 ', "expected": "result/to.npy"'
expect 0 "to: all 100 elements are as in result/to.npy; the largest error is 0, 0 is allowed" \
  vgpu check scale.ptx --launch good.json
sed 's/0.5/0.25/' good.json >bad.json
expect 1 "to: 99 of 100 elements are not as in result/to.npy; the worst is 24.75 at 99, expected 49.5" \
  vgpu check scale.ptx --launch bad.json
launch short.json 396 ''
expect 1 "out-of-bounds in scale" vgpu check scale.ptx --launch short.json --schedules 3 --schedule 5
grep -q "schedule 5: 1 error, 0 by the letter" output || fail "check does not count the error"
grep -qF "repeat: $tandem vgpu check scale.ptx --launch short.json --schedule 5" output || fail "no command repeats it"
expect 1 "out-of-bounds in scale" vgpu check scale.ptx --launch short.json --json findings.json
for field in '"rule": "out-of-bounds"' '"grade": "error"' '"kernel": "scale"' '"times": 1' '"at": "PTX line 25"' \
  '"schedule": 0' "\"repeat\": \"$tandem vgpu check scale.ptx"; do
  grep -qF "$field" findings.json || fail "the findings' file has no $field"
done
expect 0 PASS vgpu check scale.ptx --launch scale.json --json findings.json
grep -qF '"findings": []' findings.json || fail "there are findings in the file of a kernel that has none"

# ---- The kernels of vgpu/docs/sanitizer.md, and both grades ----
bugs=$here/../../vgpu/examples/bugs
expect 1 "missing-proxy-fence" vgpu check "$bugs/proxy_fence.ptx" --launch "$bugs/proxy_fence.json"
expect 1 "missing-wait" vgpu check "$bugs/overwritten_tile.ptx" --launch "$bugs/overwritten_tile.json"
expect 1 "data-race" vgpu check "$bugs/relaxed_flag.ptx" --launch "$bugs/relaxed_flag.json"
expect 1 "ignored-wait" vgpu check "$bugs/ignored_wait.ptx" --launch "$bugs/ignored_wait.json"
expect 1 "live-at-exit" vgpu check "$bugs/early_exit.ptx" --launch "$bugs/early_exit.json"
# A loop that never ends is a finding of every command, and the limit is a flag.
sed 's/^done:/  bra done;\n&/; s/^  st.global.f32.*/again:\n&\n  bra again;/' scale.ptx >endless.ptx
expect 1 "the warp repeats the loop from PTX line 26 to PTX line 27" \
  vgpu check endless.ptx --launch scale.json --max-instructions 3000000 --json findings.json
grep -q "endless-loop in scale" output || fail "an endless loop is not named"
grep -qF '"rule": "endless-loop"' findings.json || fail "the findings' file has no endless loop"
for verb in "run" "trace --svg= --json="; do
  # shellcheck disable=SC2086 # the flags of a verb
  ! "$tandem" vgpu $verb endless.ptx --launch scale.json --max-instructions 3000000 >output 2>&1 || fail "$verb passes"
  grep -q "scale: endless-loop at PTX line 2" output || fail "$verb does not name the endless loop"
done
expect 2 "--max-instructions (-1) must be" vgpu check endless.ptx --launch scale.json --max-instructions -1
for bug in "$bugs"/*.ptx; do expect 0 thread-instructions vgpu run "$bug" --launch "${bug%.ptx}.json"; done
sed '/fence.mbarrier_init/d' "$bugs/ignored_wait.ptx" |
  sed 's/^  mbarrier.try_wait.*/WAIT: &\n  @!q bra WAIT;/' >letter.ptx
expect 0 "by the letter: missing-init-fence" vgpu check letter.ptx --launch "$bugs/ignored_wait.json" --json findings.json
grep -qF '"grade": "letter"' findings.json || fail "the findings' file has no grade"
expect 0 "no errors, 0 findings by the letter" vgpu check letter.ptx --launch "$bugs/ignored_wait.json" --letter=off

expect 2 "--block (2) must be less than the kernel's 2 blocks" vgpu trace scale.ptx --launch scale.json --block 2 --json none.json
[ ! -e none.json ] || fail "a trace of nothing was written"
expect 0 "open trace.json" vgpu trace scale.ptx --launch scale.json --block 1
grep -q '"ph":"X"' trace.json || fail "the trace is empty"
grep -q "warp 1" trace.svg || fail "the picture has no rows"

# Offsets in the parameter block: to, factor, from, count.
sed 's/"parameters".*/"parameters": [{"at": 24, "u32": 100}, {"at": 16, "pointer": "from"}, {"at": 8, "f32": 0.5}, {"at": 0, "pointer": "to"}]/' \
  good.json >at.json
expect 0 "PASS" vgpu check scale.ptx --launch at.json
sed 's/"at": 24/"at": 25/' at.json >beyond.json
expect 2 "must lie within the kernel's 28 bytes" vgpu check scale.ptx --launch beyond.json
sed 's/{"u32": 100}/{"u32": 100}, {"i32": 1}/' good.json >many.json
expect 2 "parameters[4] (4 bytes) is one more than the 4" vgpu check scale.ptx --launch many.json
sed 's/, {"u32": 100}//' good.json >few.json
expect 2 "parameters (3) must be all 4" vgpu check scale.ptx --launch few.json
sed 's/{"u32": 100}/{"u64": 100}/' good.json >wide.json
expect 2 "parameters[3] (8 bytes) must have the 4 bytes of the kernel's count" vgpu check scale.ptx --launch wide.json
sed 's/"grid"/"entry": "absent", "grid"/' good.json >entry.json
expect 2 "must be one of scale" vgpu check scale.ptx --launch entry.json
expect 2 "needs --launch FILE" vgpu check scale.ptx
expect 2 "must be a virtual GPU" vgpu check scale.ptx --launch good.json --device cuda
expect 2 "\"vgpu:h100\" or \"vgpu:h200\": choose one" vgpu check scale.ptx --launch good.json --device vgpu:h300
sed 's/sm_90a/sm_100a/' scale.ptx >scale100.ptx
expect 0 "PASS  vgpu:b200" vgpu check scale100.ptx --launch good.json
sed 's/sm_90a/sm_103a/' scale.ptx >scale103.ptx
expect 0 "PASS  vgpu:b300" vgpu check scale103.ptx --launch good.json
expect 0 "vgpu:b300" vgpu models
expect 0 "PASS  vgpu:h100" vgpu check scale.ptx --launch good.json --device vgpu:h100
printf 'no PTX' >none.ptx
expect 2 "line 1" vgpu check none.ptx --launch good.json
expect 2 "see tandem vgpu --help" vgpu

# ---- A kernel that breaks a rule, and its corrected twin ----
cat >rule.json <<'JSON'
{"grid": [1], "block": [64], "dynamic_shared_bytes": 256,
 "buffers": [{"name": "in", "bytes": 4096, "fill": "zeros"}, {"name": "out", "bytes": 4096}],
 "parameters": [{"pointer": "in"}, {"pointer": "out"}]}
JSON
grep -v "// clean" "$kernels/data_race_warps.ptx" >broken.ptx
expect 1 "data-race" vgpu check broken.ptx --launch rule.json --schedules 3
expect 0 "PASS" vgpu check "$kernels/data_race_warps.ptx" --launch rule.json --schedules 3

# ---- Plans and refusals need no compiler ----
expect 0 "on NVIDIA H200 (virtual), 132 SMs" explain --device vgpu:h200
expect 2 "must be bfloat16 or float16" vgpu check --dtype f32
TANDEM_VGPU_SCHEDULE=x expect 2 "TANDEM_VGPU_SCHEDULE (\"x\") must be a whole number" verify --device vgpu:h200
TANDEM_VGPU_LETTER=maybe expect 2 "TANDEM_VGPU_LETTER (\"maybe\") must be" verify --device vgpu:h200
TANDEM_VGPU_CHECK=maybe expect 2 "TANDEM_VGPU_CHECK (\"maybe\") must be" verify --device vgpu:h200

# ---- Problems ----
"$tandem" info --device vgpu:h200 >seen
if grep -q "no NVRTC" seen; then
  echo "NOT RUN, no compiler: problems on the virtual GPU"
else
  small="--heads 1 --seqlen 70 --head-dim 64"
  # shellcheck disable=SC2086
  {
    expect 0 "no errors, 0 findings by the letter under 3 schedules" vgpu check $small --causal --schedules 3
    expect 0 "thread-instructions in" vgpu run $small
    expect 0 "forward, block 0" vgpu trace $small --json forward.json --svg forward.svg
    expect 0 "backward, block 1" vgpu trace --backward --block 1 --device vgpu:b200 --heads 1 --seqlen 300 --head-dim 128 \
      --json backward.json --svg backward.svg
    expect 0 "backward, blocks 0 to 1" vgpu trace --backward --block 1 --cluster --device vgpu:b200 --heads 1 --seqlen 300 \
      --head-dim 128 --json pair.json --svg pair.svg
    expect 0 "no errors, 0 findings by the letter" vgpu check --backward $small
    expect 0 "dv " vgpu run --backward $small
    expect 0 "PASS" verify --device vgpu:h200 --dtype bf16 $small --backward
    grep -q "^dv .*exact" output || fail "verify --backward does not judge gradients"
    expect 0 "PASS" verify --device vgpu:b200 --dtype bf16 $small --causal --backward
    expect 0 "PASS" verify --device vgpu:b200 --dtype bf16 --seqlen 20 --heads 1 --head-dim 192 --backward
    expect 0 "backward MF/s" bench --device vgpu:b200 --seqlens 64 --head-dims 64 --batch 1 --heads 1 --full-only \
      --seconds 0.01 --backward
    TANDEM_VGPU_SCHEDULE=7 TANDEM_VGPU_THREADS=1 expect 0 "PASS" verify --device vgpu:h200 --dtype f16 $small --window '9,3'
    TANDEM_VGPU_CHECK=off expect 0 "PASS" verify --device vgpu:h100 --dtype bf16 $small
  }
  grep -q "compute, warp" forward.svg || fail "roles are not named after functions"
  grep -q "relay_ds, warp" backward.svg || fail "the second block of a pair has no role of its own in the picture"
  for row in "block 0: mainloop_two_cta_mma, warp 12" "block 1: relay_ds, warp 12" "block 0: tensor core"; do
    grep -q "$row" pair.svg || fail "the picture of a pair has no row $row"
  done
  grep -q "kernels/sm90/forward/kernel.cuh" forward.json || fail "places are not those of the source tree"
fi

[ "$failures" = 0 ] || exit 1
echo "the command behaves on a virtual GPU"
