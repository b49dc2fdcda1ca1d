// dk and dv of a tile, from the warpgroups that have summed them to memory; and how their operands lie in shared memory.
#pragma once
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/backward/shared_plan.cuh"
#include "tile/chunk.cuh"
#include "tile/gradient.cuh"
#include "tile/pack.cuh"

// Named barriers: of all computing warpgroups, and of one.
constexpr int kSyncAll = 1, kSyncOwn = 2;

// The c-th 16 along the inner dimension of a product, as descriptors count: columns of rows in blocks of 64, or rows.
TANDEM_DEVICE constexpr u64 in_row(int c, u32 block_bytes) { return c / 4 * (block_bytes >> 4) + c % 4 * 2; }
TANDEM_DEVICE constexpr u64 rows_16(int c) { return c * (2048 >> 4); }

// Where this lane's 16 bytes of the n-th 16 x 16 fragment of the warp's 16 rows lie, in blocks of 64 columns of the
// CTA's keys.
template <Sm90BackwardConfig T>
TANDEM_DEVICE u32 fragment_at(u32 base, int n) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + (lane & 15);
  const int chunk = n % 4 * 2 + (lane >> 4);
  return base + n / 4 * (T.cta_keys() * 128) + row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Ordinary stores, by the 128 threads of a warpgroup, of the first `count` rows of blocks of 64 columns and kRows rows,
// swizzled by 128 bytes.
template <int kRows>
TANDEM_DEVICE void store_chunks(u16* to, i64 stride, const u16* from, int count, int columns) {
  const int chunks = columns / 8;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < count * chunks; i += 128) {
    const int row = i / chunks, chunk = i % chunks;
    const int swizzled = chunk / 8 * kRows * 8 + row * 8 + ((chunk & 7) ^ (row & 7));
    *reinterpret_cast<Chunk*>(to + row * stride + chunk * 8) = reinterpret_cast<const Chunk*>(from)[swizzled];
  }
}

// A tensor of gradients, as a sequence and a key head have it: rows [0, used) are sums, those up to `rows` zeros.
struct GradientRows {
  void* to;
  i64 at, stride;
  int rows, used, columns;
  bool is_f32;
};
// Fragments straight to memory: this thread's rows are `row` and `row` + 8, its columns come in pairs from `column` on.
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

// Fragments as they are: what other splits have of them is added by `convert`.
template <int n>
TANDEM_DEVICE void store_sums(float4* to, int index, const float (&sums)[n]) {
  to += index * (n / 4 * 128) + threadIdx.x % 128;
#pragma unroll
  for (int r = 0; r < n; r += 4) to[r / 4 * 128] = make_float4(sums[r], sums[r + 1], sums[r + 2], sums[r + 3]);
}

// Of a warpgroup: its own keys of an n_block, or where all have the same ones its columns of theirs.
template <Sm90BackwardConfig T>
struct KeyEpilogue {
  static constexpr bool kShares = T.wide() && !T.roles;  // all warpgroups have columns of the same keys

  const BackwardParams& p;
  BackwardShared<T>& s;
  const SequenceCoords& sequence;
  const int n_block, index;  // the CTA's n_block

  TANDEM_DEVICE int batch() const { return T.varlen ? sequence.batch : s.tile.sequence; }
  TANDEM_DEVICE int own_key() const { return T.wide() ? 0 : index * 64; }
  template <bool of_k>
  TANDEM_DEVICE float scale() const {
    return of_k ? p.scale : T.dropout ? p.dropout.scale : 1;
  }

  // dk, or dv: to the sums of the tile's split, or in float32 or added to what is there.
  template <bool of_k, int n>
  TANDEM_DEVICE void store_from_registers(const float (&sums)[n]) const {
    if (!(of_k ? p.has_dk : p.has_dv)) return;
    if constexpr (T.split) {
      const i64 block =
          (static_cast<i64>(s.tile.sequence) * p.heads_k + s.tile.head_k) * (p.n_blocks * T.ctas()) + n_block;
      float* const to = p.key_sums + (block * p.splits + s.tile.split) * T.key_floats();
      store_sums(reinterpret_cast<float4*>(to + (of_k ? 0 : T.cta_keys() * T.head_dim)), kShares || !T.wide() ? index : 0,
                 sums);
    } else {
      const i64 row = of_k ? p.dk_row : p.dv_row;
      const GradientRows to{of_k ? p.dk_data : p.dv_data,
                            batch() * (of_k ? p.dk_batch : p.dv_batch) +
                                s.tile.head_k * (of_k ? p.dk_head : p.dv_head) + sequence.k_begin * row,
                            row,
                            sequence.k_rows,
                            sequence.k_len,
                            of_k ? p.head_dim : p.head_dim_v,
                            (of_k ? p.dk_is_f32 : p.dv_is_f32) != 0};
      const int key = n_block * T.cta_keys() + own_key() + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
      store_direct<T>(sums, scale<of_k>(), to, key, 2 * (threadIdx.x & 3) + (kShares ? index * 2 * n : 0),
                      p.accumulate);
    }
  }

  // Through the place of the tile's keys, or values, which nobody reads any more.
  template <bool of_k, int n>
  TANDEM_DEVICE void store(const float (&sums)[n]) const {
    if (!(of_k ? p.has_dk : p.has_dv)) return;
    u16* const place = (of_k ? s.k : s.v) + own_key() * 64;
    const float factor = scale<of_k>();
#pragma unroll
    for (int c = 0; c < n / 8; ++c) {
      u32 w[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) w[x] = pack<T>(sums[8 * c + 2 * x] * factor, sums[8 * c + 2 * x + 1] * factor);
      stmatrix(fragment_at<T>(shared_address(place), (kShares ? index * n / 8 : 0) + c), w);
    }
    fence_proxy_async();
    int columns = 2 * n;
    if (kShares) {
      named_sync(kSyncAll, 128 * T.warpgroups);
      if (index > 0) return;
      columns *= T.warpgroups;
    } else {
      named_sync(kSyncOwn + index, 128);
    }
    const int row = n_block * T.cta_keys() + own_key();
    if (T.varlen && warp_any(sequence.k_rows - row < 64)) {
      u16* const data = static_cast<u16*>(of_k ? p.dk_data : p.dv_data) + batch() * (of_k ? p.dk_batch : p.dv_batch) +
                        s.tile.head_k * (of_k ? p.dk_head : p.dv_head);
      const i64 stride = of_k ? p.dk_row : p.dv_row;
      store_chunks<T.cta_keys()>(data + (sequence.k_begin + row) * stride, stride, place, sequence.k_rows - row,
                                 of_k ? p.head_dim : p.head_dim_v);
    } else if (threadIdx.x % 128 / 32 == 0 && elect_one()) {
#pragma unroll 1
      for (int c = 0; c < columns; c += 64)
        tma_store(of_k ? &p.dk : &p.dv, place + c * T.cta_keys(), c, sequence.k_begin + row, s.tile.head_k, batch());
      tma_store_commit();
    }
  }

  // All threads of the warpgroup have used keys, values and s.tile.
  TANDEM_DEVICE void leave_tile() const {
    named_sync(kSyncOwn + index, 128);
    if (threadIdx.x % 128 / 32 == 0 && elect_one()) mbarrier_arrive(&s.kv_empty);
  }
  // What store() has stored is on its way: the next tile's keys and values may come.
  TANDEM_DEVICE void free_keys() const {
    if (T.varlen) named_sync(kSyncOwn + index, 128);  // all have read what store_chunks() stores
    if (threadIdx.x % 128 / 32 == 0 && elect_one()) {
      tma_store_wait_read();
      mbarrier_arrive(&s.kv_empty);
    }
  }
};
