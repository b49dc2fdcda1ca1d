#!/bin/sh
# tandem explain --machine-code, --cubin and --beside, without CUDA: nvdisasm and NVRTC are fakes.
#
#   machine_code_test.sh <tandem> <fake NVRTC>
set -eu
tandem=$1 nvrtc=$2 here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/cli/expect.sh
. "$here/expect.sh"
unset TANDEM_DEVICE TANDEM_NVDISASM VIRTUAL_ENV CONDA_PREFIX
export TANDEM_NVRTC="$nvrtc" CUDA_HOME="$work/none"

# A loop of a computing warpgroup over n_blocks of 128 keys at head_dim 64, and a loop of loads.
forward() {
  awk 'BEGIN {
    at = 0
    print "\t.target\tsm_90a\n\t.section\t.nv.info.forward,\"\",@\"SHT_CUDA_INFO\"\n\t//----- nvinfo : EIATTR_REQNTID"
    for (i = 0; i < 3; ++i) printf "        /*%04x*/ \t.word\t0x%08x\n", 4 * i, i ? 1 : 384
    print "\t.section\t.text.forward,\"ax\",@progbits\n.text.forward:"
    one("@P1 BRA `(.L_load)", 1)
    print ".L_step:"
    one("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5", 1)
    one("HGMMA.64x128x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT", 1)
    one("HGMMA.64x128x16.F32.BF16 R88, gdesc[UR8], R88", 3)
    one("HGMMA.64x64x16.F32.BF16 R24, R180, gdesc[UR8].tnspB, R24", 8)
    one("MUFU.EX2 R4, R4", 64)
    one("F2FP.BF16.F32.PACK_AB R4, R4, R5", 32)
    one("@P0 BRA `(.L_step)", 1)
    one("EXIT", 1)
    print ".L_load:"
    one("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5", 2)
    one("UTMALDG.4D [UR8], [UR4]", 2)
    one("@P0 BRA `(.L_load)", 1)
    one("EXIT", 1)
  }
  function one(text, times) {
    while (times-- > 0) { printf "        /*%04x*/    %s ;\n", at, text; at += 16 }
  }'
}
forward >listing
mkdir tools
cat >tools/nvdisasm <<EOF
#!/bin/sh
grep -q damaged "\$1" && { echo "nvdisasm fatal : no ELF"; exit 1; }
cat "$work/listing"
EOF
chmod +x tools/nvdisasm
echo "anything" >other.cubin
echo "damaged" >bad.cubin
export TANDEM_NVDISASM="$work/tools/nvdisasm"

# Reads one cubin.
expect 0 "kernel     other for sm_90a" explain --cubin other.cubin
for text in "128 rows x 128 keys, head_dim 64" "384 threads" "spilled    none" "Bound by MMA, exponential: 1024 clocks."; do
  grep -qF "$text" output || fail "explain --cubin does not say: $text"
done
grep -qE '^computing +unmasked +0x10 +0 +110 +0 +8$' output || fail "explain --cubin does not show the loop"
grep -qE '^MMA +0 +96 +96 +1024 +#' output || fail "explain --cubin does not count the products"
grep -qE '^issue +[0-9.]+ +880 +' output || fail "explain --cubin does not count a turn's 110 instructions"
longest=$(awk '{ if (length > longest) longest = length } END { print longest }' output)
[ "$longest" -le 100 ] || fail "explain --cubin: a line of $longest columns"

# Models its clocks. Both sides of every branch stay possible, because no thread number decides.
expect 0 "chain of waits in a step" explain --clocks --cubin other.cubin --clocks-timeline run.svg
tr -s ' \n' ' ' < output | grep -qE 'step [0-9]+ clocks( \([0-9]+ to [0-9]+: warpgroups [^)]*\))?; the tensor core works' ||
  fail "explain --clocks does not say what a step takes"
longest=$(awk '{ if (length > longest) longest = length } END { print longest }' output)
[ "$longest" -le 100 ] || fail "explain --clocks: a line of $longest columns"
grep -q "modelled, not measured" run.svg || fail "--clocks-timeline draws nothing"
expect 0 '"flops_a_clock"' explain --clocks --cubin other.cubin --json -

# Compiles a kernel of Tandem with the same code, and compares both.
card="--card h200 --head-dim 64 --heads 8 --seqlen 4096"
# shellcheck disable=SC2086
{
  expect 0 "kernel     forward_bf16_d64_" explain --machine-code $card
  expect 0 "compiler   NVRTC 13.7" explain --machine-code $card
  expect 0 "tandem: forward_bf16_d64_" explain $card --beside other.cubin
  expect 0 "kernel     forward_bf16_d64_" explain $card --save-cubin ours.cubin
  [ -s ours.cubin ] || fail "explain --save-cubin writes nothing"
  expect 2 "must be bfloat16 or float16" explain --machine-code $card --dtype f32
  expect 0 "kernel     backward_bf16_d64_" explain --machine-code --backward $card --save-cubin gradients.cubin
  [ -s gradients.cubin ] || fail "explain --backward --save-cubin writes nothing"
  expect 0 "longer than if dq were added in any order" explain --clocks --backward $card
  expect 0 '"waiting_most"' explain --clocks --backward $card --json -
}
expect 0 "Instructions are counted for one warp and 16 rows x 128 keys" explain --cubin other.cubin --beside other.cubin
grep -qE '^instructions of a warp, unmasked +110 +110$' output || fail "--beside: other instructions"
grep -qE '^ +exponential +2048 +2048$' output || fail "--beside: other clocks"
expect 0 '"binds": "MMA, exponential"' explain --cubin other.cubin --json -
[ "$(grep -c '"steady": true' output)" = 2 ] || fail "--json: other loops stand for their roles"
expect 0 "wrote cost.json" explain --cubin other.cubin --beside other.cubin --json cost.json
[ "$(grep -c '"kernel": "forward"' cost.json)" = 2 ] || fail "cost.json does not name both"
expect 0 "other for sm_90a" explain --cubin other.cubin --path all

# Refusals.
expect 2 "nvdisasm fatal : no ELF" explain --cubin bad.cubin
expect 2 "missing.cubin: No such file" explain --cubin missing.cubin
expect 2 "see tandem explain --help" explain --cubin other.cubin --path none
sed -i 's/sm_90a/sm_80/' listing
expect 2 "rates are known for sm_90" explain --cubin other.cubin
echo "nothing" >listing
expect 2 "no machine code" explain --cubin other.cubin

# nvdisasm is found in PATH, or is missing.
forward >listing
unset TANDEM_NVDISASM
cat >elsewhere <<EOF
#!/bin/sh
PATH=\$tandem_path exec "$tandem" "\$@"
EOF
chmod +x elsewhere
tandem=$work/elsewhere
export tandem_path="$work/tools:$PATH"
expect 0 "kernel     other for sm_90a" explain --cubin other.cubin
export tandem_path="$work/none"
expect 2 "pip install nvidia-cuda-nvdisasm" explain --cubin other.cubin

[ "$failures" = 0 ] || exit 1
echo "machine code is read and accounted for"
