// Computes dS of an iteration of the Blackwell backward from dP in tensor memory, and sends a half to the other CTA of
// a pair.
#pragma once
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/step_probabilities.cuh"

// The destination of a warpgroup's dS: keys in rows of 64 queries. In a CTA pair each CTA needs all keys, but only half
// of the queries; the other half is sent.
template <Sm100BackwardConfig T>
TANDEM_DEVICE u16* ds_place(SharedStorage<T>& s, int index) {
  constexpr int kHalf = T.kCtaKeys * T.queries_of_warpgroup();
  if constexpr (T.two_cta) {
    if (index != cta_rank<T>()) return s.ds_sent;
  }
  if constexpr (T.makes_dk()) return s.ds + index * kHalf;
  return nullptr;
}
// Signals a warp's rows of this CTA's half, or sends the rows of the other half. A thread outside the MMA warpgroups
// signals the leader (relay_ds), because a release at cluster scope is slow.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void send_ds(SharedStorage<T>& s, int index, int warp) {
  const int rank = cta_rank<T>();
  __syncwarp();
  if (!elect_one()) return;
  if (index == rank) return mbarrier_arrive(&s.two_cta.ds_written);
  constexpr int kOfWarp = 32 * T.queries_of_warpgroup();
  bulk_send(s.ds + rank * (4 * kOfWarp) + warp * kOfWarp, s.ds_sent + warp * kOfWarp, 2 * kOfWarp,
            &s.two_cta.ds_tma_full, rank ^ 1);
}

// A thread's row of dS in shared memory, and the index of its first chunk.
struct DsRow {
  Chunk* smem;
  int at;
};

// Computes dS of an iteration from dP at column dp_at, and overwrites dP (two_cta_ring: its second half). dS also goes
// to shared memory in chunks of 16 bytes. Returns the thread's sum if the caller needs it.
template <Sm100BackwardConfig T>
TANDEM_DEVICE float step_ds(const float (&x)[StepAt<T>::kChunks][kChunk], const StepAt<T>& at, SharedStorage<T>& s,
                            u32 dp_at, const DsRow& row, u32 steps) {
  constexpr int kChunks = StepAt<T>::kChunks;
  u32 ds[kChunks][kChunk / 2];
  Float2 sum = float2_of(0.0f);
  auto write_ds = [&](int c) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
      row.smem[row.at ^ (4 * c + n)] = {{ds[c][4 * n], ds[c][4 * n + 1], ds[c][4 * n + 2], ds[c][4 * n + 3]}};
  };
  if constexpr (T.two_pass()) mbarrier_wait(&s.ds_empty, (steps & 1) ^ 1);
  constexpr bool kDqAfterDp = T.two_cta && !T.two_cta_ring();  // the product of the previous dQ may still read dS
  auto store_ds = [&](int c) { tmem_store(dp_at + (T.tmem_ds() - T.tmem_dp()) + c * (kChunk / 2), ds[c]); };
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float dp[kChunk];
    tmem_load(dp, dp_at + c * StepAt<T>::kNextRun);
    tmem_wait_load(dp);
    if (T.two_cta_ring()) c == 0 ? signal<T>(&s.two_cta.dp_half_empty) : store_ds(0);
    make_ds(ds[c], x[c], dp, at, c, sum);
    if (!T.two_cta_ring() || c > 0) store_ds(c);
    if constexpr (!kDqAfterDp) write_ds(c);
    if (T.options.dropout) __syncwarp();
  }
  fence_proxy_async();  // also because TMA may overwrite lse and delta after dK
  if constexpr (T.two_cta) signal<T>(&s.ds_ready);
  if constexpr (kDqAfterDp) {
    mbarrier_wait(&s.dq_ready, (steps & 1) ^ 1);  // previous dQ has read dS, in both CTAs
#pragma unroll
    for (int c = 0; c < kChunks; ++c) write_ds(c);
    fence_proxy_async();
  }
  if constexpr (!T.captured_per_tile) return 0;
  float even, odd;
  split(sum, &even, &odd);
  return even + odd;
}
