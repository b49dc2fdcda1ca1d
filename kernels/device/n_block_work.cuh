// The order in which a backward processes its tiles, and the places of tiles in the buffers of dq.
#pragma once
#include "device/m_block_iterator.cuh"

// Returns true if the main kernel stores dq.
template <auto T>
TANDEM_DEVICE constexpr bool single_n_block() {
  return has_single_n_block(constant<T>);
}
template <auto T>
TANDEM_DEVICE int tile_heads(const BackwardParams& p) {
  return tile_heads(constant<T>, p);
}
template <auto T>
TANDEM_DEVICE bool sequences_follow(const BackwardParams& p) {
  return sequences_follow(constant<T>, p);
}
template <auto T>
TANDEM_DEVICE int tile_parts(const BackwardParams& p) {
  return tile_parts(constant<T>, p);
}
template <auto T>
TANDEM_DEVICE NBlockWork n_block_work_at(const BackwardParams& p, int n) {
  return n_block_work_at(constant<T>, p, n);
}
template <auto T>
TANDEM_DEVICE int launch_tiles(const BackwardParams& p) {
  return launch_tiles(constant<T>, p);
}

// Tiles are counted as if all sequences had the maximum length; true if this n_block is beyond its sequence. The
// counter then skips the equally distant n_blocks of the group's other heads, if the group has one sequence.
template <auto T>
TANDEM_DEVICE bool skip_empty_tiles(const BackwardParams& p, int* counter, int n, const NBlockWork& tile,
                                    const SequenceCoords& s) {
  if (!T.options.varlen || tile.n_block * T.tile_n() < s.k_rows) return false;
  const int parts = tile_parts<T>(p), of_sequence = tile_heads<T>(p);
  const NBlockGroup group = n_block_group_at<T>(p, n / parts, p.batch * of_sequence);
  const bool of_one = group.first_head / of_sequence == (group.first_head + group.heads - 1) / of_sequence;
  if (group.heads == 1 || (of_one && !sequences_follow<T>(p))) {
    const int n_blocks = (s.k_rows + T.tile_n() - 1) / T.tile_n();
    atomicMax(counter,
              parts * (group.first + group.heads * (launch_n_blocks(constant<T>, p) - (group.falls ? n_blocks : 0))));
  }
  return true;
}

template <auto T>
TANDEM_DEVICE int count_n_blocks(const BackwardParams& p, const SequenceCoords& s, int m_block) {
  return count_n_blocks(constant<T>, p, s, m_block);
}
// The number of n_blocks that add to an iteration's dq before this n_block.
template <auto T>
TANDEM_DEVICE int count_n_blocks_before(const BackwardParams& p, const SequenceCoords& s, const MBlockIterator<T>& step,
                                        const NBlockWork& tile) {
  const int n_block = tile.n_block;
  if constexpr (T.options.block_mask) return table_word<T>(p, s, step.head, step.m_block, n_block) >> kStateBits;
  if (spt<T>() && tile.diagonal) {
    const int first = step.m_block * T.tile_m, last = min(first + T.tile_m, s.q_len) - 1;
    const int last_n_block = (min(band_of<T>(p, s).visible_keys(first, last).end, s.k_len) - 1) / T.tile_n();
    if constexpr (has_diagonal_parts(constant<T>)) return (last_n_block - n_block) % p.part_n_blocks;
    return last_n_block - n_block;
  }
  if constexpr (wraps(constant<T>))
    return WrappedIterations(p, wrap_of<T>(step).iterations).before(n_block, wrap_of<T>(step).index);
  const int first = first_n_block<T>(p, s, step.m_block);
  return splits_dq(constant<T>) ? (n_block - first) / p.dq_splits : n_block - first;
}
