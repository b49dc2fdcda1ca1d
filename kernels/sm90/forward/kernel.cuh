// Attention forward for Hopper: out = softmax(scale q k^T) v and its log-sum-exp.
//
// One CTA per SM takes tiles of 64 rows per computing warpgroup, the longest first, from a counter (varlen sequences:
// from a list that schedule() has made). A warpgroup leaves out the steps of its tile that its own rows do not see. One
// warp loads with TMA; the warpgroups may take turns on the tensor core ("->": passes the turn), so that the softmax of
// one runs under the products of the others, and each issues the next q k^T before it waits for p v:
//
//    load        | warpgroup 0              | warpgroup 1
//    K1, Q, K0   | S = Q K1              -> |
//    V1          | softmax                  | S = Q K1              ->
//    K', V0      | S' = Q K0, O += P V1  -> | softmax
//                | softmax of S' under P V1 | S' = Q K0, O += P V1  ->
//                | (O *= alpha), P = S'    | softmax of S' under P V1
//
// Shared memory: Q [queries][head_dim] in blocks of 64 columns, K and V rings and O alike, all swizzled by 128 bytes.
// Each warpgroup has its own part of Q and of O (or, where there is no room, all have one in turn), so that the queries
// of the next tile come in while it computes. Registers of a computing thread at head_dim 128: S 64, O 64, P 32, Q 32.
// A bias has a place of its own and two warps that copy it (bias.cuh), perhaps for all CTAs of a cluster, whose tiles
// have the same steps.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/bias.cuh"
#include "sm90/forward/compute.cuh"
#include "sm90/forward/load.cuh"
#include "sm90/forward/shared_plan.cuh"
#include "tile/block_mask.cuh"
#include "tile/max_scores.cuh"
#include "tile/scheduler.cuh"

template <Sm90ForwardConfig T>
TANDEM_DEVICE void forward(const ForwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<ForwardShared<T>*>(memory);
  static_assert(sizeof(ForwardShared<T>) <= T.smem_bytes());
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&p.k, &p.q, &p.v, &p.out}) prefetch_tensor_map(map);
    for (Work& work : s.work_tiles) work.overflowed = 0;
    for (int i = 0; i < T.warpgroups; ++i) {
      mbarrier_init(&s.q_full[i], 1);
      mbarrier_init(&s.q_empty[i], 4 + (T.bias != Bias::none && i == 0 ? T.kBiasWarps : 0));  // one of each warp
    }
    if constexpr (T.bias != Bias::none) {
      for (u64& full : s.bias.full) mbarrier_init(&full, T.bias_ctas > 0 ? 1 : 32);
      for (u64& empty : s.bias.empty) mbarrier_init(&empty, 128);
      if constexpr (T.bias_ctas > 1)
        for (u64& all_empty : s.bias.all_empty) mbarrier_init(&all_empty, T.ctas());
    }
    for (int i = 0; i < T.stages; ++i) {
      mbarrier_init(&s.k_full[i], 1);
      mbarrier_init(&s.v_full[i], 1);
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
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    setmaxnreg_dec<T.load_registers()>();
    if (threadIdx.x < 32 && elect_one()) load<T>(p, s);
    if constexpr (T.bias != Bias::none) {
      const int warp = uniform(threadIdx.x / 32);
      if (warp > 0 && warp <= T.kBiasWarps) load_bias<T>(p, s, warp - 1);
    }
  } else {
    setmaxnreg_inc<T.registers()>();
    compute<T>(p, s, warpgroup - 1);
  }
}
