// The loop of an MMA warpgroup of the Hopper forward: scores, softmax and result, tile after tile.
//
// ptxas determines the form of compute() (docs/design/sm90_forward.md). Arrays that products write are its locals, and
// the functions that work on them (mainloop.cuh) take references. As members of a struct these arrays would change the
// address arithmetic of the main loop. A function for a block mask's first iterations would do so too.
#pragma once
#include "device/row.cuh"
#include "sm90/forward/epilogue.cuh"
#include "sm90/forward/mainloop.cuh"

template <Sm90ForwardConfig T>
TANDEM_DEVICE void compute(const ForwardParams& p, SharedStorage<T>& s, int index) {
  const ScoreConstants<T> constants(p);
  Warpgroup<T> w(p, s, index);
  if (index == T.warpgroups - 1) {
    w.pingpong_signal();
    w.o_smem_release();
  }

  // This form of loop keeps ring slots in uniform registers.
  for (int n = w.next_work_tile(); n >= 0; n = w.next_work_tile()) {
    const WorkRows<T> rows(p, w);
    typename Warpgroup<T>::QFragments queries;
    if constexpr (T.q_in_registers()) {
      w.load_q(queries);
      fence_proxy_async();  // the next TMA load may overwrite the queries
      __syncwarp();
      w.release_q();
    }
    NBlockSteps<T> at(rows);
    // Advances to the first iteration that the warpgroup's rows see.
    const bool no_rows = warp_any(rows.rows_left() <= 0);  // the sequence ended in earlier warpgroups
    const int visible_end = no_rows ? at.all.begin : at.own.end;
    int n_block = at.all.end - 1;
    if constexpr (T.options.block_mask) {
      const int* const list = steps_of<T>(rows.p, rows.tile());
      const int steps = *list, first = list[kListHeader];
      at.ahead = list[kListHeader + 1];
      at.list = list + kListHeader + 2;
      hold_mask_rows(rows);
      at.steps = warp_uniform(steps);
      at.next = warp_uniform(first);
      n_block = at.read_step(w.index);
#pragma unroll 1
      while (warp_any(no_rows ? at.steps > 0 : at.steps > 1 && at.state == BlockState::absent)) {
        w.skip_n_block(rows.tile(), at.all, n_block);
        if (--at.steps > 0) n_block = at.read_step(w.index);
      }
    } else {
#pragma unroll 1
      for (; warp_any(n_block >= visible_end); --n_block) w.skip_n_block(rows.tile(), at.all, n_block);
    }
    if (no_rows) {
      if constexpr (!T.q_in_registers()) {
        __syncwarp();
        w.release_q();
      }
      w.o_smem_acquire();
      w.o_smem_release();
      continue;
    }

    hold_first_mask_keys(rows, at, n_block);
    float scores[T.tile_n / 2], out[T.head_dim_v / 2], inverse[2];
    u32 probabilities[T.tile_n / 4], keep_mask[kKeepMaskWords<T>], shown[kShownNumbers<T>];
    HeldRow<T> held[2];
    if constexpr (T.options.score_mod) {
#pragma unroll
      for (int i = 0; i < 2; ++i) held[i] = hold_row<T>(p, rows.tile(), rows.own_row(i));
    }
    const Fragments<T> fragments{queries, scores, out, probabilities, keep_mask, shown, held, constants};
    FragmentSoftmax<T.options.f16> softmax;
#pragma unroll
    for (int i = 0; i < T.head_dim_v / 2; ++i) out[i] = 0;
    mainloop_first(fragments, w, rows, at, n_block, softmax);
    mainloop(fragments, w, rows, at, n_block, softmax);
    finish(fragments, inverse, w, rows, softmax);

    if constexpr (T.options.bounded_left && !T.options.block_mask) {
#pragma unroll 1
      for (; warp_any(n_block >= at.all.begin); --n_block) w.skip_n_block(rows.tile(), at.all, n_block);
    }
    store_out(out, inverse, w, rows);
  }
  tma_store_wait();
}
