// Attention backward for Blackwell: dq, dk and dv from q, k, v, dout, the log-sum-exp and delta
// (prepost/bwd_preprocess.cuh). The kernel has run on the virtual GPU, not yet on hardware.
//
// A CTA takes n_blocks of a key head and keeps their 128 keys and values. The CTA iterates over the queries that see
// them, 128 at a time. dk and dv stay in tensor memory. Scores are transposed (keys in the lanes), as the products over
// queries require. dQ = dS' K is added in float32, in the order of n_blocks (dq_reduce.cuh).
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
// A CTA pair exchanges halves of dS (two_cta_load.cuh, two_cta_mma.cuh). Wide heads use two passes, one for dk and one
// for dv, with queries and dout in a ring (two_pass_load.cuh, two_pass_mma.cuh). Another kernel computes their dQ from
// dS in global memory (dq_kernel.cuh). Products need no barriers between each other, because the tensor core executes
// them in the order of issue. A commit covers all earlier products. dp_ready therefore signals that the previous dS has
// been read, and s_ready that P has been read. In a pair, dq_ready covers dS in shared memory. The last dq_ready of a
// tile covers dk and dv.
//
// A barrier's name states what is true after the wait (SharedStorage in smem.cuh). Arrivals:
//
//    *_tma_full           1, and the bytes of TMA
//    *_peer_full          1 per CTA: rows beyond the sequence are zero, in both CTAs of a pair; without varlen 1, and
//                         the bytes of both CTAs
//    q_empty, dout_empty, ring_empty, lse_delta_empty  1, by commit
//    s_ready, dp_ready, dq_ready, dkv_ready            1, by commit: results in tensor memory
//    p_ready, ds_ready, s_empty                        4 warps of each MMA warpgroup
//    dq_empty, dq_loaded, dq_slot_full   4 warps
//    dq_slot_free, ds_empty   1: the addition is complete; the store has read dS
//    kv_empty             all warps that read the tile
#pragma once
#include "sm100/backward/captured.cuh"
#include "sm100/backward/dbias.cuh"
#include "sm100/backward/dq_kernel.cuh"
#include "sm100/backward/ds_store.cuh"
#include "sm100/backward/one_cta_load.cuh"
#include "sm100/backward/one_cta_mma.cuh"
#include "sm100/backward/relay.cuh"
#include "sm100/backward/softmax.cuh"
#include "sm100/backward/two_cta_load.cuh"
#include "sm100/backward/two_cta_mma.cuh"
#include "sm100/backward/two_pass_load.cuh"
#include "sm100/backward/two_pass_mma.cuh"

// store: accumulates dq, or stores dS.
enum class BackwardRole { compute, stage_dq, mma, load, relay, store };
template <Sm100BackwardConfig T>
TANDEM_DEVICE BackwardRole role_of(int warp) {
  constexpr int kOthers = T.threads() / 32 - 4;
  if (warp < 4 * T.kComputing) return BackwardRole::compute;
  if (warp < kOthers) return BackwardRole::stage_dq;
  if (warp == kOthers) return BackwardRole::mma;
  if (warp == kOthers + 1) return BackwardRole::load;
  return warp == kOthers + 2 ? BackwardRole::relay : BackwardRole::store;
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
  if (warp == 0) tmem_alloc<T.ctas()>(&s.tensor_memory, T.kTmemColumns);  // allocates all columns, which begin at 0
  __syncthreads();
  grid_dependency_wait();
  launch_dependents();  // semaphores are zero from here on
}

// Runs a role on all tiles. In two passes the role runs on the tiles of dk, then on the tiles of dv. All warps of the
// CTA must call it.
template <Sm100BackwardConfig T, class Work>
TANDEM_DEVICE void do_tiles(const BackwardParams& p, SharedStorage<T>& s, Work&& work) {
  if constexpr (!T.two_pass()) {
    work(s);
  } else {
    if (p.has_dk || p.dq) work(s);
    if (!p.has_dv) return;
    auto& of_dv = *reinterpret_cast<SharedStorage<T.for_dv()>*>(&s);
    // the dv pass does not overwrite the dk pass's barriers
    static_assert(sizeof of_dv <= T.kTwoPassBlocks * T.kBlockBytes);
    // The barriers of dv are in the ring of dk, which is idle after the last tile.
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
    case BackwardRole::stage_dq:
      setmaxnreg_dec<T.dq_registers()>();
      do_tiles<T>(p, shared, [&](auto& s) { stage_dq(p, s); });
      break;
    default:
      setmaxnreg_dec<T.other_registers()>();
      do_tiles<T>(p, shared, [&](auto& s) {
        if (role == BackwardRole::store && elect_one()) store_dq_or_ds(p, s);
        if constexpr (T.two_cta) {
          if (role == BackwardRole::mma && elect_one())
            cta_rank<T>() == 0 ? mainloop_two_cta_mma(p, s) : relay_ds(p, s);
          if (role == BackwardRole::load && elect_one()) load_two_cta(p, s);
          if constexpr (T.has_relay_warp()) {
            if (role == BackwardRole::relay) relay_two_cta(p, s);
          }
        } else if constexpr (T.two_pass()) {
          if (role == BackwardRole::mma && elect_one()) mainloop_two_pass_mma(p, s);
          if (role == BackwardRole::load && elect_one()) load_two_pass(p, s);
          if constexpr (T.has_relay_warp()) {
            if (role == BackwardRole::relay) relay_two_pass(p, s);
          }
        } else {
          if (role == BackwardRole::mma && elect_one()) mainloop_one_cta_mma(p, s);
          if (role == BackwardRole::load && elect_one()) load_one_cta(p, s);
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
