// Computes P of an iteration of the Blackwell backward from S in tensor memory.
#pragma once
#include "ptx/tcgen05.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/dsoftmax.cuh"
#include "sm100/backward/smem.cuh"

// Signals that a warp has written tensor memory. written: it has written shared memory, too.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void signal(u64* barrier, bool written = false) {
  tmem_wait_store();
  tcgen05_fence_before();
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive_at_leader<T>(barrier, written);
}

// Computes P of an iteration from S at column scores_at, and overwrites S with the rounded P.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void step_probabilities(float (&x)[StepAt<T>::kChunks][kChunk], const StepAt<T>& at, SharedStorage<T>& s,
                                      u32 scores_at, u32 s_slot, bool hides) {
  constexpr int kChunks = StepAt<T>::kChunks, kNextRun = StepAt<T>::kNextRun;
  u32 rounded[kChunks][kChunk / 2];
  auto to_probabilities = [&](int c, int begin, int end) {
    if constexpr (T.options.softcap) {
      begin == 0 && end == kChunk ? apply_softcap<true>(x[c], at.p) : apply_softcap<true>(half_of(x[c], begin), at.p);
    }
    if (hides) at.visibility.apply_mask(x[c], at.query + c * kNextRun, begin, end);
    if constexpr (T.branches_at_scores()) {
      const int query = at.query + c * kNextRun;
      if (hides && !warp_any(at.visibility.sees_some(query + begin, query + end)))
        return no_probabilities(x[c], rounded[c], begin, end);
    }
    make_probabilities(x[c], rounded[c], at, c, begin, end);
  };
  auto store_probabilities = [&](int c) {
    fence_operand(x[c]);
    if constexpr (T.makes_dv()) tmem_store(scores_at + c * (kChunk / 2), rounded[c]);
  };
  if constexpr (T.two_cta) {
    // Load a small first part of S, then load the rest while its exponentials are computed.
    tmem_load(half_of(x[0], 0), scores_at);
    tmem_wait_load(half_of(x[0], 0));
    tmem_load(half_of(x[0], kChunk / 2), scores_at + kChunk / 2);
    tmem_load(x[1], scores_at + kNextRun);
    to_probabilities(0, 0, kChunk / 2);
    tmem_wait_load(x);
    signal<T>(&s.s_empty);
    to_probabilities(0, kChunk / 2, kChunk);
    store_probabilities(0);
    signal<T>(&s.p_ready[0]);
    to_probabilities(1, 0, kChunk);
    store_probabilities(1);
    signal<T>(&s.p_ready[1]);
  } else {
    if constexpr (T.reads_scores_ahead()) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) tmem_load(x[c], scores_at + c * kNextRun);
      tmem_wait_load(x);
      signal<T>(&s.s_empty);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if constexpr (!T.reads_scores_ahead()) {
        tmem_load(x[c], scores_at + c * kNextRun);
        tmem_wait_load(x[c]);
      }
      to_probabilities(c, 0, kChunk);
      store_probabilities(c);
    }
    if constexpr (T.makes_dv()) {
      // Orders the reads of lse and delta before TMA overwrites them. The code of dS has another fence.
      if constexpr (!T.makes_dk()) fence_proxy_async();
      signal<T>(&s.p_ready[s_slot]);
    }
  }
}
