// A separate kernel after the main kernel, which computes the largest score of each query. The main kernel computes
// maxima only where its exponentials need them. This kernel computes all scores again: one of the forward's two
// products. Each warp works alone: it has 16 rows, keeps their queries in registers, and reads keys from global memory.
#pragma once
#include "device/block_mask.cuh"
#include "device/chunk.cuh"
#include "device/mask.cuh"
#include "device/paging.cuh"
#include "device/score_mod.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"

// Loads 16 bytes of a row of queries or keys, or zeros.
TANDEM_DEVICE Chunk load_operand(const void* data, i64 row, int column, bool there) {
  if (!there) return {};
  return *reinterpret_cast<const Chunk*>(static_cast<const u16*>(data) + row + column);
}

// A warp's rows. A thread has two rows, in the layout of its MMA fragments.
template <auto T>
struct MaxScoresOfWarp {
  // Operand columns are split into pieces of 32, and a thread has 8 neighbouring columns. The inner dimension of a
  // product may be permuted if queries and keys use the same order.
  static constexpr int kPieces = (T.head_dim + 31) / 32;

  const ForwardParams& p;
  const TileCoords& tile;
  const int lane;
  Row rows[2];
  KeyRange keys[2];
  ScoreMod<T> mods[2];
  Chunk queries[2][kPieces];
  float largest[2] = {-kInfinity, -kInfinity};
  [[maybe_unused]] PagedKeys paged;

  TANDEM_DEVICE MaxScoresOfWarp(const ForwardParams& params, const TileCoords& t, int first_row, int lane_of_warp)
      : p(params), tile(t), lane(lane_of_warp) {
    const MaxScoresParams& m = p.max_scores;
    if constexpr (T.page_rows > 0) paged = PagedKeys::of<T>(p, t);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = Row(p, t, first_row + lane / 4 + 8 * i);
      keys[i] = rows[i].query < t.q_len ? visible_keys<T>(p, t, rows[i]) : KeyRange{0, 0};
      mods[i] = ScoreMod<T>(p, t, rows[i]);
      const i64 row = t.batch * m.q_batch + (t.q_begin + rows[i].query) * m.q_row + rows[i].head * m.q_head;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int column = column_of(piece);
        queries[i][piece] = load_operand(m.q_data, row, column, rows[i].query < t.q_len && column < m.head_dim);
      }
    }
  }

  TANDEM_DEVICE int column_of(int piece) const { return 32 * piece + 8 * (lane % 4); }

  // Adds the scores of 8 keys.
  TANDEM_DEVICE void add(int first_key, [[maybe_unused]] BlockState state) {
    const MaxScoresParams& m = p.max_scores;
    const int key = first_key + lane / 4, group = p.heads_q / p.heads_k;
    i64 row = tile.batch * m.k_batch + (tile.k_begin + key) * m.k_row + rows[0].head / group * m.k_head;
    bool there = key < tile.k_len;
    if constexpr (T.page_rows > 0) {
      const PagePlace at = paged.place(p, key, 1);
      row = at.page * m.k_batch + at.row * m.k_row + rows[0].head / group * m.k_head;
      there = at.page >= 0;
    }
    float scores[4] = {0, 0, 0, 0};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int column = column_of(piece);
      const Chunk x = load_operand(m.k_data, row, column, there && column < m.head_dim);
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        const Chunk &first = queries[0][piece], &second = queries[1][piece];
        mma_m16n8k16<T.options.f16>(scores, {first.x[n], second.x[n], first.x[n + 1], second.x[n + 1]},
                                    {x.x[n], x.x[n + 1]});
      }
    }
    if constexpr (T.options.softcap) apply_softcap<false>(scores, p);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = r / 2, column0 = first_key + 2 * (lane % 4), column = column0 + r % 2;
      float score = mods[i](scores[r], p, column0, r % 2);
      bool seen = keys[i].begin <= column && column < keys[i].end;
      if constexpr (T.options.block_mask && T.options.mask_mod)
        seen = seen && (state == BlockState::full || MaskMod<T>(tile, rows[i])(p, column));
      largest[i] = max_or_nan(largest[i], seen ? score : -kInfinity);
    }
  }

  TANDEM_DEVICE void store() {
    const MaxScoresParams& m = p.max_scores;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = max_or_nan(largest[i], __shfl_xor_sync(~0u, largest[i], 1));
      x = max_or_nan(x, __shfl_xor_sync(~0u, x, 2));
      if (lane % 4 != 0 || rows[i].query >= tile.q_rows) continue;
      m.data[max_scores_at(m, tile, rows[i].query, rows[i].head)] = kLn2 * x;
    }
  }
};

// One CTA per 64 rows of a work tile.
template <auto T>
TANDEM_DEVICE void max_scores(const ForwardParams& p) {
  constexpr int kBlocks = T.tile_m() / kMaxScoresRows, kGroup = T.tile_n % 32 == 0 ? 32 : 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int work = blockIdx.x / kBlocks, block = blockIdx.x % kBlocks;
  const int listed = listed_tiles<T>(p);
  if constexpr (T.options.varlen) {
    if (work >= listed * (p.heads_q >> log2_of(p.pack_gqa))) return;
  }
  const TileCoords tile = coords_at<T>(p, work, listed);
  if constexpr (T.device_splits) {
    if (!is_first_split<T>(p, tile, work)) return;  // the first split's CTA has all keys
  }
  const int first_row = tile.m_block * T.tile_m() + block * kMaxScoresRows;
  if (first_row + warp * 16 >= tile.q_rows << log2_of(p.pack_gqa)) return;
  MaxScoresOfWarp<T> of(p, tile, first_row + warp * 16, lane);
  auto add = [&](int n_block, BlockState state) {
#pragma unroll 1
    for (int key = n_block * T.tile_n; key < (n_block + 1) * T.tile_n; key += kGroup) {
#pragma unroll
      for (int n = 0; n < kGroup; n += 8) of.add(key + n, state);
    }
  };
  if constexpr (T.options.block_mask) {
    const int unit = block * kMaxScoresRows / T.step_rows();
    const int *steps = steps_of<T>(p, tile), count = steps[0];
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const u32 step = warp_uniform(steps[kListHeader + i]);
      const BlockState state = state_of(step, unit);
      if (state == BlockState::partial || state == BlockState::full) add(n_block_of(step), state);
    }
  } else {
    const NBlockRange range = n_block_range<T>(p, tile, first_row, kMaxScoresRows);
#pragma unroll 1
    for (int n_block = range.begin; n_block < range.end; ++n_block) add(n_block, BlockState::full);
  }
  of.store();
}
