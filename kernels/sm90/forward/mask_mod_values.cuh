// Values of a mask_mod that depend only on a row or only on a key, in the Hopper forward.
#pragma once
#include "sm90/forward/fragment_scores.cuh"
#include "sm90/forward/work_rows.cuh"

// Per-row and per-key values of a mask_mod: each thread of a warpgroup evaluates one. Row values are evaluated at the
// start of a tile, key values one iteration ahead. The warpgroup synchronizes in between when it waits for its turn, so
// that no thread waits for these loads.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void hold_mask_rows(const WorkRows<T>& rows) {
  if constexpr (T.evaluates_mask_mod()) {
    static_assert(T.pingpong);
    named_sync(Warpgroup<T>::kWarpgroupSync + rows.w.index, 128);  // reads of the preceding tile's values are complete
    const int row = threadIdx.x % 128;
    const TileCoords tile = rows.tile();
    if (row < 64) rows.w.mask().rows[row] = MaskMod<T>(tile, Row(rows.p, tile, rows.first_row() + row)).row(rows.p);
  }
}
template <Sm90ForwardConfig T>
TANDEM_DEVICE MaskKey<T> mask_key_of(const WorkRows<T>& rows, int n_block) {
  const TileCoords tile = rows.tile();
  return MaskMod<T>(tile, Row(rows.p, tile, 0)).key(rows.p, n_block * T.tile_n + threadIdx.x % 128);
}
// steps: the number of remaining iterations, this one included.
template <Sm90ForwardConfig T>
TANDEM_DEVICE void hold_mask_key(const WorkRows<T>& rows, const MaskKey<T>& key, int steps) {
  const int n = threadIdx.x % 128;
  if (n < T.tile_n) rows.w.mask().keys[steps & 1][n / 2].keys[n & 1] = key;
}
template <Sm90ForwardConfig T>
TANDEM_DEVICE void hold_first_mask_keys(const WorkRows<T>& rows, const NBlockSteps<T>& at, int n_block) {
  if constexpr (T.evaluates_mask_mod()) {
    if (at.state == BlockState::partial) hold_mask_key(rows, mask_key_of(rows, n_block), at.steps);
  }
}

// Values of the next iteration's keys, loaded while scores are multiplied.
template <Sm90ForwardConfig T>
struct NextMaskKey {
  bool any = false;
  typename OneOf<T.evaluates_mask_mod(), MaskKey<T>, NoRow>::Type key;

  TANDEM_DEVICE NextMaskKey(const WorkRows<T>& rows, const NBlockSteps<T>& at) {
    if constexpr (T.evaluates_mask_mod()) {
      any = at.steps > 1 && state_of(at.next, rows.w.index) == BlockState::partial;
      if (any) key = mask_key_of(rows, n_block_of(at.next));
    }
  }
  TANDEM_DEVICE void hold(const WorkRows<T>& rows, const NBlockSteps<T>& at) const {
    if constexpr (T.evaluates_mask_mod()) {
      if (any) hold_mask_key(rows, key, at.steps - 1);
    }
  }
};
