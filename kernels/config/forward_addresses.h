// The places that the forward's kernels store to, as indices into a buffer. Host and device use these functions. A test
// evaluates them on the host for every launch, and compares them with the plan's workspace and the tensors.
#pragma once
#include "config/block_mask.h"
#include "config/coords.h"
#include "config/result_row.h"

constexpr int kForwardCounters = 2;  // ForwardParams::counter: next tile, number of listed tiles

// The list of a tile's iterations with a block mask, and the order of tiles.
TANDEM_HOST_DEVICE long long tile_list_at(const BlockMaskParams& blocks, int batch, int head, int m_block) {
  return (static_cast<long long>(batch * blocks.heads + head) * blocks.m_blocks + m_block) * blocks.list_words;
}
TANDEM_HOST_DEVICE long long tile_order_at(const BlockMaskParams& blocks, int list, int place) {
  return static_cast<long long>(list) * blocks.m_blocks + place;
}

// A row of a result; query: of the sequence.
TANDEM_HOST_DEVICE long long out_row_at(const ForwardParams& p, const TileCoords& t, int query, int head) {
  return t.batch * p.out_batch + (t.q_begin + query) * p.out_row + head * p.out_head;
}
TANDEM_HOST_DEVICE long long lse_at(const ForwardParams& p, const TileCoords& t, int query, int head) {
  return t.batch * p.lse_batch + head * p.lse_head + (t.q_begin + query) * p.lse_row;
}
TANDEM_HOST_DEVICE long long max_scores_at(const MaxScoresParams& m, const TileCoords& t, int query, int head) {
  return t.batch * m.batch + head * m.head + (t.q_begin + query) * m.row;
}

// T.device_splits: a row of a split's results. split_row: of the split's first query.
TANDEM_HOST_DEVICE long long split_result_at(const ForwardParams& p, int split_row, int query, int head) {
  return (static_cast<long long>(split_row) + query) * p.heads_q + head;
}

TANDEM_HOST_DEVICE long long combined_out_at(const SplitParams& split, const ResultRow& at) {
  return at.batch * split.out_batch + at.row * split.out_row + at.head * split.out_head;
}
TANDEM_HOST_DEVICE long long combined_lse_at(const SplitParams& split, const ResultRow& at) {
  return at.batch * split.lse_batch + at.row * split.lse_row + at.head * split.lse_head;
}
