// Shared memory of a CTA of the Hopper backward: operands, barriers and the current n_block.
#pragma once
#include "config/backward.h"
#include "config/sm90_backward.h"
#include "device/cta_pair.cuh"
#include "device/n_block_work.cuh"
#include "device/pipeline_state.cuh"
#include "ptx/mbarrier.cuh"

// Additional storage of a CTA pair. ds_peer_full counts bytes; ds_read counts the other CTA's MMA warps (without
// roles).
template <Sm90BackwardConfig T, bool = T.cluster2()>
struct ClusterShared {};
template <Sm90BackwardConfig T>
struct ClusterShared<T, true> {
  alignas(1024) u16 k[T.cta_keys() * T.cluster2_columns()];  // keys of the other CTA, in the columns of this CTA's dq
  alignas(1024) u16 ds[T.ds_stages()][T.cta_keys() * T.tile_m];  // the other CTA's dS
  u64 ds_peer_full[T.ds_stages()], ds_read, tile_signalled, tile_read;
  int next_tile;
};

// A bias of each warpgroup's keys and an iteration's queries, with queries in rows. Arrivals: full: the threads of the
// copying warp; empty: the threads of the warpgroup; dq_made: all MMA warps.
template <Sm90BackwardConfig T, bool = T.stages_bias()>
struct BiasShared {};
template <Sm90BackwardConfig T>
struct BiasShared<T, true> {
  alignas(128) char rows[T.warpgroups][T.bias_bytes()];
  u64 full[T.warpgroups], empty[T.warpgroups], dq_made;
};

template <Sm90BackwardConfig T>
struct SharedStorage {
  alignas(1024) u16 k[T.cta_keys() * T.head_dim];
  alignas(1024) u16 v[T.cta_keys() * T.head_dim_v];
  alignas(1024) u16 q[T.q_stages][T.tile_m * T.head_dim];
  alignas(1024) u16 dout[T.dout_stages][T.tile_m * T.head_dim_v];
  alignas(1024) u16 ds[T.ds_stages()][T.cta_keys() * T.tile_m];                   // keys in rows; with roles queries
  alignas(1024) u16 p[T.p_stages()][T.shared_p() ? T.cta_keys() * T.tile_m : 8];  // like ds; only for wide heads
  ClusterShared<T> cluster2;
  alignas(128) float4 dq[T.dq_parts()][T.staged() ? T.dq_part_floats() / 4 : 1];
  alignas(16) float lse_delta[T.dout_stages][2 * T.tile_m];
  // A barrier's name states what is true after the wait. kernel.cuh lists the arrivals.
  alignas(8) u64 k_full, v_full, kv_empty;
  u64 q_full[T.q_stages], q_empty[T.q_stages], dout_full[T.dout_stages], dout_empty[T.dout_stages];
  u64 ds_full[2], ds_empty[2], p_full, p_empty, dq_slot_free[T.dq_parts()], dq_slot_full[T.dq_parts()][T.dq_threads()];
  // Values for a dq that is not staged, valid after dq_slot_free: the address of the sums, and whether the first
  // n_block stores. For single_n_block: the caller's first row of dq, and the number of rows from there on.
  float4* dq_to[T.dq_parts()];
  int dq_is_first_or_rows[T.dq_parts()];
  NBlockWork tile;  // valid after k_full; n_block -1: no more tiles
  BiasShared<T> bias;
};

// Initialises the barriers with the arrivals that kernel.cuh lists.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void init_barriers(SharedStorage<T>& s) {
  constexpr int kWarps = T.warpgroup_roles() ? 8 : 4 * T.warpgroups;  // warps that read queries or dout
  mbarrier_init(&s.k_full, 1);
  mbarrier_init(&s.v_full, 1);
  mbarrier_init(&s.kv_empty,
                T.warpgroups + (T.ds_gmem() ? 1 : T.dq_threads()) + (T.warpgroup_roles() || T.stages_bias() ? 1 : 0));
  if constexpr (T.stages_bias()) {
    for (u64& full : s.bias.full) mbarrier_init(&full, 32);
    for (u64& empty : s.bias.empty) mbarrier_init(&empty, 128);
    mbarrier_init(&s.bias.dq_made, kWarps);
  }
  for (int i = 0; i < T.q_stages; ++i) {
    mbarrier_init(&s.q_full[i], 1);
    mbarrier_init(&s.q_empty[i], kWarps);
  }
  for (int i = 0; i < T.dout_stages; ++i) {
    mbarrier_init(&s.dout_full[i], 1);
    mbarrier_init(&s.dout_empty[i], kWarps);
  }
  for (int i = 0; i < 2; ++i) {
    mbarrier_init(&s.ds_full[i], T.warpgroup_roles() ? 4 : kWarps);
    mbarrier_init(&s.ds_empty[i], T.ds_gmem() ? 1 : 12);
  }
  mbarrier_init(&s.p_full, 4);
  mbarrier_init(&s.p_empty, 4);
  for (int i = 0; i < T.dq_parts(); ++i) {
    mbarrier_init(&s.dq_slot_free[i], 1);
    for (u64& added : s.dq_slot_full[i]) mbarrier_init(&added, 4);
  }
  if constexpr (T.cluster2()) {
    for (u64& tma_full : s.cluster2.ds_peer_full) mbarrier_init(&tma_full, 1);
    mbarrier_init(&s.cluster2.ds_read, kWarps);
    mbarrier_init(&s.cluster2.tile_signalled, 1);
    mbarrier_init(&s.cluster2.tile_read, 1);
  }
}
