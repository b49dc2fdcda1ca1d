// Computes a block mask from a mask_mod: classifies each block of queries and keys as full, partial or empty. Interval
// arithmetic decides most blocks. For the rest a warp evaluates the mask_mod until the block is known to be partial,
// which is usually the first evaluation. Each block's state takes a byte; the lists follow from the states.
#pragma once
#include "config/make_blocks.h"
#include "device/block_mask.cuh"
#include "device/mod_range.cuh"

// Classifies one block with one warp. T is unused, because the printed functions are the same for any T.
template <auto T>
TANDEM_DEVICE MadeState classify_block(const MakeBlocksParams& p, int batch, int head, int i, int j) {
  const int first_q = i * p.block_q, first_k = j * p.block_k, lane = threadIdx.x % 32;
  const int rows = min(p.block_q, p.seqlen_q - first_q), keys = min(p.block_k, p.seqlen_k - first_k);
  const bool whole = rows == p.block_q && keys == p.block_k;  // torch's rule: a partial block at the end is never full
  const IntRange seen = mask_range<T>({range_of(batch),
                                       range_of(head),
                                       {first_q, first_q + rows - 1},
                                       {first_k, first_k + keys - 1},
                                       range_of(p.seqlen_q),
                                       range_of(p.seqlen_k)},
                                      p.names);
  bool some = seen.low != 0, hidden = seen.high == 0;
  if (!warp_any(is_point(seen))) {
    ModPlace at{batch, head, 0, 0, p.seqlen_q, p.seqlen_k};
#pragma unroll 1
    for (int row = 0; row < rows && !(some && hidden); ++row) {
      at.q = first_q + row;
#pragma unroll 1
      for (int key = 0; key < keys && !(some && hidden); key += 32) {
        at.k = first_k + key + lane;
        const bool there = key + lane < keys, sees = there && mask_mod<T>(at, p.names);
        some = some || __any_sync(~0u, sees);
        hidden = hidden || __any_sync(~0u, there && !sees);
      }
    }
  }
  return !some ? MadeState::empty : hidden || !whole ? MadeState::partial : MadeState::full;
}

template <auto T>
TANDEM_DEVICE void classify_blocks(const MakeBlocksParams& p) {
  constexpr int kWarps = kClassifyThreads / 32;
  const i64 row_blocks = static_cast<i64>(p.blocks_q) * p.blocks_k, all = p.batch * p.heads * row_blocks;
#pragma unroll 1
  for (i64 n = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32; n < all;
       n += static_cast<i64>(gridDim.x) * kWarps) {
    const int list = static_cast<int>(n / row_blocks), i = static_cast<int>(n % row_blocks / p.blocks_k);
    const MadeState state =
        classify_block<T>(p, list / p.heads, list % p.heads, i, static_cast<int>(n % row_blocks % p.blocks_k));
    if (threadIdx.x % 32 == 0) p.states[n] = state;
  }
}

// A row of the lists of a head, and the block states that a list contains.
struct MadeRow {
  i64 batch, head, row;
};
struct MadeStates {
  MadeState least, most;
};
// Writes one row of one list: first the columns whose state is in the range, then the remaining columns.
// state_at(column) returns a column's state.
template <class StateAt>
TANDEM_DEVICE void list_row(const MadeListParams& list, const MadeRow& at, int columns, const MadeStates& states,
                            const StateAt& state_at) {
  __shared__ int counts[kListBlocksThreads / 32];
  auto is_listed = [&](int column) {
    const MadeState state = column < columns ? state_at(column) : MadeState::empty;
    return column < columns && states.least <= state && state <= states.most;
  };
  int listed = 0;
#pragma unroll 1
  for (int first = 0; first < columns; first += kListBlocksThreads)
    listed += place_item(is_listed(first + threadIdx.x), counts).all;
  int* const index = list.index + at.batch * list.index_batch + at.head * list.index_head + at.row * list.index_row;
  int before = 0;  // number of earlier listed columns
#pragma unroll 1
  for (int first = 0; first < columns; first += kListBlocksThreads) {
    const int column = first + threadIdx.x;
    const bool own = is_listed(column);
    const ItemPlace place = place_item(own, counts);
    const int to = before + place.before;
    if (column < columns) index[(own ? to : listed + column - to) * list.index_column] = column;
    before += place.all;
  }
  if (threadIdx.x == 0)
    list.count[at.batch * list.count_batch + at.head * list.count_head + at.row * list.count_row] = listed;
}

// Each CTA handles a row of queries. Further CTAs handle rows of keys if these lists are not null.
template <auto T>
TANDEM_DEVICE void list_blocks(const MakeBlocksParams& p) {
  const int of_queries = p.batch * p.heads * p.blocks_q;
  const int by_keys = static_cast<int>(blockIdx.x) >= of_queries;
  const int rows = by_keys ? p.blocks_k : p.blocks_q, columns = by_keys ? p.blocks_q : p.blocks_k;
  const int number = blockIdx.x - (by_keys ? of_queries : 0), list = number / rows, row = number % rows;
  const MadeState* const states = p.states + static_cast<i64>(list) * p.blocks_q * p.blocks_k;
  auto state_at = [&](int column) {
    return by_keys ? states[static_cast<i64>(column) * p.blocks_k + row]
                   : states[static_cast<i64>(row) * p.blocks_k + column];
  };
  const MadeListParams &partial = p.partial[by_keys], &full = p.full[by_keys];
  list_row(partial, {list / p.heads, list % p.heads, row}, columns,
           {MadeState::partial, full.count ? MadeState::partial : MadeState::full}, state_at);
  if (full.count)
    list_row(full, {list / p.heads, list % p.heads, row}, columns, {MadeState::full, MadeState::full}, state_at);
}
