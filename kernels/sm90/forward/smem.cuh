// Shared memory of a CTA of the Hopper forward: work tiles, operands, barriers.
#pragma once
#include "config/forward.h"
#include "config/sm90_forward.h"
#include "device/mod_functions.cuh"
#include "device/work_tile.cuh"

struct Sm90Work : WorkTile {
  int head_k;

  // Dense tiles read only values that are no kernel parameters, because the reads delay the start of every tile.
  template <Sm90ForwardConfig T>
  TANDEM_DEVICE TileCoords tile(const ForwardParams& p) const {
    if constexpr (T.options.varlen) return coords;
    return {coords.m_block, coords.head, coords.batch, coords.batch, 0, 0, p.seqlen_q, p.seqlen_q, p.seqlen_k};
  }
};

// The values of a mask_mod that depend only on a warpgroup's rows or only on an iteration's keys
// (device/mod_functions.cuh).
template <Sm90ForwardConfig T, bool = T.evaluates_mask_mod()>
struct MaskShared {};
template <Sm90ForwardConfig T>
struct MaskShared<T, true> {
  struct alignas(8) KeyPair {
    MaskKey<T> keys[2];
  };
  MaskRow<T> rows[64];
  KeyPair keys[2][T.tile_n / 2];  // index: parity of the number of remaining iterations
};

// A bias, 64 rows per warpgroup. Arrivals: full: every thread of the copying warp, or 1 and the bytes of TMA. empty:
// every thread of the warpgroup, because racecheck does not follow one arrival after __syncwarp. all_empty: one per CTA
// that shares it.
template <Sm90ForwardConfig T, bool = T.options.bias != Bias::none>
struct BiasShared {};
template <Sm90ForwardConfig T>
struct BiasShared<T, true> {
  alignas(128) char rows[T.warpgroups][T.bias_bytes()];
  u64 full[T.warpgroups], empty[T.warpgroups], all_empty[T.warpgroups];
};

template <Sm90ForwardConfig T>
struct SharedStorage {
  // Four slots, because the next tile is taken while a warpgroup may be at the end of the last tile but one.
  static constexpr int kWorkTiles = 4;
  alignas(1024) u16 q[T.tile_m() * T.columns_k()];
  alignas(1024) u16 k[T.stages][T.tile_n * T.columns_k()];
  alignas(1024) u16 v[T.stages][T.tile_n * T.columns_v()];
  alignas(1024) u16 out[T.o_smem_rows() * T.columns_v()];
  // A barrier's name states what is true after the wait; kernel.cuh lists the arrivals. The first q_empty counts the
  // warps that copy a bias, because q_full publishes tiles to them.
  alignas(8) u64 q_full[T.warpgroups], q_empty[T.warpgroups];
  u64 k_full[T.stages], k_empty[T.stages], v_full[T.stages], v_empty[T.stages];
  Sm90Work work_tiles[kWorkTiles];
  MaskShared<T> mask[T.warpgroups];
  BiasShared<T> bias;
};
