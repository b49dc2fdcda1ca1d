// Attention forward for Blackwell: out = softmax(scale q k^T) v and its log-sum-exp. The kernel has not run on
// hardware. One CTA per SM takes work tiles of two 128-row tiles, the longest first (varlen: from the list of
// schedule()). S, P and O stay in tensor memory. The tiles alternate on the tensor core, so that the softmax of one
// overlaps the products of the other. The next work tile (') begins before the last values of this one are multiplied:
//
//    load      | mma                  | softmax0            | softmax1            | epilogue
//    K1 Q0 Q1  | S0 = Q0 K1           |                     |                     |
//    V1        | S1 = Q1 K1           | P0 = softmax(S0)    |                     |
//    K0        | O0 += P0 V1, S0 = .. | (O0 *= alpha)       | P1 = softmax(S1)    |
//    V0        | O1 += P1 V1, S1 = .. | P0 = softmax(S0)    | (O1 *= alpha)       |
//    K' Q0'    | O0 += P0 V0, S0'= .. |                     | P1 = softmax(S1)    | O0 / sum -> out
//    Q1' V'    | O1 += P1 V0, S1'= .. | P0 = softmax(S0')   |                     | O1 / sum -> out
//
// A softmax thread has one row. The thread moves row_max and scales its row of O only if sums or scores grow too much;
// the epilogue divides by the sum. Tensor memory has 512 columns. P overwrites its S from the left, two elements per
// column:
//
//    two tiles                       | one tile (of a pair), head_dim_v over 128 or head_dim over 192
//    0    S0, P0                     | 0    S, P of even iterations
//    128  S1, P1                     | 128  S, P of odd iterations
//    256  O0 [head_dim_v <= 128]     | 256  O [head_dim_v <= 256]
//    ...  O1                         |
//
// In a CTA pair a product has 256 rows. Each CTA loads half of the keys (64 rows) and half of the values (columns). The
// first CTA issues all products, and its barriers count the bytes of both CTAs. Running pairs take over work by cluster
// launch control. One warp's products need no barriers: the tensor core executes them in the order of issue. PTX
// guarantees this for equal columns; FlashAttention-4 and CUTLASS also rely on it when S overwrites P.
//
// A barrier's name states what is true after the wait (SharedStorage in smem.cuh). Arrivals:
//
//    * at the leader of a CTA pair, from both CTAs
//    *_tma_full              1, and the bytes of TMA (of a pair without varlen: of both CTAs, at the leader)
//    *_peer_full *           1 per CTA: rows beyond the sequence are zero
//    ring_empty, q_empty, s_ready, o_full, o_added  1, by commit
//    p_ready *               4 warps, for each part of P
//    o_empty *, sum_ready, sum_empty                4 warps
//    work_empty              every warp but load's
#pragma once
#include "device/block_mask.cuh"
#include "device/max_scores.cuh"
#include "device/scheduler.cuh"
#include "prepost/combine_splits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/epilogue.cuh"
#include "sm100/forward/load.cuh"
#include "sm100/forward/mma.cuh"
#include "sm100/forward/relay.cuh"
#include "sm100/forward/smem.cuh"
#include "sm100/forward/softmax.cuh"

enum class ForwardRole { softmax, epilogue, mma, load, relay, none };
template <Sm100ForwardConfig T>
TANDEM_DEVICE ForwardRole role_of(int warp) {
  constexpr int kOthers = 4 * (T.q_stage() + 1);
  if (warp < 4 * T.q_stage()) return ForwardRole::softmax;
  if (warp < kOthers) return ForwardRole::epilogue;
  if (warp == kOthers) return cta_rank<T>() == 0 ? ForwardRole::mma : ForwardRole::none;
  if (warp == kOthers + 1) return ForwardRole::load;
  return T.has_relay_warp() && warp == kOthers + 2 ? ForwardRole::relay : ForwardRole::none;
}

template <Sm100ForwardConfig T>
TANDEM_DEVICE void sync_all() {
  if constexpr (T.two_cta) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}

template <Sm100ForwardConfig T>
TANDEM_DEVICE void begin(const ForwardParams& p, SharedStorage<T>& s, int warp) {
  // The warps that read work tiles from load().
  const int warps = 4 * (T.q_stage() + 1) + (cta_rank<T>() == 0) + T.has_relay_warp();
  constexpr int ctas = T.ctas();
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&p.k, &p.q, &p.v, &p.out}) prefetch_tensor_map(map);
#pragma unroll 1
    for (int i = 0; i < kWorkSlots; ++i) {
      s.work[i].overflowed = 0;
      mbarrier_init(&s.work_full[i], 1);
      mbarrier_init(&s.work_empty[i], warps);
      if (T.two_cta) mbarrier_init(&s.overflow_signalled[i], 1);
    }
#pragma unroll 1
    for (int i = 0; i < T.ring_slots(); ++i) {
      mbarrier_init(&s.ring_tma_full[i], 1);
      mbarrier_init(&s.ring_empty[i], 1);
      if (T.has_relay_warp()) mbarrier_init(&s.ring_peer_full[i], ctas);
    }
    for (int i = 0; i < 2; ++i) mbarrier_init(&s.clc_full[i], 1);
#pragma unroll 1
    for (int i = 0; i < T.kScoreSlots; ++i) {
      mbarrier_init(&s.s_ready[i], 1);
      mbarrier_init(&s.p_ready[i][0], 4 * ctas);
      mbarrier_init(&s.p_ready[i][1], 4 * ctas);
    }
#pragma unroll 1
    for (int i = 0; i < T.q_stage(); ++i) {
      mbarrier_init(&s.q_tma_full[i], 1);
      mbarrier_init(&s.q_empty[i], 1);
      mbarrier_init(&s.q_peer_full[i], ctas);
      mbarrier_init(&s.o_added[i], 1);
      mbarrier_init(&s.sum_ready[i], 4);
      mbarrier_init(&s.sum_empty[i], 4);
      mbarrier_init(&s.o_full[i], 1);
      mbarrier_init(&s.o_empty[i], 4 * ctas);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  // Both CTAs of a pair must run from here on: tensor memory is allocated for both at once, and each uses the other's
  // barriers.
  if constexpr (T.two_cta) cluster_sync();
  if (warp == 0) tmem_alloc<ctas>(&s.tensor_memory, T.kTmemColumns);  // allocates all columns, which begin at 0
  __syncthreads();
}

template <Sm100ForwardConfig T>
TANDEM_DEVICE void forward(const ForwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<SharedStorage<T>*>(memory);
  static_assert(sizeof(SharedStorage<T>) <= T.smem_bytes());
  static_assert(T.fits());
  const int warp = warp_uniform(threadIdx.x / 32);
  begin(p, s, warp);
  const ForwardRole role = role_of<T>(warp);
  switch (role) {
    case ForwardRole::softmax:
      setmaxnreg_inc<T.softmax_registers()>();
      softmax(p, s, warp / 4);
      break;
    case ForwardRole::epilogue:
      setmaxnreg_dec<T.epilogue_registers()>();
      epilogue(p, s);
      break;
    default:
      setmaxnreg_dec<T.other_registers()>();
      if (role == ForwardRole::mma) mma(p, s);
      if (role == ForwardRole::load && elect_one()) load(p, s);
      if constexpr (T.has_relay_warp()) {
        if (role == ForwardRole::relay) relay(s);
      }
      __syncwarp();
  }
  sync_all<T>();
  if (warp_uniform(threadIdx.x / 32) == 0) tmem_free<T.ctas()>(s.tensor_memory, T.kTmemColumns);
}
