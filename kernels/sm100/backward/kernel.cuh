// Attention backward for Blackwell: dq, dk and dv from q, k, v, dout, the log-sum-exp and delta
// (prepost/bwd_preprocess.cuh). Tested on the virtual GPU, not yet on hardware.
//
// A CTA takes n_blocks of a key head and keeps their 128 keys and values. It iterates over the queries that see them,
// 128 at a time. dk and dv stay in tensor memory. Scores are transposed (keys in the lanes), as the products over
// queries require. dQ = dS' K is added in float32, in the order of n_blocks (dq.cuh); prepost/bwd_postprocess.cuh
// rounds it.
//
//    load     | mma                 | two warpgroups, 64 queries each | dq
//    Q, K     | S = K Q'            |                                 |
//    V, dO    | dP = V dO'          | P = exp(S - lse)                |
//    Q'       | dV += P dO          |                                 |
//             | S' = K Q'' (next)   | dS = P (dP - delta)             |
//    dO'      | dK += dS Q, dQ = .. | P' = exp(S' - lse)              |
//             | dP' (dQ is read)    |                                 | dQ to shared memory
//    Q''      | dV += P' dO'        |                                 | added to memory
//             | S'' ...             | dS' = P' (dP' - delta)          |
//
// A CTA pair multiplies 256 keys at once. dQ has half of the queries in each CTA and all 256 keys, so that halves of dS
// are exchanged (pair_load.cuh, pair_mma.cuh). Meanwhile S, dK and the next dP are multiplied:
//
//    load     | mma, for both CTAs  | two warpgroups, 64 queries each | exchange, dq
//    Q''      | S' = K Q''          | dS = P (dP - delta)             | halves of dS to the other CTA
//             | dK += dS Q          | S' is read                      |
//    dO'      | dP' = V dO''        | P' = exp(S' - lse), first half  |
//             | dQ = dS' K          | second half                     |
//             | dV += P' dO'        |                                 | dQ to shared memory
//             | S'' ...             | dS' = P' (dP' - delta)          | added to memory
//
// Wide heads use two passes, one for dk and dq and one for dv, with queries and dout in a ring (wide_load.cuh,
// wide_mma.cuh). One thread's products need no barriers between them, because the tensor core executes them in the
// order of issue. A commit covers all earlier products. dp_ready therefore signals that the previous dS has been read,
// and s_ready that P has been read. In a pair, dq_ready covers dS in shared memory.
#pragma once
#include "prepost/bwd_postprocess.cuh"
#include "prepost/bwd_preprocess.cuh"
#include "prepost/dsink.cuh"
#include "sm100/backward/captured.cuh"
#include "sm100/backward/dbias.cuh"
#include "sm100/backward/dq.cuh"
#include "sm100/backward/load.cuh"
#include "sm100/backward/mma.cuh"
#include "sm100/backward/relay.cuh"
#include "sm100/backward/softmax.cuh"
#include "sm100/backward/two_cta_load.cuh"
#include "sm100/backward/two_cta_mma.cuh"
#include "sm100/backward/two_pass_load.cuh"
#include "sm100/backward/two_pass_mma.cuh"

enum class BackwardRole { compute, dq, mma, load, relay, none };
template <Sm100BackwardConfig T>
TANDEM_DEVICE BackwardRole role_of(int warp) {
  constexpr int kOthers = 4 * (T.kComputing + 1);
  if (warp < 4 * T.kComputing) return BackwardRole::compute;
  if (warp < kOthers) return BackwardRole::dq;
  if (warp == kOthers) return BackwardRole::mma;
  if (warp == kOthers + 1) return BackwardRole::load;
  return T.has_relay_warp() && warp == kOthers + 2 ? BackwardRole::relay : BackwardRole::none;
}

// One thread.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void init_barriers(SharedStorage<T>& s) {
  constexpr int kComputeWarps = 4 * T.kComputing;
  constexpr int ctas = T.ctas();
  for (u64* barrier : {&s.k_tma_full, &s.v_tma_full, &s.dp_ready, &s.sums_ready}) mbarrier_init(barrier, 1);
  for (u64* barrier : {&s.k_peer_full, &s.v_peer_full}) mbarrier_init(barrier, ctas);
  for (int i = 0; i < T.q_stages; ++i) {
    for (u64* barrier : {&s.q_tma_full[i], &s.q_empty[i]}) mbarrier_init(barrier, 1);
    mbarrier_init(&s.q_peer_full[i], ctas);
  }
  for (int i = 0; i < T.dout_stages; ++i) {
    for (u64* barrier : {&s.dout_tma_full[i], &s.dout_empty[i]}) mbarrier_init(barrier, 1);
    mbarrier_init(&s.dout_peer_full[i], ctas);
  }
  if constexpr (T.lse_delta_alone()) {
    for (u64* barrier : {&s.lse_delta_tma_full[0], &s.lse_delta_tma_full[1]}) mbarrier_init(barrier, 1);
  }
  if constexpr (T.two_pass()) {
    for (u64* barrier : {&s.lse_delta_empty[0], &s.lse_delta_empty[1]}) mbarrier_init(barrier, 1);
    for (int i = 0; i < T.ring_blocks(); ++i) {
      for (u64* barrier : {&s.ring_tma_full[i], &s.ring_peer_full[i], &s.ring_empty[i]}) mbarrier_init(barrier, 1);
    }
  }
  if constexpr (T.reads_scores_ahead()) mbarrier_init(&s.s_empty, kComputeWarps * ctas);
  if constexpr (T.two_cta) {
    for (u64* barrier : {&s.two_cta.kt_tma_full, &s.two_cta.qt_tma_full, &s.two_cta.doutt_tma_full, &s.two_cta.qt_empty,
                         &s.two_cta.doutt_empty, &s.two_cta.ds_tma_full, &s.two_cta.ds_peer_full,
                         &s.two_cta.tile_signalled, &s.two_cta.tile_read})
      mbarrier_init(barrier, 1);
    for (u64* barrier : {&s.two_cta.kt_peer_full, &s.two_cta.qt_peer_full, &s.two_cta.doutt_peer_full})
      mbarrier_init(barrier, ctas);
    mbarrier_init(&s.two_cta.ds_written, 4 * ctas);
  }
  mbarrier_init(&s.kv_empty, s.kTileWarps);
  for (int i = 0; i < T.s_slots(); ++i) mbarrier_init(&s.s_ready[i], 1);
  for (int i = 0; i < T.p_parts(); ++i) mbarrier_init(&s.p_ready[i], kComputeWarps * ctas);
  mbarrier_init(&s.ds_ready, kComputeWarps * ctas);
  for (int i = 0; i < T.dq_pieces(); ++i) {
    mbarrier_init(&s.dq_ready[i], 1);
    mbarrier_init(&s.dq_empty[i], 4 * ctas);
  }
  fence_mbarrier_init();
  fence_proxy_async();
}

template <Sm100BackwardConfig T>
TANDEM_DEVICE void begin(const BackwardParams& p, SharedStorage<T>& s, int warp) {
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&p.k, &p.v, &p.q, &p.dout}) prefetch_tensor_map(map);
    init_barriers<T>(s);
  }
  // Both CTAs of a pair must run from here on: tensor memory is allocated for both at once, and each uses the other's
  // barriers.
  if constexpr (T.two_cta) cluster_sync();
  if (warp == 0) tmem_alloc<T.ctas()>(&s.tensor_memory, T.kTmemColumns);  // all columns: they begin at 0
  __syncthreads();
  grid_dependency_wait();
  launch_dependents();  // semaphores are zero from here on
}

// Runs a role on all tiles. In two passes it runs on the tiles of dk, then on the tiles of dv; all warps of the CTA
// call it.
template <Sm100BackwardConfig T, class Work>
TANDEM_DEVICE void do_tiles(const BackwardParams& p, SharedStorage<T>& s, Work&& work) {
  if constexpr (!T.two_pass()) {
    work(s);
  } else {
    if (p.has_dk || p.dq) work(s);
    if (!p.has_dv) return;
    auto& of_dv = *reinterpret_cast<SharedStorage<T.for_dv()>*>(&s);
    static_assert(sizeof of_dv <= T.kTwoPassBlocks * T.kBlockBytes);  // ends before the barriers of dk
    // In the ring of dk, which is idle after the last tile.
    if (threadIdx.x == 0) init_barriers<T.for_dv()>(of_dv);
    __syncwarp();
    __syncthreads();
    work(of_dv);
  }
}

template <Sm100BackwardConfig T>
TANDEM_DEVICE void backward(const BackwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<SharedStorage<T>*>(memory);
  static_assert(sizeof(SharedStorage<T>) <= T.smem_bytes());
  static_assert(T.fits() && T.registers_fit());
  const int warp = warp_uniform(threadIdx.x / 32);
  begin(p, shared, warp);
  const BackwardRole role = role_of<T>(warp);
  switch (role) {
    case BackwardRole::compute:
      setmaxnreg_inc<T.compute_registers()>();
      do_tiles<T>(p, shared, [&](auto& s) { compute(p, s, warp / 4); });
      break;
    case BackwardRole::dq:
      setmaxnreg_dec<T.dq_registers()>();
      do_tiles<T>(p, shared, [&]<Sm100BackwardConfig P>(SharedStorage<P>& s) {
        if constexpr (P.makes_dk()) accumulate_dq(p, s);
      });
      break;
    default:
      setmaxnreg_dec<T.kOtherRegisters>();
      do_tiles<T>(p, shared, [&](auto& s) {
        if constexpr (T.two_cta) {
          if (role == BackwardRole::mma && elect_one()) cta_rank<T>() == 0 ? mma_pair(p, s) : relay_ds(p, s);
          if (role == BackwardRole::load && elect_one()) load_pair(p, s);
          if (role == BackwardRole::relay) relay_pair(p, s);
        } else if constexpr (T.two_pass()) {
          if (role == BackwardRole::mma && elect_one()) mma_wide(p, s);
          if (role == BackwardRole::load && elect_one()) load_wide(p, s);
          if constexpr (T.has_relay_warp()) {
            if (role == BackwardRole::relay) relay_wide(p, s);
          }
        } else {
          if (role == BackwardRole::mma && elect_one()) mma(p, s);
          if (role == BackwardRole::load && elect_one()) load(p, s);
          if constexpr (T.has_relay_warp()) {
            if (role == BackwardRole::relay) relay(p, s);
          }
        }
        __syncwarp();
      });
  }
  if constexpr (T.two_cta) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (warp == 0) tmem_free<T.ctas()>(shared.tensor_memory, T.kTmemColumns);
}
