// The iterations of a backward tile with a block mask. Two kernels list these iterations before the main kernel.
//
// The n_blocks that an m_block sees are unknown in advance, so that one order must work for any mask. n_blocks run from
// last to first, and each iterates from its first m_block on. With causal and similar masks n_blocks then reach an
// m_block in consecutive iterations (see spt). An n_block that all m_blocks see, such as the first keys, comes last and
// waits for no other.
#pragma once
#include "config/backward_addresses.h"
#include "device/block_mask.cuh"
#include "device/sequence.cuh"

// The state of an m_block of a query head and an n_block in the table.
template <auto T>
TANDEM_DEVICE u32 table_word(const BackwardParams& params, const SequenceCoords& s, int head, int m_block,
                             int n_block) {
  const auto& p = static_cast<const BlockMaskedBackwardParams&>(params);
  const int batch = p.blocks.batch > 1 ? s.sequence : 0, list = p.blocks.heads > 1 ? head : 0;
  const i64 row = static_cast<i64>(batch * p.blocks.heads + list) * p.sequence_m_blocks + m_block;
  return p.table[row * p.n_blocks + n_block];
}
// The state of one CTA's keys.
template <auto T>
TANDEM_DEVICE BlockState block_state(const BackwardParams& p, const SequenceCoords& s, int head, int m_block,
                                     int n_block, int cta) {
  if constexpr (T.options.block_mask) return state_of(table_word<T>(p, s, head, m_block, n_block), cta);
  return BlockState::full;
}

// Computes a row of the table, for one m_block of one list: one CTA of kListBlocksThreads threads.
template <auto T>
TANDEM_DEVICE void mark_n_blocks(const BlockMaskedBackwardParams& p) {
  constexpr int kChunk = 1024 / T.ctas() * T.ctas(), kKeys = T.tile_n() / T.ctas();
  __shared__ u32 states[kChunk];  // states per key of a CTA
  __shared__ int counts[kListBlocksThreads / 32];
  const TileCoords tile = listed_tile<T>(p);
  const int row = tile.m_block * T.tile_m, last = min(row + T.tile_m, tile.q_len) - 1;
  const KeyRange seen = band_of<T>(p, tile).visible_keys(row, last);
  const int first_seen = max(0, seen.begin) / kKeys,
            seen_end = last < row ? 0 : (min(seen.end, tile.k_len) + kKeys - 1) / kKeys;
  int* const table = p.table + table_row_at(p, blockIdx.x);
  int before = 0;
#pragma unroll 1
  for (int end = p.n_blocks * T.ctas(); end > 0; end -= kChunk) {
    const int begin = max(0, end - kChunk), from = max(begin, first_seen), to = min(end, seen_end);
    for (int i = threadIdx.x; i < kChunk; i += kListBlocksThreads) states[i] = 0;
    __syncthreads();
    mark_row<T>(p.blocks, tile, row, 0, {states, begin, from, to});
    __syncthreads();
    const int first = begin / T.ctas();
#pragma unroll 1
    for (int n = end / T.ctas() - 1; n >= first; n -= kListBlocksThreads) {
      const int n_block = n - static_cast<int>(threadIdx.x);
      u32 bits = 0;
      for (int cta = 0; cta < T.ctas() && n_block >= first; ++cta)
        bits |= states[(n_block - first) * T.ctas() + cta] << 2 * cta;
      bits = without_twice(bits);
      const ItemPlace place = place_item(bits != 0, counts);
      if (n_block >= first)
        table[n_block] = static_cast<int>(static_cast<u32>(before + place.before) << kStateBits | bits);
      before += place.all;
    }
  }
}

// Iterations begin at the first m_block. All heads of an m_block come together; with a left bound all m_blocks of a
// head come together.
template <auto T>
TANDEM_DEVICE void list_m_blocks(const BlockMaskedBackwardParams& p) {
  __shared__ int counts[kListBlocksThreads / 32];
  const int tile = blockIdx.x / p.n_blocks, n_block = static_cast<int>(blockIdx.x) - tile * p.n_blocks;
  const int sequence = tile / p.heads_k, head_k = tile - sequence * p.heads_k, group = p.heads_q / p.heads_k;
  const SequenceCoords s = sequence_coords<T>(p, sequence);
  int* const steps = p.blocks.steps + m_block_list_at(p.blocks, blockIdx.x);
  int total = 0;
#pragma unroll 1
  for (int first = 0; first < group * p.sequence_m_blocks; first += kListBlocksThreads) {
    const int i = first + threadIdx.x;
    const int m_block = T.options.bounded_left ? i % p.sequence_m_blocks : i / group,
              head = T.options.bounded_left ? i / p.sequence_m_blocks : i % group;
    const bool is_step = i < group * p.sequence_m_blocks &&
                         (table_word<T>(p, s, head_k * group + head, m_block, n_block) & ((1u << kStateBits) - 1)) != 0;
    const ItemPlace place = place_item(is_step, counts);
    if (is_step) steps[1 + total + place.before] = m_block * p.heads_q + head_k * group + head;
    total += place.all;
  }
  if (threadIdx.x == 0) {
    steps[0] = total;
    steps[1 + total] = 0;
  }
}
