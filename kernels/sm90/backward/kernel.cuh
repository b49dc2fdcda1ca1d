// Attention backward for Hopper: dq, dk and dv from q, k, v, dout, the log-sum-exp and delta
// (prepost/bwd_preprocess.cuh).
//
// A CTA takes n_blocks of a key head, keeps their keys and values, and iterates over the queries that see them. dk and
// dv stay in registers. Scores are transposed (keys in rows), so that P and dS are register operands. dq is added in
// float32, in the order of n_blocks (dq_accumulate_warp); prepost/bwd_postprocess.cuh rounds it. The default schedule
// (`pipelined_steps`):
//
//    load       | dq_accumulate_warp, three       | each warpgroup, of its 64 keys
//    Q', dO     | alternating threads:  | dS = P (dP - delta), to shared memory
//               | add dq to global      | dQ of the previous iteration = dS' K, dV += P dO, dK += dS Q
//               | memory, in the order  | during dK: next S = K Q', dQ to shared memory
//               | of n_blocks           | next dP = V dO', during it P = exp(S - lse)
//
// Heads above 128 share 64 keys (Sm90BackwardConfig::wide) or use roles (roles.cuh). With `pair` two CTAs have 64 keys
// each and exchange dS. Each computes half of dq's columns over both, because additions to dq limit head_dim 256:
//
//    CTA 0        keys 0..63,   dS ->  | dq[:, :128] = dS' K[:64, :128] + (dS of CTA 1)' K[64:, :128]
//    CTA 1        keys 64..127, dS ->  | dq[:, 128:] = (dS of CTA 0)' K[:64, 128:] + dS' K[64:, 128:]
//
// With `ds_gmem` dS goes to global memory instead, and a second kernel computes dq (dq.cuh), one strip at a time:
//
//    launches     backward, strip 0 | dq, strip 0 | backward, strip 1 | dq, strip 1 | ...
//
// Without dq registers suffice for 64 keys per warpgroup and 32 queries at a time (`halves`):
//
//    queue of a half  | dV += P dO, next S, next dP, dK += dS Q
//    meanwhile        |    dS, to shared memory     |  next P
#pragma once
#include "prepost/bwd_postprocess.cuh"
#include "prepost/bwd_preprocess.cuh"
#include "prepost/dsink.cuh"
#include "sm90/backward/captured.cuh"
#include "sm90/backward/compute.cuh"
#include "sm90/backward/dbias.cuh"
#include "sm90/backward/dq.cuh"
#include "sm90/backward/load.cuh"
#include "sm90/backward/warpgroup_roles.cuh"

template <Sm90BackwardConfig T>
TANDEM_DEVICE void backward(const BackwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<SharedStorage<T>*>(memory);
  static_assert(sizeof(SharedStorage<T>) <= T.smem_bytes());
  static_assert(T.fits());
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&p.k, &p.v}) prefetch_tensor_map(map);
    constexpr int kWarps = T.warpgroup_roles() ? 8 : 4 * T.warpgroups;  // warps that read queries or dout
    mbarrier_init(&s.k_full, 1);
    mbarrier_init(&s.v_full, 1);
    mbarrier_init(&s.kv_empty,
                  T.warpgroups + (T.ds_gmem() ? 1 : T.dq_threads()) + (T.warpgroup_roles() || T.stages_bias() ? 1 : 0));
    if constexpr (T.stages_bias()) {
      for (u64& full : s.bias.full) mbarrier_init(&full, 32);
      for (u64& empty : s.bias.empty) mbarrier_init(&empty, 128);
      mbarrier_init(&s.bias.dq_made, kWarps);
    }
    for (int i = 0; i < T.q_stages; ++i) {
      mbarrier_init(&s.q_full[i], 1);
      mbarrier_init(&s.q_empty[i], kWarps);
    }
    for (int i = 0; i < T.dout_stages; ++i) {
      mbarrier_init(&s.dout_full[i], 1);
      mbarrier_init(&s.dout_empty[i], kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&s.ds_full[i], T.warpgroup_roles() ? 4 : kWarps);
      mbarrier_init(&s.ds_empty[i], T.ds_gmem() ? 1 : 12);
    }
    mbarrier_init(&s.p_full, 4);
    mbarrier_init(&s.p_empty, 4);
    for (int i = 0; i < T.dq_parts(); ++i) {
      mbarrier_init(&s.dq_slot_free[i], 1);
      for (u64& added : s.dq_slot_full[i]) mbarrier_init(&added, 4);
    }
    if constexpr (T.cluster2()) {
      for (u64& tma_full : s.cluster2.ds_peer_full) mbarrier_init(&tma_full, 1);
      mbarrier_init(&s.cluster2.ds_read, kWarps);
      mbarrier_init(&s.cluster2.tile_signalled, 1);
      mbarrier_init(&s.cluster2.tile_read, 1);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  // Zeroes the dS that the first iteration reads as the previous one; its dq is not used.
  if constexpr (!T.shared_p() && !T.ds_gmem()) {
    for (int i = threadIdx.x; i < T.cta_keys() * T.tile_m / 8; i += blockDim.x)
      reinterpret_cast<uint4*>(s.ds[0])[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
  }
  if constexpr (T.cluster2()) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  grid_dependency_wait();
  launch_dependents();  // semaphores are zero from here on
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    setmaxnreg_dec<T.load_registers()>();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp == 0) {
      if (elect_one()) load<T>(p, s);
    } else if constexpr (T.ds_gmem()) {
      if (warp == 1 && elect_one()) store_ds<T>(p, s);
    } else if (warp <= T.dq_threads()) {
      if (elect_one()) dq_accumulate_warp<T>(p, s, warp - 1);
    } else if constexpr (T.warpgroup_roles()) {
      if (elect_one()) send_ds<T>(p, s);
    } else if constexpr (T.stages_bias()) {
      if (warp == 3) load_bias<T>(p, s);
    }
  } else if constexpr (!T.warpgroup_roles()) {
    setmaxnreg_inc<T.registers()>();
    compute<T>(p, s, warpgroup - 1);
  } else if (warpgroup == 3) {
    setmaxnreg_inc<T.kScoreRegisters>();
    make_scores<T>(p, s);
  } else {
    setmaxnreg_inc<T.kSumRegisters>();
    if (warpgroup == 1) {
      sum_steps<T, false>(p, s, 0);
    } else {
      sum_steps<T, true>(p, s, 1);
    }
  }
  if constexpr (T.cluster2()) {  // the other CTA may still write here
    __syncwarp();
    cluster_sync();
  }
}
