// The gradient of a bias (tile/dbias.cuh), on Blackwell: S and dP of one tile after the other come to be in tensor
// memory, keys in the lanes. A thread has a key and sums, in registers, those of half of a tile's queries. Tiles are
// those of one CTA where the main kernel's are of a pair.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "shared/sm100_backward.h"
#include "tile/dbias.cuh"
#include "tile/key_scores.cuh"
#include "tile/key_tile.cuh"
#include "tile/mask.cuh"

// The two products of a tile: keys times queries, S, and values times dout, dP.
enum DbiasProduct { kScores, kDp };

template <Sm100BackwardConfig T>
struct DbiasShared {
  struct Operands {
    alignas(1024) u16 keys[T.kCtaKeys * T.dbias_columns()];
    alignas(1024) u16 queries[T.tile_m * T.dbias_columns()];
  };
  Operands operands[T.dbias_places()];  // of each product; of wide heads there is room for one at a time
  float sums[T.tile_m][T.kCtaKeys];
  alignas(16) float stats[2 * T.tile_m];  // of the queries: -lse in log2 units, delta
  alignas(8) u64 stats_landed;
  u64 landed[2], ready[2];  // of each product: what it multiplies; it is in tensor memory
  u32 tensor_memory;
};

template <Sm100BackwardConfig T>
struct DbiasTile {
  static constexpr int kQueries = T.tile_m / T.kDbiasWarpgroups, kChunk = 32, kChunks = kQueries / kChunk;

  const BackwardParams& p;
  DbiasShared<T>& s;
  Dropout dropout;
  const int warp, lane, row, first_query;  // row: of its key, in a tile, as first_query
  u32 parity = 0;
  float sums[kQueries];

  TANDEM_DEVICE DbiasTile(const BackwardParams& params, DbiasShared<T>& shared)
      : p(params),
        s(shared),
        warp(uniform(threadIdx.x / 32)),
        lane(threadIdx.x % 32),
        row(threadIdx.x % 128),
        first_query(warp / 4 * kQueries) {
    if constexpr (T.dropout) dropout = Dropout(p.dropout);
#pragma unroll
    for (float& x : sums) x = 0;
  }

  static constexpr int columns_of(DbiasProduct n) { return n == kScores ? T.k_columns() : T.v_columns(); }

  // What a product multiplies. One thread, as multiply().
  template <DbiasProduct n>
  TANDEM_DEVICE void load(int key, int query, int head, int batch) const {
    auto& to = s.operands[n % T.dbias_places()];
    mbarrier_expect_tx(&s.landed[n], 2 * (T.kCtaKeys + T.tile_m) * columns_of(n));
    const int head_k = head / (p.heads_q / p.heads_k);
#pragma unroll 1
    for (int c = 0; c < columns_of(n); c += 64) {
      tma_load(to.keys + c * T.kCtaKeys, n == kScores ? &p.k : &p.v, &s.landed[n], c, key, head_k, batch);
#pragma unroll 1
      for (int r = 0; r < T.tile_m; r += T.q_box_rows())
        tma_load(to.queries + c * T.tile_m + r * 64, n == kScores ? &p.q : &p.dout, &s.landed[n], c, query + r, head,
                 batch);
    }
  }
  template <DbiasProduct n>
  TANDEM_DEVICE void multiply() const {
    constexpr u32 kProduct = tcgen05_instr_desc(Layout::nt, T.f16, T.kCtaKeys, T.tile_m);
    constexpr int kKeyBlock = T.kCtaKeys * 128 >> 4, kQueryBlock = T.tile_m * 128 >> 4;
    const auto& from = s.operands[n % T.dbias_places()];
    const u64 keys = tcgen05_smem_desc(shared_address(from.keys), 0, 1024);
    const u64 queries = tcgen05_smem_desc(shared_address(from.queries), 0, 1024);
    mbarrier_wait(&s.landed[n], parity);
    tcgen05_fence_after();
#pragma unroll
    for (int c = 0; c < columns_of(n) / 16; ++c)
      tcgen05_mma_ss<1>(n * T.tile_m, keys + c / 4 * kKeyBlock + c % 4 * 2, queries + c / 4 * kQueryBlock + c % 4 * 2,
                        kProduct, c > 0);
    tcgen05_commit<1>(&s.ready[n]);
  }
  TANDEM_DEVICE void make_products(int key, int query, int head, int batch) const {
    load<kScores>(key, query, head, batch);
    if (T.dbias_places() == 2) load<kDp>(key, query, head, batch);
    multiply<kScores>();
    if (T.dbias_places() == 1) {
      mbarrier_wait(&s.ready[kScores], parity);  // the place is free
      load<kDp>(key, query, head, batch);
    }
    multiply<kDp>();
  }

  TANDEM_DEVICE void add(const SequenceCoords& sequence, int head, int m_block, int key_block) {
    const int first_key = key_block * T.kCtaKeys, key = first_key + row;
    tcgen05_fence_before();
    __syncthreads();  // all have used the tile before
    if (warp == 0 && elect_one()) {
      mbarrier_expect_tx(&s.stats_landed, sizeof s.stats);
      bulk_load(s.stats, p.stats + m_block_at(p, sequence, head, m_block) * (2 * T.tile_m), sizeof s.stats,
                &s.stats_landed);
      make_products(first_key, m_block * T.tile_m, head, sequence.batch);
    }
    __syncwarp();
    const HeadScores<T> of_head(p, sequence, head);
    QueryRange seen = band_of<T>(p, sequence).visible_queries(key, key);
    if (key >= sequence.k_len) seen = {0, 0};
    const float* const stats = s.stats + first_query;
    const u32 lanes = static_cast<u32>(warp % 4) * 32 << 16;
    mbarrier_wait(&s.stats_landed, parity);
    mbarrier_wait(&s.ready[kDp], parity);  // and S, which was multiplied before
    parity ^= 1;
    tcgen05_fence_after();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int query = m_block * T.tile_m + first_query + c * kChunk;
      const int begin = clamp(seen.begin - query, 0, kChunk), end = clamp(seen.end - query, begin, kChunk);
      const u32 visible = bit_range(begin, end - begin);
      u32 kept = 0;
      if constexpr (T.dropout) kept = dropout.of_column(query, sequence.sequence * p.heads_q + head, key, lane);
      float x[2][kChunk];
      tmem_load(x[kScores], lanes + first_query + c * kChunk);
      tmem_load(x[kDp], lanes + T.tile_m + first_query + c * kChunk);
      tmem_wait_load(x);
      if constexpr (T.softcap) apply_softcap<true>(x[kScores], p);
#pragma unroll
      for (int n = 0; n < kChunk; ++n) {
        float derivative = 1;
        const float score = of_head(scaled_score<T>(x[kScores][n], p), p, query + n, key, &derivative);
        sums[c * kChunk + n] += dbias_of<T>(p, visible >> n & 1 ? score : -kInfinity, derivative, stats[c * kChunk + n],
                                            x[kDp][n], stats[T.tile_m + c * kChunk + n], kept, n);
        if (n % 4 == 3) __syncwarp();  // ptxas would have the loads of all queries under way at once, and spill
      }
    }
  }

  TANDEM_DEVICE void share() const {
#pragma unroll
    for (int n = 0; n < kQueries; ++n) s.sums[first_query + n][row] = sums[n];
  }
};

template <Sm100BackwardConfig T>
TANDEM_DEVICE void dbias(const BackwardParams& p) {
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<DbiasShared<T>*>(memory);
  static_assert(sizeof(DbiasShared<T>) <= T.dbias_smem_bytes());
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    for (u64* barrier : {&s.stats_landed, &s.landed[0], &s.landed[1], &s.ready[0], &s.ready[1]})
      mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    fence_proxy_async();
  }
  if (warp == 0) tmem_alloc<1>(&s.tensor_memory, T.kTmemColumns);  // all there are: they begin at 0
  __syncthreads();
  grid_dependency_wait();
  const DbiasPart<T, T.kCtaKeys> part(p);
  DbiasTile<T> tile(p, s);
  part.for_each_tile([&](const SequenceCoords& sequence, int head, int m_block, int key_block) {
    tile.add(sequence, head, m_block, key_block);
  });
  tile.share();
  part.store(s.sums);
  if (warp == 0) tmem_free<1>(s.tensor_memory, T.kTmemColumns);
}
