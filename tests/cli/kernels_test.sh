#!/bin/sh
# Commands about GPUs and their kernels, without a GPU: explain, cache, info and refusals.
#
#   kernels_test.sh <tandem> <fake driver> <fake NVRTC>
set -eu
tandem=$1 driver=$2 nvrtc=$3 here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/cli/expect.sh
. "$here/expect.sh"
export TANDEM_CACHE_DIR="$work/kernels"
unset TANDEM_DEVICE TANDEM_CACHE TANDEM_NVRTC
mkdir none fake
ln -s "$driver" fake/libcuda.so.1
printf 'no library' >none/libcuda.so.1 # otherwise the loader finds an installed driver
without_a_driver=$work/none:${LD_LIBRARY_PATH:-} with_fake_gpus=$work/fake:${LD_LIBRARY_PATH:-}

# Without a driver, the CPU is the default, a GPU is refused with one clear sentence, and plans still work.
export LD_LIBRARY_PATH="$without_a_driver"
expect 0 "on cpu, " verify --seqlen 8
expect 0 "none: device \"cuda\" needs NVIDIA's driver" info
expect 2 "device \"cuda\" needs NVIDIA's driver" verify --device cuda
expect 2 "install the driver, or choose device \"cpu\"" bench --device cuda:1
expect 2 "device \"cuda\" needs NVIDIA's driver" explain --device cuda
export TANDEM_DEVICE=cuda
expect 2 "device \"cuda\" needs NVIDIA's driver" verify --seqlen 8
expect 0 "on cpu, " verify --seqlen 8 --device cpu
unset TANDEM_DEVICE

expect 0 "on NVIDIA H200, 132 SMs, 1980 MHz" explain
expect 0 "tensor core binds" explain --seqlen 4096 --heads 16 --head-dim 128 --causal
for text in "kernel " "tile " "workspace " "tensor core" "exponentials" "shared memory" "L2 cache" "HBM" "####"; do
  grep -qF "$text" output || fail "explain does not say: $text"
done
expect 0 "q (1, 4096, 16, 128)" explain --seqlen 4096 --heads 16 --head-dim 128 --card h100-pcie
expect 0 "HBM binds" explain --seqlen 1 --seqlen-k 65536 --heads 32 --heads-k 8 --head-dim 128
expect 0 "Lengths that only the device knows count as their bounds" explain --lengths-q 5,700 --heads-k 2
expect 0 "(1, 8192, 64, 128)" explain --preset llama
expect 0 "(2, 8192, 64, 128)" explain --batch 2 --preset llama
expect 0 "nothing is launched" explain --batch 0
for preset in llama gpt-oss gpt-oss-window qwen deepseek video; do
  expect 0 "At least" explain --preset "$preset"
  longest=$(awk '{ if (length > longest) longest = length } END { print longest }' output)
  [ "$longest" -le 100 ] || fail "explain --preset $preset: a line of $longest columns"
done
expect 0 "kernel     backward_bf16_d128_" explain --backward --preset llama
for text in "bwd_preprocess: " "backward: 132 blocks of 384 threads" "bwd_postprocess: " "workspace " "####" "At least"; do
  grep -qF "$text" output || fail "explain --backward does not say: $text"
done
longest=$(awk '{ if (length > longest) longest = length } END { print longest }' output)
[ "$longest" -le 100 ] || fail "explain --backward: a line of $longest columns"
expect 0 "dbias: " explain --backward --bias f32 --card h100
expect 0 "kernel     backward_bf16_d64_128x128x" explain --backward --device vgpu:b200
expect 0 "nothing is launched" explain --backward --batch 0
expect 0 "kernel     backward_bf16_d256_128x128_apart4" explain --backward --preset qwen --device vgpu:b200
expect 2 "must be a multiple of 8" explain --head-dim 20
expect 2 "must be bfloat16 or float16" explain --dtype f32
expect 2 "only GPUs have a plan" explain --device cpu
expect 2 "see tandem explain --help" explain --card toaster
expect 2 "--gpu (h20) must be h200, h100 or h100-pcie: did you mean h200?" explain --gpu h20
expect 2 "see tandem explain --help" explain --card h100 --device cuda

# Unsupported GPUs are skipped, with a remark.
export LD_LIBRARY_PATH="$with_fake_gpus"
expect 0 "cuda:1        Fake 1, compute capability" info
expect 0 "not on the GPU: the Fake 0" verify --seqlen 8
expect 2 "must have compute capability 9.0" explain --device cuda
expect 2 "must have compute capability 9.0" verify --seqlen 8 --device cuda
expect 2 "the driver sees 2 GPUs" verify --device cuda:2
expect 2 "must be \"cuda\" or \"cuda:N\"" verify --device cuda:x
export LD_LIBRARY_PATH="$without_a_driver"

# The cache on disk.
expect 0 "0 kernels in $work/kernels" cache list
TANDEM_NVRTC=$work/missing.so expect 2 "must name NVRTC 12.0 or newer" cache warm
TANDEM_NVRTC=$work/missing.so expect 2 "must name NVRTC 12.0 or newer" vgpu check --seqlen 8
[ "$(head -n 1 output)" = "q (1, 8, 8, 64)  k (1, 8, 8, 64)  v (1, 8, 8, 64)  bf16" ] || fail "check does not print the problem first"
TANDEM_NVRTC=$work/missing.so expect 2 "must name NVRTC 12.0 or newer" verify --seqlen 8 --dtype bf16 --device vgpu:h200
[ "$(head -n 1 output)" = "q (1, 8, 8, 64)  k (1, 8, 8, 64)  v (1, 8, 8, 64)  bf16" ] || fail "verify does not print the problem first"
export TANDEM_NVRTC="$nvrtc"
expect 0 "$nvrtc" info
expect 0 ": compiled in " cache warm --seqlen 4096 --heads 16 --head-dim 96 --causal
expect 0 ": was there, read in " cache warm --seqlen 4096 --heads 16 --head-dim 96 --causal
expect 0 "1 kernel in $work/kernels" cache list
expect 0 "forward_f16_d64_" cache warm --dtype f16 --card h100
expect 0 ": compiled in " cache warm --presets
grep -q "was there" output && fail "the presets name a kernel twice"
expect 0 "forward_bf16_d192v128_" cache list
listed=$(grep -c sm_90a output)
[ "$listed" -ge 6 ] || fail "$listed kernels listed after warming"
expect 0 ": was there, read in " cache warm --presets
grep -q ": compiled" output && fail "the presets were compiled twice"
expect 0 "append_kv: compiled in " cache warm --serving --page-size 16 --seqlen 300 --heads 2 --head-dim 64
grep -q "^forward_bf16_d64_.*_pages16_.*_varlen: compiled in" output || fail "cache warm --serving leaves pages out"
expect 2 "must be bfloat16 or float16" cache warm --dtype f32
expect 0 "backward_bf16_d64_128x128x3x2_m_split_dq_split_wraps: compiled in " cache warm --backward
grep -q "^forward_bf16_d64_" output || fail "cache warm --backward leaves the forward out"
expect 0 "backward_bf16_d256_128x128_apart4" cache warm --presets --backward --device vgpu:b200
expect 0 "backward_bf16_d64_128x128x" cache list
listed=$(grep -cE "sm_(90|100)a" output)
expect 0 "removed $listed kernels" cache clear
expect 0 "0 kernels" cache list
chmod 777 kernels
expect 2 "is writable by other users" cache list
expect 2 "is writable by other users" cache clear
expect 0 "is writable by" info
chmod 700 kernels
TANDEM_CACHE=off expect 2 "TANDEM_CACHE is off" cache list
expect 2 "see tandem cache --help" cache

[ "$failures" = 0 ] || exit 1
echo "plans, kernels and refusals are as they should be"
