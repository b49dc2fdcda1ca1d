// Attention forward for Hopper: out = softmax(scale q k^T) v and its log-sum-exp.
//
// One CTA per SM takes tiles from a counter, the longest first (varlen: from the list of schedule()). A tile has 64
// rows per MMA warpgroup; a warpgroup skips iterations that its rows do not see. One warp loads with TMA. Warpgroups
// may alternate on the tensor core ("->": signals the next), so that the softmax of one overlaps the products of
// another. Each issues the next q k^T before it waits for p v:
//
//    load        | warpgroup 0              | warpgroup 1
//    K1, Q, K0   | S = Q K1              -> |
//    V1          | softmax                  | S = Q K1              ->
//    K', V0      | S' = Q K0, O += P V1  -> | softmax
//                | softmax of S' during P V1| S' = Q K0, O += P V1  ->
//                | (O *= alpha), P = S'    | softmax of S' during P V1
//
// Shared memory has Q, rings of K and V, and O, all in blocks of 64 columns with the 128-byte swizzle. Each warpgroup
// has its own part of Q, so that the next tile's queries load during computation. A warpgroup also has its own part of
// O, or all share one. Two warps copy a bias to separate buffers (bias.cuh).
//
// A barrier's name states what is true after the wait (SharedStorage in smem.cuh). Arrivals:
//
//    q_full, k_full, v_full  1, and the bytes of TMA; keys and values with gathers_pages: all loading threads
//    q_empty                 the 4 warps of its warpgroup; the first one also counts the warps that copy a bias
//    k_empty, v_empty        all MMA warps of the CTAs that share the keys
#pragma once
#include "device/block_mask.cuh"
#include "device/max_scores.cuh"
#include "device/scheduler.cuh"
#include "prepost/combine_splits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/bias.cuh"
#include "sm90/forward/compute.cuh"
#include "sm90/forward/load.cuh"
#include "sm90/forward/smem.cuh"

template <Sm90ForwardConfig T>
TANDEM_DEVICE void forward(const ForwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<SharedStorage<T>*>(memory);
  static_assert(sizeof(SharedStorage<T>) <= T.smem_bytes());
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&p.k, &p.q, &p.v, &p.out}) prefetch_tensor_map(map);
    for (Sm90Work& work : s.work_tiles) work.overflowed = 0;
    for (int i = 0; i < T.warpgroups; ++i) {
      mbarrier_init(&s.q_full[i], 1);
      mbarrier_init(&s.q_empty[i], 4 + (T.options.bias != Bias::none && i == 0 ? T.kBiasWarps : 0));  // one per warp
    }
    if constexpr (T.options.bias != Bias::none) {
      for (u64& full : s.bias.full) mbarrier_init(&full, T.bias_ctas > 0 ? 1 : 32);
      for (u64& empty : s.bias.empty) mbarrier_init(&empty, 128);
      if constexpr (T.bias_ctas > 1)
        for (u64& all_empty : s.bias.all_empty) mbarrier_init(&all_empty, T.ctas());
    }
    for (int i = 0; i < T.stages; ++i) {
      mbarrier_init(&s.k_full[i], T.kv_arrivals());
      mbarrier_init(&s.v_full[i], T.kv_arrivals());
      mbarrier_init(&s.k_empty[i], 4 * T.warpgroups * T.kv_ctas);
      mbarrier_init(&s.v_empty[i], 4 * T.warpgroups * T.kv_ctas);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  launch_dependents();
  if constexpr (T.ctas() > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  grid_dependency_wait();
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    setmaxnreg_dec<T.load_registers()>();
    if constexpr (T.gathers_pages) {
      load<T>(p, s);
    } else {
      if (threadIdx.x < 32 && elect_one()) load<T>(p, s);
    }
    if constexpr (T.options.bias != Bias::none) {
      const int warp = warp_uniform(threadIdx.x / 32);
      if (warp > 0 && warp <= T.kBiasWarps) load_bias<T>(p, s, warp - 1);
    }
  } else {
    setmaxnreg_inc<T.registers()>();
    compute<T>(p, s, warpgroup - 1);
  }
}
