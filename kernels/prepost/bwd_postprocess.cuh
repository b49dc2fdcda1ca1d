// Converts gradient sums in workspace, which are in the fragment order of the main kernel's threads, to the caller's
// type and layout. The kernel handles dq and, if an n_block's iterations were split, dk and dv.
#pragma once
#include "config/gradient_order.h"
#include "device/gradient.cuh"
#include "device/n_block_work.cuh"
#include "device/sequence.cuh"
#include "ptx/global.cuh"
#include "ptx/warp.cuh"

// The place of an m_block. block: an index over all heads. nothing: no key is visible to the m_block.
struct PostprocessAt {
  int head, block, m_block;
  bool nothing;
};
// The numbers that a thread converts: pairs from `begin` on of the main kernel's thread `thread`.
struct PostprocessPairs {
  int thread, begin;
};

// Converts dq of a (query head, m_block), a batch of pairs per thread.
template <auto T>
struct PostprocessDq {
  static constexpr int kPairs = T.postprocess_pairs(), kThreads = T.dq_part_threads();  // per part
  const BackwardParams& p;
  const SequenceCoords& s;
  const int m_block;
  const PostprocessPairs from;
  const i64 base;  // offset of the head's first query
  float4 x[kPairs / 2];

  TANDEM_DEVICE PostprocessDq(const BackwardParams& params, const SequenceCoords& sequence, const PostprocessAt& at,
                              const PostprocessPairs& pairs)
      : p(params), s(sequence), m_block(at.m_block), from(pairs), base(dq_row_at(p, s.batch, s.q_begin, at.head)) {
    const float4* const sums = reinterpret_cast<const float4*>(p.dq_accum + static_cast<i64>(at.block) * T.dq_floats() +
                                                               from.thread / kThreads * (2 * kThreads * T.dq_pairs())) +
                               from.begin / 2 * kThreads + from.thread % kThreads;
    if constexpr (splits_dq(constant<T>)) {
      sum_splits(sums, at.head);
    } else {
#pragma unroll
      for (int n = 0; n < kPairs / 2; ++n) x[n] = at.nothing ? make_float4(0, 0, 0, 0) : sums[n * kThreads];
    }
  }
  TANDEM_DEVICE void add(int n, const float4& more) {
    x[n].x += more.x, x[n].y += more.y, x[n].z += more.z, x[n].w += more.w;
  }
  // Adds every groups-th of the sums that have n_blocks for this m_block, from the thread's group on.
  TANDEM_DEVICE void sum_splits(const float4* sums, int head) {
    constexpr int kAtOnce = 4;  // sums whose loads are in flight together
    const int groups = T.dq_sum_groups(p.dq_splits), group = threadIdx.x / (T.postprocess_threads() / groups);
#pragma unroll
    for (float4& sum : x) sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = group; first < p.dq_splits; first += kAtOnce * groups) {
      bool has[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int split = first + i * groups;
        has[i] = split < p.dq_splits && count_split_n_blocks(constant<T>, p, s, head, m_block, split) > 0;
      }
#pragma unroll
      for (int n = 0; n < kPairs / 2; ++n) {
        float4 more[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const i64 of_split = dq_block_at(constant<T>, p, 0, first + i * groups) * (T.dq_floats() / 4);
          more[i] = has[i] ? sums[of_split + n * kThreads] : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (has[i]) add(n, more[i]);
      }
    }
  }
  // Adds the sums of the CTA's groups in their order. Returns true for a thread that has the result.
  TANDEM_DEVICE bool join_groups() {
    const int groups = T.dq_sum_groups(p.dq_splits), of_group = T.postprocess_threads() / groups;
    if (groups == 1) return true;
    __shared__ float4 parts[kPairs / 2][T.postprocess_threads()];
#pragma unroll
    for (int n = 0; n < kPairs / 2; ++n) parts[n][threadIdx.x] = x[n];
    __syncthreads();
    if (threadIdx.x >= of_group) return false;
#pragma unroll 1
    for (int group = 1; group < groups; ++group)
#pragma unroll
      for (int n = 0; n < kPairs / 2; ++n) add(n, parts[n][group * of_group + threadIdx.x]);
    return true;
  }

  TANDEM_DEVICE int query_of(const GradientPair& at) const { return m_block * T.tile_m + at.row; }
  TANDEM_DEVICE float2 pair(int n, int query) const {
    const float scale = query < s.q_len ? p.scale : 0;
    const float4& both = x[n / 2];
    return n % 2 == 0 ? make_float2(both.x * scale, both.y * scale) : make_float2(both.z * scale, both.w * scale);
  }

  // Stores pairs, for any type and strides.
  TANDEM_DEVICE void store_pairs() const {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const GradientPair at = T.dq_pair(from.thread, from.begin + n);
      const int query = query_of(at);
      if (at.column >= p.head_dim || query >= (p.accumulate ? s.q_len : s.q_rows)) continue;
      const float2 dq = pair(n, query);
      store_pair<T>(p.dq, base + query * p.dq_row + at.column, dq.x, dq.y, p.dq_is_f32, p.accumulate);
    }
  }

  // Stores 16 bytes at once, which takes a quarter of the time of pairs. If four threads share a row, they first
  // exchange pairs of four times 8 columns.
  TANDEM_DEVICE void store_chunks() const {
    constexpr bool kShared = T.kFourHaveRow;
    constexpr int kRows = kShared ? 2 : 1;  // rows with alternating pairs
#pragma unroll
    for (int first = 0; first < kPairs; first += 4 * kRows) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const GradientPair at = kShared ? T.dq_pair(from.thread & ~3, from.begin + first + 2 * (from.thread & 3) + i)
                                        : T.dq_pair(from.thread, from.begin + first);
        const int query = query_of(at);
        u32 words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 dq = pair(first + kRows * w + i, query);
          words[w] = pack<T>(dq.x, dq.y);
        }
        if (kShared) transpose_words(words);
        if (at.column < p.head_dim && query < s.q_rows)
          global_store(static_cast<u16*>(p.dq) + base + query * p.dq_row + at.column, words);
      }
    }
  }
};
// Waits until all n_blocks that see the m_block have added to its dq. Returns true if no n_block sees it. The main
// kernel may still run: finished SMs convert meanwhile. The main kernel lets this kernel begin only if semaphores count
// from zero.
template <auto T>
TANDEM_DEVICE bool wait_for_sums(const BackwardParams& p, const SequenceCoords& s, const PostprocessAt& at) {
  const int* const semaphores = p.dq_semaphore + dq_semaphore_at(constant<T>, at.block, 0);
  if constexpr (T.options.block_mask) {
    grid_dependency_wait();
    return *semaphores == 0;
  }
  for (int n = threadIdx.x; n < dq_splits(constant<T>, p) * T.dq_semaphores(); n += blockDim.x) {
    const int split = n / T.dq_semaphores(), part = n % T.dq_semaphores();
    const int all = count_split_n_blocks(constant<T>, p, s, at.head, at.m_block, split);
    const i64 place = dq_semaphore_at(constant<T>, dq_block_at(constant<T>, p, 0, split), part);
    while (load_acquire(semaphores + place) != all) sleep(100);
  }
  __syncthreads();
  return count_n_blocks<T>(p, s, at.m_block) == 0;
}
template <auto T>
TANDEM_DEVICE void postprocess_dq(const BackwardParams& p, int cta) {
  const int ctas = T.postprocess_ctas(p.dq_splits), block = cta / ctas,
            sequence = sequence_at<T>(p, block % p.m_blocks);
  const SequenceCoords s = sequence_coords<T>(p, sequence);
  PostprocessAt at{block / p.m_blocks, block, block % p.m_blocks - s.first_m_block, false};
  at.nothing = wait_for_sums<T>(p, s, at);
  const auto store = [&](const PostprocessDq<T>& dq) {
    if (dq_has_chunks(p)) {
      dq.store_chunks();
    } else {
      dq.store_pairs();
    }
  };
  if constexpr (splits_dq(constant<T>)) {
    const int of_group = T.postprocess_threads() / T.dq_sum_groups(p.dq_splits);
    const int n = cta % ctas * of_group + threadIdx.x % of_group;
    PostprocessDq<T> dq(p, s, at, {n % T.postprocess_threads(), n / T.postprocess_threads() * T.postprocess_pairs()});
    if (dq.join_groups()) store(dq);
  } else {
#pragma unroll 1
    for (int first = 0; first < T.dq_pairs(); first += T.postprocess_pairs())
      store(PostprocessDq<T>(p, s, at, {static_cast<int>(threadIdx.x), first}));
  }
}

// Sums T.kSumFloats of each thread's dk or dv over the splits of an n_block, in their order. With split_q_heads the
// heads' dk and dv are already summed.
template <auto T>
TANDEM_DEVICE void postprocess_dkv(const BackwardParams& p, int block) {
  const int sum = block % T.dkv_accum_ctas(), n = block / T.dkv_accum_ctas();
  const bool of_k = sum < T.dk_sums();
  if (!(of_k ? p.has_dk : p.has_dv)) return;
  if (threadIdx.x >= T.dkv_threads()) return;
  const int n_blocks = p.n_blocks * T.ctas();
  int n_block = n % n_blocks, head = n / n_blocks % p.heads_k, sequence = n / n_blocks / p.heads_k;
  if constexpr (has_diagonal_parts(constant<T>)) {
    const int parted = count_parted_n_blocks(p);
    n_block = n % parted, head = n / parted % p.heads_k, sequence = n / parted / p.heads_k;
  } else if constexpr (T.has_unsplit_tiles()) {
    const NBlockWork tile = n_block_work_at<T>(p, p.unsplit_tiles + n / T.ctas() * p.m_splits);
    n_block = tile.n_block * T.ctas() + n % T.ctas(), head = tile.head_k, sequence = tile.sequence;
  }
  const SequenceCoords s = sequence_coords<T>(p, sequence);
  if (n_block * T.cta_keys() >= s.k_rows) return;  // the split's sums do not exist
  const int parts = split_q_heads<T>() ? 1 : p.m_splits;
  const int columns = of_k ? T.dk_columns() : T.dv_columns();
  const int first = (of_k ? sum : sum - T.dk_sums()) * T.kSumFloats;  // index of the thread's first number
  const float* const sums = p.dkv_accum + static_cast<i64>(n) * parts * T.dkv_floats() +
                            (of_k ? 0 : T.cta_keys() * T.head_dim) + threadIdx.x / 128 * (64 * columns) + first * 128;
  const float4* from = reinterpret_cast<const float4*>(sums) + threadIdx.x % 128;
  float x[T.kSumFloats] = {};
#pragma unroll 2
  for (int m_split_idx = 0; m_split_idx < parts; ++m_split_idx, from += T.dkv_floats() / 4) {
    if (has_diagonal_parts(constant<T>) && m_split_idx % p.dq_splits >= diagonal_parts_of(p).parts(n_block)) continue;
#pragma unroll
    for (int r = 0; r < T.kSumFloats; r += 4) {
      const float4 more = from[r / 4 * 128];
      x[r] += more.x, x[r + 1] += more.y, x[r + 2] += more.z, x[r + 3] += more.w;
    }
  }
  const float scale = of_k ? p.scale : T.options.dropout ? p.dropout.scale : 1;
  void* const to = of_k ? p.dk_data : p.dv_data;
  const i64 row = of_k ? p.dk_row : p.dv_row;
  const i64 base = dkv_row_at(p, of_k, s.batch, s.k_begin, head);
#pragma unroll
  for (int r = 0; r < T.kSumFloats; r += 2) {
    const GradientPair at = T.dkv_pair(threadIdx.x, (first + r) / 2, columns);
    const int key = n_block * T.cta_keys() + at.row;
    if (at.column >= (of_k ? p.head_dim : p.head_dim_v) || key >= (p.accumulate ? s.k_len : s.k_rows)) continue;
    const float keep = key < s.k_len ? scale : 0;
    store_pair<T>(to, base + key * row + at.column, x[r] * keep, x[r + 1] * keep, of_k ? p.dk_is_f32 : p.dv_is_f32,
                  p.accumulate);
  }
}

// T.postprocess_ctas() CTAs for each (query head, m_block) if dq must be converted, and one for each part of an
// n_block's dk and dv. The first CTA waits for the main kernel, so that this kernel does not end before it.
template <auto T>
TANDEM_DEVICE void bwd_postprocess(const BackwardParams& p) {
  launch_dependents();
  const bool converts_dq = p.dq && !single_n_block<T>() && !ds_gmem<T>();
  const int of_dq = converts_dq ? p.heads_q * p.m_blocks * T.postprocess_ctas(p.dq_splits) : 0, block = blockIdx.x;
  if constexpr (!ds_gmem<T>()) {
    if (!T.m_split || block < of_dq) {
      postprocess_dq<T>(p, block);
      if (block == 0) grid_dependency_wait();
      return;
    }
  }
  if constexpr (T.m_split) {
    grid_dependency_wait();
    postprocess_dkv<T>(p, block - of_dq);
  }
}
