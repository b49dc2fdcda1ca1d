// What the warps of a CTA of the Hopper backward share: the n_block at hand, shared memory, barriers.
#pragma once
#include "ptx/mbarrier.cuh"
#include "shared/backward.h"
#include "shared/sm90_backward.h"
#include "tile/key_tile.cuh"
#include "tile/pair.cuh"
#include "tile/ring.cuh"

// What a pair of CTAs needs besides. landed: by bytes; ds_taken: arrivals of the other CTA's computing warps (without
// roles).
template <Sm90BackwardConfig T, bool = T.pair>
struct PairShared {};
template <Sm90BackwardConfig T>
struct PairShared<T, true> {
  alignas(1024) u16 k[T.cta_keys() * T.pair_columns()];  // the other's keys, the columns of which dq is made here
  alignas(1024) u16 ds[T.ds_stages()][T.cta_keys() * T.tile_m];  // and its dS of a step
  u64 ds_landed[T.ds_stages()], ds_taken, tile_told, tile_taken;
  int next_tile;
};

// A bias, of each warpgroup's keys and a step's queries, which are in rows. Arrivals: full the threads of the warp that
// copies it, empty those of the warpgroup; dq_made all computing warps.
template <Sm90BackwardConfig T, bool = T.stages_bias()>
struct BiasShared {};
template <Sm90BackwardConfig T>
struct BiasShared<T, true> {
  alignas(128) char rows[T.warpgroups][T.bias_bytes()];
  u64 full[T.warpgroups], empty[T.warpgroups], dq_made;
};

template <Sm90BackwardConfig T>
struct BackwardShared {
  alignas(1024) u16 k[T.cta_keys() * T.head_dim];
  alignas(1024) u16 v[T.cta_keys() * T.head_dim_v];
  alignas(1024) u16 q[T.q_stages][T.tile_m * T.head_dim];
  alignas(1024) u16 dout[T.dout_stages][T.tile_m * T.head_dim_v];
  alignas(1024) u16 ds[T.ds_stages()][T.cta_keys() * T.tile_m];               // keys in rows; with roles queries
  alignas(1024) u16 p[T.p_stages()][T.wide() ? T.cta_keys() * T.tile_m : 8];  // likewise; where it is not wide, nothing
  PairShared<T> pair;
  alignas(128) float4 dq[T.dq_parts()][T.staged() ? T.dq_part_floats() / 4 : 1];
  alignas(16) float stats[T.dout_stages][2 * T.tile_m];
  // A barrier is named for what is true after waiting for it. Arrivals: full 1, beside the bytes that TMA brings;
  // q_empty, dout_empty and ds_full (of even and odd steps) those of all computing warps;
  // kv_empty one of each warpgroup, of each order_dq() and of load_bias(). With roles q_empty, dout_empty those of the
  // warps that make scores and of those that sum what they are of; p_full, ds_full those that make scores; p_empty that
  // sum dv; ds_empty that sum dk, that make dq, and that do so in the other CTA (of strips: 1, as dS has left). A
  // warpgroup may write, or add, its dq of a step: dq_turn, 1; it has: dq_added, its warps.
  alignas(8) u64 k_full, v_full, kv_empty;
  u64 q_full[T.q_stages], q_empty[T.q_stages], dout_full[T.dout_stages], dout_empty[T.dout_stages];
  u64 ds_full[2], ds_empty[2], p_full, p_empty, dq_turn[T.dq_parts()], dq_added[T.dq_parts()][T.dq_threads()];
  // Told by dq_turn, where dq is not staged: where it is added, or written by the first n_block; of a single one where
  // the caller's first row of dq is, and how many there are from there on.
  float4* dq_to[T.dq_parts()];
  int dq_is_first_or_rows[T.dq_parts()];
  KeyTile tile;  // told by k_full; n_block -1: there are no more
  BiasShared<T> bias;
};
