// The MMA warpgroups of the Hopper backward: the loop over tiles, and the choice of a main loop by T.schedule.
//
// A main loop computes P, dS and the warpgroup's parts of dk, dv and dq. mma.cuh and dsoftmax.cuh have the functions of
// an iteration. ptxas determines the form of a main loop. Arrays that products write are locals of the function with
// the loop, and an iteration is a lambda in it.
#pragma once
#include "sm90/backward/dq_accumulate.cuh"
#include "sm90/backward/epilogue.cuh"
#include "sm90/backward/mainloop_cluster2.cuh"
#include "sm90/backward/mainloop_ds_gmem.cuh"
#include "sm90/backward/mainloop_ds_gmem_sub_m.cuh"
#include "sm90/backward/mainloop_rs.cuh"
#include "sm90/backward/mainloop_shared_p.cuh"

// Runs the main loop of a tile. Only the schedule rs sets last_dq, which the caller adds. The schedule warpgroup_roles
// has a separate loop over tiles (mma_warpgroups).
template <Sm90BackwardConfig T>
TANDEM_DEVICE void mainloop(const WarpgroupTile<T>& tile, WarpgroupRings<T>& rings, WarpgroupSteps<T>& steps,
                            float (&dk)[T.dk_columns() / 2], float (&dv)[T.dv_columns() / 2],
                            float (&last_dq)[T.dq_columns() / 2]) {
  using Schedule = Sm90BackwardConfig::Schedule;
  if constexpr (T.schedule == Schedule::shared_p) {
    mainloop_shared_p(tile, rings, steps, dk, dv);
  } else if (warp_any(steps.count > 0)) {
    if constexpr (T.schedule == Schedule::rs) {
      mainloop_rs(tile, rings, steps, dk, dv, last_dq);
    } else if constexpr (T.schedule == Schedule::cluster2) {
      mainloop_cluster2(tile, rings, steps, dk, dv);
    } else if constexpr (T.schedule == Schedule::ds_gmem) {
      mainloop_ds_gmem(tile, rings, steps, dk, dv);
    } else {
      static_assert(T.schedule == Schedule::ds_gmem_sub_m);
      mainloop_ds_gmem_sub_m(tile, rings, steps, dk, dv);
    }
  }
}

template <Sm90BackwardConfig T>
TANDEM_DEVICE void compute(const BackwardParams& p, SharedStorage<T>& s, int index) {
  const WarpgroupThread<T> thread(p, index);
  WarpgroupRings<T> rings;
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_full, tile_idx & 1);
    const int n_block = warp_uniform(s.tile.n_block);
    if (n_block < 0) break;
    const int m_begin = warp_uniform(s.tile.m_begin), m_end = warp_uniform(s.tile.m_end);
    mbarrier_wait(&s.v_full, tile_idx & 1);
    float dk[T.dk_columns() / 2], dv[T.dv_columns() / 2];
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;
    const WarpgroupTile<T> tile(p, s, thread, n_block);
    tile.clear_keys();
    WarpgroupSteps<T> steps(p, s.tile, thread.group, m_begin, m_end);
    [[maybe_unused]] float last_dq[T.dq_columns() / 2];
    mainloop(tile, rings, steps, dk, dv, last_dq);
    const KeyEpilogue<T> epilogue(p, s, tile.sequence, index);
    release_kv<T>(s, index);
    const auto add_last_dq = [&](bool now) {
      if constexpr (T.schedule == Sm90BackwardConfig::Schedule::rs) {
        if (now && warp_any(steps.count > 0)) accumulate_dq(last_dq, tile, rings.steps - 1);
      }
    };
    // The last dq is added after the epilogue if its turn comes late. The next tile's keys load meanwhile.
    add_last_dq(T.wraps);
    epilogue.template store<false>(dv);
    epilogue.template store<true>(dk);
    add_last_dq(!T.wraps);
  }
}
