// Stores dk and dv of a tile from the accumulators to global memory.
#pragma once
#include "device/gradient.cuh"
#include "device/pack.cuh"
#include "ptx/global.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/backward/operands.cuh"
#include "sm90/backward/smem.cuh"

// A gradient tensor of a sequence and key head. Rows [0, used) are sums, and the rows from `used` to `rows` are zeros.
struct GradientRows {
  void* to;
  i64 at, stride;
  int rows, used, columns;
  bool is_f32;
};
// Stores fragments directly: this thread's rows are `row` and `row` + 8, its columns are pairs from `column` on.
template <auto T, int n>
TANDEM_DEVICE void store_direct(const float (&sums)[n], float scale, const GradientRows& g, int row, int column,
                                bool accumulate) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + 8 * i >= (accumulate ? g.used : g.rows)) continue;
#pragma unroll
    for (int r = 2 * i; r < n; r += 4) {
      if (column + 2 * r - 4 * i >= g.columns) break;
      store_pair<T>(g.to, g.at + (row + 8 * i) * g.stride + column + 2 * r - 4 * i, sums[r] * scale,
                    sums[r + 1] * scale, g.is_f32, accumulate);
    }
  }
}

// Stores fragments of the kernel's type, 16 bytes at once. Four threads exchange their parts of a row.
template <auto T, int n>
TANDEM_DEVICE void store_chunks(const float (&sums)[n], float scale, const GradientRows& g, int row, int column) {
  static_assert(n % 16 == 0, "four times 8 columns");
  column += 8 * (threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int r = 2 * i; r < n; r += 16) {
      u32 words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = pack<T>(sums[r + 4 * w] * scale, sums[r + 4 * w + 1] * scale);
      transpose_words(words);
      const int first = column + 2 * (r - 2 * i);
      if (row + 8 * i < g.rows && first < g.columns)
        global_store(static_cast<u16*>(g.to) + g.at + (row + 8 * i) * g.stride + first, words);
    }
  }
}

// split_q_heads: adds to the sums of the earlier query heads; the first head stores. barrier: the warpgroup's named
// barrier. turn: the number of earlier heads.
template <int n>
TANDEM_DEVICE void add_in_turn(int* semaphore, int turn, int barrier, float4* to, int part, const float (&sums)[n]) {
  if (threadIdx.x % 128 == 0) {
    while (load_acquire(semaphore) < turn) {
    }
  }
  named_sync(barrier, 128);
  if (turn == 0) {
    store_sums(to, part, sums);
  } else {
    to += fragment_at(n, 128, part, threadIdx.x);
#pragma unroll
    for (int r = 0; r < n; r += 4)
      global_add(to + r / 4 * 128, make_float4(sums[r], sums[r + 1], sums[r + 2], sums[r + 3]));
  }
  named_sync(barrier, 128);
  if (threadIdx.x % 128 == 0) add_release(semaphore, 1);
}

// The epilogue of a warpgroup. The epilogue stores the warpgroup's keys of an n_block, or its columns if all warpgroups
// share the keys. After construction the epilogue does not read shared memory.
template <Sm90BackwardConfig T>
struct KeyEpilogue {
  const BackwardParams& p;
  const SequenceCoords sequence;
  const NBlockWork tile;
  const int index, part;  // index: warpgroup; part: its part of dk or dv
  const int key;          // first key of this thread, within the sequence

  TANDEM_DEVICE KeyEpilogue(const BackwardParams& params, const SharedStorage<T>& s, const SequenceCoords& coords,
                            int warpgroup)
      : p(params),
        sequence(coords),
        tile(s.tile),
        index(warpgroup),
        part(T.warpgroup_roles() ? 0 : warpgroup),
        key((tile.n_block * T.ctas() + cta_rank<T>()) * T.cta_keys() + (T.shared_p() ? 0 : warpgroup * 64) +
            threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) {}

  // Stores dk or dv to the sums of the tile's split, or to the caller's tensor.
  template <bool of_k, int n>
  TANDEM_DEVICE void store(const float (&sums)[n]) const {
    if (!(of_k ? p.has_dk : p.has_dv)) return;
    if constexpr (T.m_split) {
      if (!T.has_unsplit_tiles() || tile.split_block >= 0) {
        store_split<of_k>(sums);
        return;
      }
    }
    if constexpr (T.has_unsplit_tiles()) {
      const int batch = T.options.varlen ? sequence.batch : tile.sequence;
      const GradientRows to{of_k ? p.dk_data : p.dv_data,
                            dkv_row_at(p, of_k, batch, sequence.k_begin, tile.head_k),
                            of_k ? p.dk_row : p.dv_row,
                            sequence.k_rows,
                            sequence.k_len,
                            of_k ? p.head_dim : p.head_dim_v,
                            (of_k ? p.dk_is_f32 : p.dv_is_f32) != 0};
      const float scale = of_k ? p.scale : T.options.dropout ? p.dropout.scale : 1;
      const int column = T.shared_p() ? part * 2 * n : 0;
      if constexpr (T.store_from_registers) {
        store_direct<T>(sums, scale, to, key, 2 * (threadIdx.x & 3) + column, p.accumulate);
      } else {
        store_chunks<T>(sums, scale, to, key, column);
      }
    }
  }

 private:
  template <bool of_k, int n>
  TANDEM_DEVICE void store_split(const float (&sums)[n]) const {
    const i64 block = dkv_block_at(constant<T>, p, tile, cta_rank<T>());
    float* const of_block =
        p.dkv_accum + dkv_sums_at(constant<T>, p, block, tile.m_split_idx) + dkv_part_at(constant<T>, of_k);
    auto* const to = reinterpret_cast<float4*>(of_block);
    if constexpr (T.split_q_heads) {
      int* const semaphore = p.dkv_semaphore + dkv_semaphores_at(constant<T>, block) + dkv_semaphore_at(part, of_k);
      add_in_turn(semaphore, tile.m_split_idx, kBarOwnWarpgroup + index, to, part, sums);
    } else {
      store_sums(to, part, sums);
    }
  }
};

// Signals that all threads of a warpgroup have read keys, values and s.tile, so that the next tile's may be loaded.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void release_kv(SharedStorage<T>& s, int index) {
  named_sync(kBarOwnWarpgroup + index, 128);
  if (threadIdx.x % 128 / 32 == 0 && elect_one()) mbarrier_arrive(&s.kv_empty);
}
