// The epilogue of the Blackwell backward. The MMA warpgroups store dk and dv from tensor memory to the caller's
// tensors; each warpgroup stores some of the columns.
#pragma once
#include "device/chunk.cuh"
#include "device/gradient.cuh"
#include "device/pack.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/smem.cuh"

// A gradient of keys or values: its columns of tensor memory, and its destination.
struct KeyGradient {
  u32 columns_at;
  int columns;
  u16* staging;  // reuses the buffer of consumed operands
  const TensorMap* map;
  void* data;
  bool is_f32;
  i64 at, row;   // in data: offset of the head's first element; row stride
  int head_dim;  // before padding
  float scale;
};

// Loads columns [column, column + n) of a thread's row. any: an iteration has added to the sum.
template <int n>
TANDEM_DEVICE void load_sums(float (&x)[n], const KeyGradient& g, u32 lanes, int column, bool any) {
  if (any) {
    tcgen05_fence_after();
    tmem_load(x, lanes + g.columns_at + column);
    tmem_wait_load(x);
  } else {
#pragma unroll
    for (float& zero : x) zero = 0;
  }
#pragma unroll
  for (float& sum : x) sum *= g.scale;
}

// Stores from registers. rows: the number of the tile's rows within the sequence; if gradients accumulate, of its used
// rows.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void store_direct(const KeyGradient& g, int index, bool any, int rows, int first_row, bool accumulate) {
  const int warp = warp_uniform(threadIdx.x / 32 % 4), thread = threadIdx.x % 128;
  const u32 lanes = static_cast<u32>(warp) * 32 << 16;
  constexpr int kColumns = T.stored_columns();
  const i64 at = g.at + (first_row + thread) * g.row;
#pragma unroll 1
  for (int column = index * kColumns; column < g.columns; column += T.kComputing * kColumns) {
    float x[kColumns];
    load_sums(x, g, lanes, column, any);
    if (thread < rows) {
#pragma unroll
      for (int n = 0; n < kColumns; n += 2) {
        if (column + n < g.head_dim) store_pair<T>(g.data, at + column + n, x[n], x[n + 1], g.is_f32, accumulate);
      }
    }
    __syncwarp();  // the next load is warp-wide
  }
}

// The rows of a tile in a gradient.
struct TileRows {
  int rows, first_row;  // rows within the sequence; first_row in the tensor
  int head, batch;
};
template <Sm100BackwardConfig T>
TANDEM_DEVICE void store_sums(const KeyGradient& g, int index, bool any, const TileRows& at) {
  const int rows = at.rows, first_row = at.first_row;
  constexpr int kStoreSync = 1;  // a named barrier
  constexpr int kColumns = T.stored_columns();
  const int warp = warp_uniform(threadIdx.x / 32 % 4), thread = threadIdx.x % 128;
  const u32 lanes = static_cast<u32>(warp) * 32 << 16;
  const bool tail = T.options.varlen && warp_any(rows < T.kCtaKeys);
#pragma unroll 1
  for (int column = index * kColumns; column < g.columns; column += T.kComputing * kColumns) {
    float x[kColumns];
    load_sums(x, g, lanes, column, any);
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
      Chunk chunk;
#pragma unroll
      for (int n = 0; n < 4; ++n) chunk.x[n] = pack<T>(x[8 * c + 2 * n], x[8 * c + 2 * n + 1]);
      if (tail) {
        if (thread < rows && column + 8 * c < g.head_dim)
          *reinterpret_cast<Chunk*>(static_cast<u16*>(g.data) + g.at + (first_row + thread) * g.row + column + 8 * c) =
              chunk;
      } else {
        auto* const block = reinterpret_cast<Chunk*>(g.staging) + column / 64 * (T.kBlockBytes / 16) + thread * 8;
        block[(column % 64 / 8 + c) ^ (thread & 7)] = chunk;
      }
    }
  }
  if (tail) return;
  fence_proxy_async();
  named_sync(kStoreSync, 128 * T.kComputing);
  if (index > 0 || warp > 0 || !elect_one()) return;
#pragma unroll 1
  for (int c = 0; c < g.columns; c += 64) {
#pragma unroll 1
    for (int r = 0; r < T.kCtaKeys; r += 64)
      tma_store(g.map, g.staging + c * T.kCtaKeys + r * 64, c, first_row + r, at.head, at.batch);
  }
  tma_store_commit();
}

template <Sm100BackwardConfig T>
TANDEM_DEVICE u16* staging_of_dv(SharedStorage<T>& s) {
  if constexpr (T.two_pass()) {
    return s.ring[0];
  } else {
    return s.v;
  }
}

// Waits until dk and dv of a tile are complete. steps, summed: the iterations and the tiles so far.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void wait_for_gradients(SharedStorage<T>& s, u32 steps, u32& summed) {
  if constexpr (!T.two_pass()) {  // dQ is the last product
    mbarrier_wait(&s.dq_ready, (steps & 1) ^ 1);
  } else {
    mbarrier_wait(&s.dkv_ready, summed & 1);
    ++summed;
  }
}

// Reads the tile and its sequence again, because values kept from the start would occupy registers during iterations.
template <Sm100BackwardConfig T>
TANDEM_DEVICE void store_tile(const BackwardParams& p, SharedStorage<T>& s, int index, bool any) {
  const NBlockWork tile = s.tile;
  const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
  const int row = first_key_of<T>(tile), batch = sequence.batch;
  auto store = [&](const KeyGradient& g) {
    if constexpr (T.store_from_registers) {
      store_direct<T>(g, index, any, (p.accumulate ? sequence.k_len : sequence.k_rows) - row, sequence.k_begin + row,
                      p.accumulate);
    } else {
      store_sums<T>(g, index, any, {sequence.k_rows - row, sequence.k_begin + row, tile.head_k, batch});
    }
  };
  if (T.makes_dv() && p.has_dv) {
    store({T.tmem_dv(), T.head_dim_v, staging_of_dv(s), &p.dv, p.dv_data, p.dv_is_f32 != 0,
           dkv_head_at(p, false, batch, tile.head_k), p.dv_row, p.head_dim_v, T.options.dropout ? p.dropout.scale : 1});
  }
  if (T.makes_dk() && p.has_dk) {
    store({T.tmem_dk(), T.head_dim, s.k, &p.dk, p.dk_data, p.dk_is_f32 != 0, dkv_head_at(p, true, batch, tile.head_k),
           p.dk_row, p.head_dim, p.scale});
  }
  tcgen05_fence_before();
}
