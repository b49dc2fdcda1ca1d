// Block masks: the n_blocks of a tile, and the state of each n_block's scores.
//
// list_n_blocks() computes them before the main kernel, from the caller's lists. list_n_blocks() is the only reader of
// these lists, because they may hold any values. The roles of the kernel iterate over a tile's list instead of a range
// of n_blocks. A tile without visible keys has one iteration, which hides all scores.
#pragma once
#include "config/forward_addresses.h"
#include "device/coords.cuh"
#include "device/mod_functions.cuh"
#include "device/row.cuh"

// The state of one unit's rows in an n_block. absent: only other units need the n_block.
enum class BlockState : u32 { absent, partial, full, hidden };

TANDEM_DEVICE int n_block_of(u32 step) { return static_cast<int>(step >> kStateBits); }
TANDEM_DEVICE BlockState state_of(u32 step, int unit) { return static_cast<BlockState>(step >> 2 * unit & 3); }
// The bits of all units of the i-th tile of a CTA or CTA pair.
template <auto T>
TANDEM_DEVICE u32 tile_bits(int i) {
  constexpr int kBits = 2 * T.step_units() / T.step_tiles();
  return ((1u << kBits) - 1) << i * kBits;
}

template <auto T>
TANDEM_DEVICE int* steps_of(const ForwardParams& params, const TileCoords& tile) {
  const auto& p = static_cast<const BlockMaskedForwardParams&>(params);
  const int batch = p.blocks.batch > 1 ? tile.batch : 0, head = p.blocks.heads > 1 ? tile.head : 0;
  return p.blocks.steps + tile_list_at(p.blocks, batch, head, tile.m_block);
}

// Evaluates the mask_mod for a row's keys in a partial block.
template <auto T>
struct MaskMod {
  ModPlace place;  // position without the key

  MaskMod() = default;
  TANDEM_DEVICE MaskMod(const TileCoords& t, const Row& row)
      : place{t.sequence, row.head, row.query, 0, t.q_len, t.k_len} {}
  TANDEM_DEVICE bool operator()(const ForwardParams& p, int column) const { return mask_mod<T>(at(column), names(p)); }
  // Evaluates mask_mod with preloaded values of the row and the key.
  TANDEM_DEVICE bool operator()(const ForwardParams& p, const MaskRow<T>& row, const MaskKey<T>& key,
                                int column) const {
    return mask_mod<T>(row, key, at(column), names(p));
  }
  TANDEM_DEVICE MaskRow<T> row(const ForwardParams& p) const { return mask_row<T>(place, names(p)); }
  TANDEM_DEVICE MaskKey<T> key(const ForwardParams& p, int column) const { return mask_key<T>(at(column), names(p)); }

 private:
  TANDEM_DEVICE ModPlace at(int column) const {
    ModPlace there = place;
    there.k = column;
    return there;
  }
  TANDEM_DEVICE static const ModNames& names(const ForwardParams& p) {
    return static_cast<const ModifiedForwardParams&>(p).mods.mask;
  }
};

// The states of the n_blocks from `first` on, of which [begin, end) are marked.
struct MarkedBlocks {
  u32* states;
  int first, begin, end;
};
// Marks the n_blocks that a row's blocks contain. Indices may have any value.
TANDEM_DEVICE void mark_blocks(const BlockMaskParams& p, const BlockListParams& list, const TileCoords& tile, int row,
                               u32 bits, const MarkedBlocks& to) {
  if (!list.count) return;
  const i64 block_row = row / p.block_q;
  const int given =
      list.count[tile.batch * list.count_batch + tile.head * list.count_head + block_row * list.count_row];
  const int count = clamp(given, 0, list.columns);
  const int* const index =
      list.index + tile.batch * list.index_batch + tile.head * list.index_head + block_row * list.index_row;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kListBlocksThreads) {
    const i64 n_block = static_cast<i64>(index[i * list.index_column]) * p.block_n_blocks;
    auto within = [&](i64 n) {
      return static_cast<int>(min(max(n, static_cast<i64>(to.begin)), static_cast<i64>(to.end)));
    };
    const int from = within(n_block), until = within(n_block + p.block_n_blocks);
#pragma unroll 1
    for (int n = from; n < until; ++n) atomicOr(&to.states[n - to.first], bits);
  }
}

// Marks both lists. shift: the position of these rows' bits in a state.
template <auto T>
TANDEM_DEVICE void mark_row(const BlockMaskParams& p, const TileCoords& tile, int row, int shift,
                            const MarkedBlocks& to) {
  constexpr u32 kFull = static_cast<u32>(BlockState::full), kPartial = static_cast<u32>(BlockState::partial);
  mark_blocks(p, p.partial, tile, row, (T.options.mask_mod ? kPartial : kFull) << shift, to);
  mark_blocks(p, p.full, tile, row, kFull << shift, to);
}
// A block in both lists is full.
TANDEM_DEVICE u32 without_twice(u32 states) { return states & ~(states >> 1 & 0x55); }

// The tile whose iterations a CTA lists.
template <auto T, class Params>
TANDEM_DEVICE TileCoords listed_tile(const Params& p) {
  const int list = blockIdx.x / p.blocks.m_blocks, batch = list / p.blocks.heads;
  TileCoords tile{0, 0, batch, batch, 0, 0, p.seqlen_q, p.seqlen_q, p.seqlen_k};
  if constexpr (T.options.varlen) tile = varlen_coords(p, batch);
  tile.m_block = static_cast<int>(blockIdx.x) - list * p.blocks.m_blocks;
  tile.head = list - batch * p.blocks.heads;
  return tile;
}

// The number of items of earlier threads, and of all threads.
struct ItemPlace {
  int before, all;
};
// All kListBlocksThreads threads call this function. counts: per warp; counts can be reused after all threads have
// returned.
TANDEM_DEVICE ItemPlace place_item(bool has, int (&counts)[kListBlocksThreads / 32]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 voters = __ballot_sync(~0u, has);
  if (lane == 0) counts[warp] = __popc(voters);
  __syncthreads();
  ItemPlace place{__popc(voters & ((1u << lane) - 1)), 0};
#pragma unroll
  for (int w = 0; w < kListBlocksThreads / 32; ++w) {
    if (w < warp) place.before += counts[w];
    place.all += counts[w];
  }
  __syncthreads();
  return place;
}

// Lists the iterations of one tile: one CTA of kListBlocksThreads threads. If the host knows all lengths, Hopper's
// kernel also sets the tile counter. A memset before that kernel would have to end before the kernel may begin.
template <auto T>
TANDEM_DEVICE void list_n_blocks(const BlockMaskedForwardParams& p) {
  constexpr int kChunk = 1024, kWarps = kListBlocksThreads / 32, kTiles = T.step_tiles();
  __shared__ u32 states[kChunk];
  __shared__ int counts[kTiles + 1][kWarps];  // per warp: iterations of all tiles, then of each tile
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if constexpr (T.overlaps_launches()) {
    launch_dependents();
    grid_dependency_wait();
    if (!T.options.varlen && p.counter && blockIdx.x == 0 && thread == 0) *p.counter = 0;
  }
  const TileCoords tile = listed_tile<T>(p);
  const int first_row = tile.m_block * T.tile_m();
  const NBlockRange range = n_block_range<T>(p, tile);
  int* const steps = steps_of<T>(p, tile);
  int total[kTiles + 1] = {};
#pragma unroll 1
  for (int end = range.end; end > range.begin; end -= kChunk) {
    const int begin = max(range.begin, end - kChunk);
    for (int i = thread; i < kChunk; i += kListBlocksThreads) states[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int unit = 0; unit < T.step_units(); ++unit) {
      const int row = first_row + unit * T.step_rows();
      if (row >= tile.q_len) break;
      const NBlockRange own = n_block_range<T>(p, tile, row, T.step_rows());
      const int from = max(begin, own.begin), to = min(end, own.end);
      mark_row<T>(p.blocks, tile, row, 2 * unit, {states, begin, from, to});
    }
    __syncthreads();
#pragma unroll 1
    for (int first = end - 1; first >= begin; first -= kListBlocksThreads) {
      const int n_block = first - thread;
      u32 state = n_block >= begin ? states[n_block - begin] : 0;
      state = without_twice(state);
      const u32 before = (1u << lane) - 1, voters = __ballot_sync(~0u, state != 0);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const u32 of_tile = __ballot_sync(~0u, (state & tile_bits<T>(i)) != 0);
        if (lane == 0) counts[i + 1][warp] = __popc(of_tile);
      }
      if (lane == 0) counts[0][warp] = __popc(voters);
      __syncthreads();
      int at = total[0] + __popc(voters & before);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) at += counts[0][w];
        for (int i = 0; i <= kTiles; ++i) total[i] += counts[i][w];
      }
      if (state != 0) steps[kListHeader + at] = static_cast<int>(static_cast<u32>(n_block) << kStateBits | state);
      __syncthreads();
    }
  }
  if (thread != 0) return;
  // Rows without visible keys get zeros from an iteration that hides all scores.
  u32 step = total[0] > 0 ? steps[kListHeader] : static_cast<u32>(range.end - 1) << kStateBits;
  total[0] = max(total[0], 1);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (total[i + 1] > 0 || first_row + i * (T.tile_m() / kTiles) >= tile.q_rows) continue;
    step |= tile_bits<T>(i);  // hidden
    total[i + 1] = 1;
  }
  steps[kListHeader] = static_cast<int>(step);
  steps[kListHeader + total[0]] = 0;
#pragma unroll
  for (int i = 0; i <= kTiles; ++i) steps[i] = total[i];
}

// Computes the position of an m_block in the order by number of iterations, largest first. One CTA of
// kListBlocksThreads threads runs this function.
template <auto T>
TANDEM_DEVICE void order_tiles(const BlockMaskedForwardParams& p) {
  if constexpr (T.overlaps_launches()) {
    launch_dependents();
    grid_dependency_wait();
  }
  const int m_blocks = p.blocks.m_blocks, list = blockIdx.x / m_blocks, m_block = blockIdx.x - list * m_blocks;
  const int* const steps = p.blocks.steps + static_cast<i64>(list) * m_blocks * p.blocks.list_words;
  const int own = steps[m_block * p.blocks.list_words];
  int place = 0;
#pragma unroll 1
  for (int first = 0; first < m_blocks; first += kListBlocksThreads) {
    const int other = first + static_cast<int>(threadIdx.x);
    const int count = other < m_blocks ? steps[other * p.blocks.list_words] : -1;
    place += __syncthreads_count(count > own ||
                                 (count == own && (T.options.bounded_right ? other > m_block : other < m_block)));
  }
  if (threadIdx.x == 0) p.blocks.order[tile_order_at(p.blocks, list, place)] = m_block;
}
