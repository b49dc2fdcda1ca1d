// The end of a tile of the Hopper forward: the last PV product, the sums of its rows and the log-sum-exp.
#pragma once
#include "sm90/forward/n_block_scores.cuh"

// Computes the PV product of the last iteration. Meanwhile the sums are reduced to the factor of the result.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void finish(const Fragments<T>& f, float (&inverse)[2], Warpgroup<T>& w, const WorkRows<T>& rows,
                          FragmentSoftmax<T.options.f16>& softmax) {
  const ForwardParams& p = rows.p;
  if (!T.q_in_registers()) w.release_q();
  w.wait_v();
  w.mma_pv(f.out, f.probabilities);
  if (T.lazy_max()) {
    softmax.settle_last(f.probabilities, [] { wgmma_wait<0>(); });
  } else {
    softmax.add_step();
  }
  softmax.reduce_sum();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Row row = rows.own_row(i);
    const RowFinal end = finalize_row<T>(p, row, rows.is_used(i), softmax.sum[i], softmax.row_max[i],
                                         [&] { return is_first_split<T>(p, rows.tile(), rows.work.index); });
    inverse[i] = end.inverse;
    if constexpr (T.options.dropout) inverse[i] *= p.dropout.scale;
    if ((w.lane & 3) == 0) store_work_lse<T>(p, rows.tile(), rows.work.index, row, end.lse);
  }
  wgmma_wait<0>();
  fence_operand(f.out);
  // The largest probabilities times large values may overflow too. This test must come before the last values are
  // released, because afterwards all tiles count as complete.
  if (T.lazy_max() && softmax.outgrown && !warp_any(rows.work.strict)) {
    const bool used[2] = {rows.is_used(0), rows.is_used(1)};
    bool lost = (used[0] && softmax.overflowed(0)) || (used[1] && softmax.overflowed(1));
#pragma unroll
    for (int i = 0; i < T.head_dim_v / 2; ++i) lost |= used[row_of(i)] && !(fabsf(f.out[i]) < kInfinity);
    if (warp_any(lost)) w.request_retry();
  }
  w.release_v();
}

// Stores the result of a tile or of a split.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void store_out(const float (&out)[T.head_dim_v / 2], const float (&inverse)[2], Warpgroup<T>& w,
                             const WorkRows<T>& rows) {
  if (T.device_splits && rows.is_split()) {
    w.store_f32(out, inverse, [&](int i) { return rows.split_place(i); });
    w.o_smem_acquire();
    w.o_smem_release();
  } else if constexpr (T.f32_out) {
    w.store_f32(out, inverse, [&](int i) { return rows.f32_place(i); });
  } else {
    w.store(out, inverse, rows.tile(), rows.first_row(), rows.rows_left(), rows.work.strict);
  }
}
