// A bias as the only score option of the Hopper backward. A warp copies the bias to shared memory, with queries in rows
// as in global memory. A thread reads the columns of its two keys.
#pragma once
#include "device/bias_tile.cuh"
#include "device/score_mod.cuh"
#include "sm90/backward/warpgroup_tile.cuh"

// Threads of a warp read eight keys of every second query. The swizzle avoids bank conflicts between these threads.
template <Sm90BackwardConfig T>
struct BiasPlace {
  static constexpr int kPitch = 64 * bytes_of(T.options.bias), kShift = T.options.bias == Bias::f32 ? 5 : 4;
  TANDEM_DEVICE static u32 at(int query, int byte) { return query * kPitch + (byte ^ (query >> 1 & 3) << kShift); }
};

// All threads of the warp must call it.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void load_bias(const BackwardParams& p, SharedStorage<T>& s) {
  const BiasLayout<T.options.bias> bias(p);
  u32 parity = 1;
  BiasUnderWay under_way;
  for (u32 tile_idx = 0;; ++tile_idx) {
    mbarrier_wait(&s.k_full, tile_idx & 1);
    const NBlockWork tile = s.tile;
    if (tile.n_block < 0) break;
    __syncwarp();
    arrive(&s.kv_empty);
    const SequenceCoords sequence = sequence_coords<T>(p, tile.sequence);
#pragma unroll 1
    for (MBlockIterator<T> steps(p, tile); steps.left > 0; steps.advance(), parity ^= 1) {
#pragma unroll 1
      for (int i = 0; i < T.warpgroups; ++i) {
        // opaque() keeps ptxas from holding derived values in registers.
        const int query = opaque(steps.m_block * T.tile_m), key = tile.n_block * T.cta_keys() + i * 64;
        const BiasTile<T.options.bias, T.tile_m, 64, 32, BiasPlace<T>> to{bias, s.bias.rows[i],
                                                                          opaque(threadIdx.x % 32)};
        if constexpr (T.warpgroups == 1) under_way.tell();
        mbarrier_wait(&s.bias.empty[i], parity);
        to.copy({bias.at(sequence.batch, steps.head, query, key), sequence.q_len - query, 0}, sequence.k_len - key);
        under_way.begins(&s.bias.full[i]);
      }
    }
    under_way.tell();
  }
}

// Adds the bias to the products of an iteration after it has arrived.
template <Sm90BackwardConfig T>
TANDEM_DEVICE void add_bias(float (&scores)[T.score_queries() / 2], const WarpgroupTile<T>& tile, u32 step) {
  constexpr int kBytes = bytes_of(T.options.bias);
  auto& s = tile.s.bias;
  const WarpgroupThread<T>& thread = tile.thread;
  mbarrier_wait(&s.full[thread.index], step & 1);
  const int query = 2 * (thread.lane & 3), key = thread.warp * 16 + thread.lane / 4;
  const char* const rows = s.rows[thread.index];
  const char* const of_key[2] = {rows + BiasPlace<T>::at(query, key * kBytes),
                                 rows + BiasPlace<T>::at(query, (key + 8) * kBytes)};
  const float by = reciprocal(tile.p.scale);
#pragma unroll
  for (int r = 0; r < T.score_queries() / 2; ++r) {
    const char* const at = of_key[row_of(r)] + column_of(r) * BiasPlace<T>::kPitch;
    scores[r] = with_bias<T>(scores[r], bias_value<T>(at), by);
  }
  mbarrier_arrive(&s.empty[thread.index]);
}
