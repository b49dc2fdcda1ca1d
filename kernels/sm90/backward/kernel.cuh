// Attention backward for Hopper: dq, dk and dv from q, k, v, dout, the log-sum-exp and delta
// (prepost/bwd_preprocess.cuh).
//
// A CTA takes n_blocks of a key head, keeps their keys and values, and iterates over the queries that see them. dk and
// dv stay in registers. Scores are transposed (keys in rows), so that P and dS are register operands. dq is added in
// float32, in the order of n_blocks (dq_accumulate.cuh); prepost/bwd_postprocess.cuh rounds it. mainloop.cuh chooses a
// main loop by Sm90BackwardConfig::Schedule. The schedule rs (mainloop_rs.cuh):
//
//    load       | dq_accumulate_warp,   | each warpgroup, of its 64 keys
//    Q', dO     | three threads in turn:| dS = P (dP - delta), to shared memory
//               | add dq to global      | dQ of the previous iteration = dS' K, dV += P dO, dK += dS Q
//               | memory, in the order  | during dK: next S = K Q', dQ to shared memory
//               | of n_blocks           | next dP = V dO', during it P = exp(S - lse)
//
// A barrier's name states what is true after the wait (SharedStorage in smem.cuh). Arrivals:
//
//    k_full, v_full, q_full, dout_full  1, and the bytes of TMA
//    q_empty, dout_empty  all MMA warps; with roles the warps of scores and of dk (q) or dv (dout)
//    kv_empty             one per warpgroup, dq_accumulate_warp() thread and load_bias() warp
//    ds_full              all MMA warps, per even and odd iteration; with roles the warps of scores
//    ds_empty             with roles the warps of dk and of dq, here and in the other CTA; with ds_gmem 1
//    p_full, p_empty      with roles the warps of scores, and of dv
//    dq_slot_free         1: the warpgroup may stage or add its dq
//    dq_slot_full         the warps of the warpgroup: dq is staged or added
#pragma once
#include "sm90/backward/captured.cuh"
#include "sm90/backward/dbias.cuh"
#include "sm90/backward/dq_accumulate.cuh"
#include "sm90/backward/dq_kernel.cuh"
#include "sm90/backward/ds_store.cuh"
#include "sm90/backward/load.cuh"
#include "sm90/backward/mainloop.cuh"
#include "sm90/backward/mainloop_warpgroup_roles.cuh"

template <Sm90BackwardConfig T>
TANDEM_DEVICE void backward(const BackwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<SharedStorage<T>*>(memory);
  static_assert(sizeof(SharedStorage<T>) <= T.smem_bytes());
  static_assert(T.fits());
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&p.k, &p.v, &p.q, &p.dout}) prefetch_tensor_map(map);
    init_barriers<T>(s);
    // The first tile is known later. This computation of another tile loads the parameters into the constant cache.
    if constexpr (T.schedule == Sm90BackwardConfig::Schedule::rs && !T.options.varlen && !T.options.block_mask)
      s.tile = n_block_work_at<T>(p, static_cast<int>(blockIdx.x));
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
  } else if constexpr (T.schedule != Sm90BackwardConfig::Schedule::warpgroup_roles) {
    setmaxnreg_inc<T.registers()>();
    compute<T>(p, s, warpgroup - 1);  // chooses mainloop_*.cuh
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
