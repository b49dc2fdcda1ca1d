// A pipeline over score tiles on Blackwell, for the additional kernels (score_grads/score_tile.cuh): S and dP in tensor
// memory, with keys in the lanes. A thread has one key and half of the queries. Tiles belong to one CTA, even if the
// main kernel uses CTA pairs.
#pragma once
#include "config/sm100_backward.h"
#include "device/mask.cuh"
#include "device/n_block_work.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "score_grads/score_tile.cuh"

// The two products of a tile: S is keys times queries, and dP is values times dout.
enum ScoreProduct { kScores, kDp };

template <Sm100BackwardConfig T>
struct ScoreTileShared {
  struct ScoreOperands {
    alignas(1024) u16 keys[T.kCtaKeys * T.score_columns()];
    alignas(1024) u16 queries[T.tile_m * T.score_columns()];
  };
  ScoreOperands operands[T.score_places()];   // one per product; wide heads share one buffer
  alignas(16) float lse_delta[2 * T.tile_m];  // per query: -lse in log2 units, delta
  alignas(8) u64 lse_delta_tma_full;
  u64 tma_full[2], ready[2];  // per product: operands arrived; result complete
  u32 tensor_memory;
};

template <Sm100BackwardConfig T>
struct ScoreTile {
  // A thread processes its queries in chunks. The chunks that all threads process at once are neighbours.
  static constexpr int kChunk = 32, kRows = kChunk * T.kScoreWarpgroups, kChunks = T.tile_m / kRows;

  const BackwardParams& p;
  ScoreTileShared<T>& s;
  Dropout dropout;
  const int warp, lane, row, first_query;  // row: of the key in a tile; first_query: in a chunk
  u32 parity = 0;

  TANDEM_DEVICE ScoreTile(const BackwardParams& params, ScoreTileShared<T>& shared)
      : p(params),
        s(shared),
        warp(warp_uniform(threadIdx.x / 32)),
        lane(threadIdx.x % 32),
        row(threadIdx.x % 128),
        first_query(warp / 4 * kChunk) {
    if constexpr (T.options.dropout) dropout = Dropout(p.dropout);
    if (threadIdx.x == 0) {
      for (u64* barrier : {&s.lse_delta_tma_full, &s.tma_full[0], &s.tma_full[1], &s.ready[0], &s.ready[1]})
        mbarrier_init(barrier, 1);
      fence_mbarrier_init();
      fence_proxy_async();
    }
    if (warp == 0) tmem_alloc<1>(&s.tensor_memory, T.kTmemColumns);  // allocates all columns, which begin at 0
    __syncthreads();
    grid_dependency_wait();
  }
  // Afterwards all warps have read the last tile.
  TANDEM_DEVICE void end() const {
    if (warp == 0) tmem_free<1>(s.tensor_memory, T.kTmemColumns);
  }

  static constexpr int columns_of(ScoreProduct n) { return n == kScores ? T.k_columns() : T.v_columns(); }

  // Loads the operands of a product. The thread that calls multiply() must call it.
  template <ScoreProduct n>
  TANDEM_DEVICE void load(int key, int query, int head, int batch) const {
    auto& to = s.operands[n % T.score_places()];
    mbarrier_expect_tx(&s.tma_full[n], 2 * (T.kCtaKeys + T.tile_m) * columns_of(n));
    const int head_k = head / (p.heads_q / p.heads_k);
#pragma unroll 1
    for (int c = 0; c < columns_of(n); c += 64) {
#pragma unroll 1
      for (int r = 0; r < T.kCtaKeys; r += T.k_box())
        tma_load(to.keys + c * T.kCtaKeys + r * 64, n == kScores ? &p.k : &p.v, &s.tma_full[n], c, key + r, head_k,
                 batch);
#pragma unroll 1
      for (int r = 0; r < T.tile_m; r += T.q_box_rows())
        tma_load(to.queries + c * T.tile_m + r * 64, n == kScores ? &p.q : &p.dout, &s.tma_full[n], c, query + r, head,
                 batch);
    }
  }
  template <ScoreProduct n>
  TANDEM_DEVICE void multiply() const {
    constexpr u32 kProduct = tcgen05_instr_desc(MmaLayout::nt, T.options.f16, T.kCtaKeys, T.tile_m);
    constexpr int kKeyBlock = T.kCtaKeys * 128 >> 4, kQueryBlock = T.tile_m * 128 >> 4;
    const auto& from = s.operands[n % T.score_places()];
    const u64 keys = tcgen05_smem_desc(shared_address(from.keys), 0, 1024);
    const u64 queries = tcgen05_smem_desc(shared_address(from.queries), 0, 1024);
    mbarrier_wait(&s.tma_full[n], parity);
    tcgen05_fence_after();
#pragma unroll
    for (int c = 0; c < columns_of(n) / 16; ++c)
      tcgen05_mma_ss<1>(n * T.tile_m, keys + c / 4 * kKeyBlock + c % 4 * 2, queries + c / 4 * kQueryBlock + c % 4 * 2,
                        kProduct, c > 0);
    tcgen05_commit<1>(&s.ready[n]);
  }
  TANDEM_DEVICE void make_products(int key, int query, int head, int batch) const {
    load<kScores>(key, query, head, batch);
    if (T.score_places() == 2) load<kDp>(key, query, head, batch);
    multiply<kScores>();
    if (T.score_places() == 1) {
      mbarrier_wait(&s.ready[kScores], parity);  // the buffer is free
      load<kDp>(key, query, head, batch);
    }
    multiply<kDp>();
  }

  // Waits until the products of a tile are complete.
  TANDEM_DEVICE void make(const ScoreTileAt& at) {
    tcgen05_fence_before();
    fence_proxy_async();
    __syncthreads();  // all warps have read the previous tile
    if (warp == 0 && elect_one()) {
      mbarrier_expect_tx(&s.lse_delta_tma_full, sizeof s.lse_delta);
      bulk_load(s.lse_delta, p.lse_delta + m_block_at(p, at.sequence, at.head, at.m_block) * (2 * T.tile_m),
                sizeof s.lse_delta, &s.lse_delta_tma_full);
      make_products(at.sequence.k_begin + at.key_block * T.kCtaKeys, at.sequence.q_begin + at.m_block * T.tile_m,
                    at.head, at.sequence.batch);
    }
    __syncwarp();
    mbarrier_wait(&s.lse_delta_tma_full, parity);
    mbarrier_wait(&s.ready[kDp], parity);  // also covers S, which was issued before
    parity ^= 1;
    tcgen05_fence_after();
  }

  // Calls use(n, ScoreGradient) for each of a thread's queries of a chunk.
  template <class Use>
  TANDEM_DEVICE void each(const ScoreTileAt& at, int chunk, const Use& use) const {
    const SequenceCoords& sequence = at.sequence;
    const int in_tile = chunk * kRows + first_query, query = at.m_block * T.tile_m + in_tile;
    const int key = at.key_block * T.kCtaKeys + row;
    HeadScores<T> of_head(p, sequence, at.head);
    of_head.state = state_at<T>(p, at);
    QueryRange seen = band_of<T>(p, sequence).visible_queries(key, key);
    if (key >= sequence.k_len) seen = {0, 0};
    const int begin = clamp(seen.begin - query, 0, kChunk), end = clamp(seen.end - query, begin, kChunk);
    const u32 visible = bit_range(begin, end - begin);
    const float* const lse_delta = s.lse_delta + in_tile;
    u32 keep_mask = 0;
    if constexpr (T.options.dropout)
      keep_mask = dropout.of_column(query, dropout_head<T>(p, sequence.sequence, at.head), key, lane);
    const u32 from = (static_cast<u32>(warp % 4) * 32 << 16) + in_tile;
    // ptxas computes addresses of a bias early, up to the next branch. With these options the registers would spill.
    constexpr bool kBranches =
        T.options.bias != Bias::none && (T.options.softcap || T.options.dropout || T.options.alibi);
    constexpr int kAtOnce = kBranches ? kChunk / 2 : kChunk;
#pragma unroll
    for (int first = 0; first < kChunk; first += kAtOnce) {
      if constexpr (kBranches) {
        if (!warp_any(visible & bit_range(first, kAtOnce))) {
#pragma unroll
          for (int n = first; n < first + kAtOnce; ++n) use(n, ScoreGradient{0, 0, 1});
          continue;
        }
      }
      float x[2][kAtOnce];
      tmem_load(x[kScores], from + first);
      tmem_load(x[kDp], from + T.tile_m + first);
      tmem_wait_load(x);
      if constexpr (T.options.softcap) apply_softcap<true>(x[kScores], p);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int n = first + i;
        ScoreGradient gradient{0, 0, 1};
        const float score =
            of_head(scaled_score<T>(x[kScores][i], p), p, query, n, key, &gradient.derivative, &gradient.mod_input);
        gradient.ds = ds_of<T>(p, visible >> n & 1 ? score : -kInfinity, {lse_delta[n], lse_delta[T.tile_m + n]},
                               x[kDp][i], keep_mask, n);
        use(n, gradient);
        if (n % 4 == 3) __syncwarp();  // otherwise ptxas overlaps all queries' loads, and spills
      }
    }
  }
};
