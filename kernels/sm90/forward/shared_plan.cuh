// What the warps of a CTA of the Hopper forward share: tiles that are taken, shared memory, barriers.
#pragma once
#include "shared/forward.h"
#include "shared/sm90_forward.h"
#include "tile/mod_functions.cuh"
#include "tile/work_tile.cuh"

struct Work : WorkTile {
  int head_k;

  // Dense tiles read only what the parameters do not say: this is in the way of a warpgroup at the start of every tile.
  template <Sm90ForwardConfig T>
  TANDEM_DEVICE TileCoords tile(const ForwardParams& p) const {
    if constexpr (T.varlen) return coords;
    return {coords.m_block, coords.head, coords.batch, coords.batch, 0, 0, p.seqlen_q, p.seqlen_q, p.seqlen_k};
  }
};

// What a mask_mod needs of a warpgroup's rows, and of the keys of a step, alone (tile/mod_functions.cuh).
template <Sm90ForwardConfig T, bool = T.asks_mask()>
struct MaskShared {};
template <Sm90ForwardConfig T>
struct MaskShared<T, true> {
  struct alignas(8) KeyPair {
    MaskKey<T> keys[2];
  };
  MaskRow<T> rows[64];
  KeyPair keys[2][T.tile_n / 2];  // of steps with which an even, and an odd, number is left
};

// A bias, 64 rows of each warpgroup. Arrivals: full every thread of the warp that copies them or, beside the bytes that
// TMA brings, one; empty every one of the warpgroup (racecheck does not see that one thread arrives for others behind
// __syncwarp); all_empty one of each CTA that shares it, where it is.
template <Sm90ForwardConfig T, bool = T.bias != Bias::none>
struct BiasShared {};
template <Sm90ForwardConfig T>
struct BiasShared<T, true> {
  alignas(128) char rows[T.warpgroups][T.bias_bytes()];
  u64 full[T.warpgroups], empty[T.warpgroups], all_empty[T.warpgroups];
};

template <Sm90ForwardConfig T>
struct ForwardShared {
  // The next is taken when a warpgroup may be at the end of the last but one: three do.
  static constexpr int kWorkTiles = 4;
  alignas(1024) u16 q[T.tile_m() * T.columns_k()];
  alignas(1024) u16 k[T.stages][T.tile_n * T.columns_k()];
  alignas(1024) u16 v[T.stages][T.tile_n * T.columns_v()];
  alignas(1024) u16 out[T.o_smem_rows() * T.columns_v()];
  // A barrier is named for what is true after waiting for it. Arrivals: full 1, beside the bytes that TMA brings;
  // q_empty 4, the warps of its warpgroup (the first one's also those that copy a bias, which are told of tiles by
  // q_full too); k_empty and v_empty those of all computing warps.
  alignas(8) u64 q_full[T.warpgroups], q_empty[T.warpgroups];
  u64 k_full[T.stages], k_empty[T.stages], v_full[T.stages], v_empty[T.stages];
  Work work_tiles[kWorkTiles];
  MaskShared<T> mask[T.warpgroups];
  BiasShared<T> bias;
};
