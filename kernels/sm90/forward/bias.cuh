// A bias in the Hopper forward. Two warps copy the bias to shared memory; each serves every second warpgroup. A warp
// copies the rows of an n_block after the warpgroup has read the rows of the preceding n_block. The threads of the
// warpgroup load the values that their fragments need.
#pragma once
#include "device/bias_tile.cuh"
#include "device/fragment_softmax.cuh"
#include "device/score_mod.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "sm90/forward/work_rows.cuh"

// The n_blocks of a tile to which a warpgroup adds a bias: all n_blocks that compute() does not skip.
template <Sm90ForwardConfig T>
struct BiasSteps {
  NBlockRange own{0, 0, 0, 0};
  bool begun = !T.options.block_mask;

  BiasSteps() = default;
  TANDEM_DEVICE BiasSteps(const ForwardParams& p, const TileCoords& tile, const NBlockRange& all, int warpgroup) {
    const int first_row = tile.m_block * T.tile_m() + warpgroup * 64;
    if (warpgroup >= T.warpgroups || first_row >= tile.q_rows << log2_of(p.pack_gqa)) return;
    own = T.options.bounded_left || T.options.bounded_right ? own_n_blocks<T>(p, tile, all, first_row) : all;
  }
  TANDEM_DEVICE bool has(int n_block) const { return n_block >= own.begin && n_block < own.end; }
  // Block mask: true from the first iteration on in which some row takes part. last: no further iteration.
  TANDEM_DEVICE bool takes(BlockState state, bool last) {
    begun = begun || last || state != BlockState::absent;
    return begun && own.end > 0;
  }
};

template <Sm90ForwardConfig T>
struct BiasPlace {
  TANDEM_DEVICE static u32 at(int row, int byte) { return row * T.bias_pitch() + byte; }
};

// A warp that copies the bias by cp.async.
template <Sm90ForwardConfig T>
struct BiasLoader {
  using Tile = BiasTile<T.options.bias, 64, T.tile_n, 32, BiasPlace<T>>;

  const ForwardParams& p;
  SharedStorage<T>& s;
  const BiasLayout<T.options.bias> bias;
  u32 parities = 0;  // phases of the next n_block, one bit per warpgroup
  BiasUnderWay under_way;

  TANDEM_DEVICE BiasLoader(const ForwardParams& params, SharedStorage<T>& shared)
      : p(params), s(shared), bias(params) {}

  TANDEM_DEVICE void load(const TileCoords& tile, int warpgroup, int n_block) {
    // opaque() keeps ptxas from holding derived values in registers.
    const int first_row = tile.m_block * T.tile_m() + warpgroup * 64, first_column = opaque(n_block * T.tile_n);
    const int shift = log2_of(p.pack_gqa);
    const int head = (tile.head << shift) + (first_row & (p.pack_gqa - 1));
    const BiasRows<T.options.bias> rows{bias.at(tile.batch, head, first_row >> shift, first_column),
                                        (tile.q_len << shift) - first_row, shift};
    const Tile to{bias, s.bias.rows[warpgroup], opaque(threadIdx.x % 32)};
    u64* const full = &s.bias.full[warpgroup];
    if (warp_any(under_way.full == full)) under_way.tell();  // otherwise the buffer never becomes empty
    mbarrier_wait(&s.bias.empty[warpgroup], (parities >> warpgroup & 1) ^ 1);
    parities ^= 1u << warpgroup;
    to.copy(rows, tile.k_len - first_column);
    under_way.begins(full);
  }
  TANDEM_DEVICE void finish() { under_way.tell(); }
};

// A warp that copies the bias by TMA. The CTAs of a cluster have the same rows and n_blocks of one bias. Each CTA loads
// its part of a warpgroup's rows for all CTAs, after the buffer is empty in all of them.
template <Sm90ForwardConfig T>
struct BiasTmaLoader {
  static constexpr int kRows = 64 / T.bias_ctas;

  const BiasedForwardParams& p;
  SharedStorage<T>& s;
  u32 parities = 0;  // phases of the next n_block, one bit per warpgroup

  TANDEM_DEVICE BiasTmaLoader(const ForwardParams& params, SharedStorage<T>& shared)
      : p(static_cast<const BiasedForwardParams&>(params)), s(shared) {}

  TANDEM_DEVICE void load(const TileCoords& tile, int warpgroup, int n_block) {
    const u32 parity = parities >> warpgroup & 1;
    parities ^= 1u << warpgroup;
    mbarrier_wait(&s.bias.empty[warpgroup], parity ^ 1);
    if (!elect_one()) return;
    const u32 rank = blockIdx.x % T.bias_ctas;
    char* const to = s.bias.rows[warpgroup] + rank * kRows * T.bias_pitch();
    u64* const full = &s.bias.full[warpgroup];
    const int column = n_block * T.tile_n, row = tile.m_block * T.tile_m() + warpgroup * 64 + rank * kRows;
    const int head = p.bias_head == 0 ? 0 : tile.head, batch = p.bias_batch == 0 ? 0 : tile.batch;
    mbarrier_expect_tx(full, T.bias_bytes());
    if constexpr (T.bias_ctas > 1) {
      u64* const all_empty = &s.bias.all_empty[warpgroup];
#pragma unroll
      for (int cta = 0; cta < T.bias_ctas; ++cta) mbarrier_arrive_at(all_empty, cta);
      mbarrier_wait(all_empty, parity);
      tma_load_multicast(to, &p.bias_map, full, (1u << T.bias_ctas) - 1, column, row, head, batch);
    } else {
      tma_load(to, &p.bias_map, full, column, row, head, batch);
    }
  }
  TANDEM_DEVICE void finish() {}
};

// warp: the index among the copying warps.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void load_bias(const ForwardParams& p, SharedStorage<T>& s, int warp) {
  constexpr int kEach = (T.warpgroups + T.kBiasWarps - 1) / T.kBiasWarps;
  typename OneOf<T.bias_ctas == 0, BiasLoader<T>, BiasTmaLoader<T>>::Type loader(p, s);
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.q_full[0], tile_idx & 1);
    const Sm90Work& work = s.work_tiles[tile_idx % SharedStorage<T>::kWorkTiles];
    if (work.index < 0) break;
    const TileCoords tile = work.tile<T>(p);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&s.q_empty[0]);
    const NBlockRange all = work_n_blocks<T>(p, tile, work.index);
    BiasSteps<T> steps[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) steps[i] = BiasSteps<T>(p, tile, all, warp + i * T.kBiasWarps);
    // takes(steps): true if the warpgroup adds the bias in this iteration.
    auto load = [&](int n_block, const auto& takes) {
      u32 takers = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) takers |= u32{takes(steps[i], warp + i * T.kBiasWarps)} << i;
#pragma unroll 1
      for (int i = 0; i < kEach; ++i)
        if (warp_any(takers >> i & 1)) loader.load(tile, warp + i * T.kBiasWarps, n_block);
    };
    if constexpr (T.options.block_mask) {
      const int* next_step = steps_of<T>(p, tile);
      int left = *next_step;
      next_step += kListHeader;
#pragma unroll 1
      for (; warp_any(left > 0); --left) {
        const u32 step = *next_step++;
        load(n_block_of(step),
             [&](BiasSteps<T>& of, int warpgroup) { return of.takes(state_of(step, warpgroup), left == 1); });
      }
    } else {
#pragma unroll 1
      for (int n_block = all.end - 1; warp_any(n_block >= all.begin); --n_block)
        load(n_block, [&](const BiasSteps<T>& of, int) { return of.has(n_block); });
    }
    loader.finish();
  }
}

// The warpgroup's rows of the bias in an n_block, read in fragment order.
template <Sm90ForwardConfig T>
struct BiasFragments {
  const char* own = nullptr;

  TANDEM_DEVICE explicit BiasFragments(const Warpgroup<T>& w) {
    if constexpr (T.options.bias != Bias::none)
      own = w.s.bias.rows[w.index] + (w.warp * 16 + w.lane / 4) * T.bias_pitch() +
            2 * (w.lane & 3) * bytes_of(T.options.bias);
  }
  // Loads registers r and r + 1.
  TANDEM_DEVICE void load(int r, BiasValue<T> (&to)[2]) const {
    const char* const from = own + 8 * row_of(r) * T.bias_pitch() + column_of(r) * bytes_of(T.options.bias);
    if constexpr (T.options.bias == Bias::f32) {
      const float2 pair = *reinterpret_cast<const float2*>(from);
      to[0] = pair.x, to[1] = pair.y;
    } else if constexpr (T.options.bias == Bias::element) {
      const u32 pair = *reinterpret_cast<const u32*>(from);
      to[0] = to_float<T.options.f16>(static_cast<u16>(pair)),
      to[1] = to_float<T.options.f16>(static_cast<u16>(pair >> 16));
    } else {
      const u16 pair = *reinterpret_cast<const u16*>(from);
      to[0] = (pair & 0xff) != 0, to[1] = pair >> 8 != 0;
    }
  }
};
