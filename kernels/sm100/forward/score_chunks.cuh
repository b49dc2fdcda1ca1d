// A thread's scores in chunks of 32: visibility, maximum, and the conversion to probabilities.
#pragma once
#include "config/sm100_forward.h"
#include "device/coords.cuh"
#include "device/dropout.cuh"
#include "device/exp2.cuh"
#include "device/mask.cuh"
#include "device/pack.cuh"
#include "ptx/float2.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/warp.cuh"

constexpr int kChunk = 32;  // columns of scores that a thread loads at once

// Returns true if pair n of a chunk uses the FMA units; such pairs are spread evenly.
template <Sm100ForwardConfig T>
constexpr bool on_fma_units(int n) {
  return (n + 1) * T.ex2_emu_pairs / 16 > n * T.ex2_emu_pairs / 16;
}

// Replaces a chunk of scores by probabilities. plain: all on the exponential unit. Otherwise, without a maximum,
// `largest` receives the largest score of the FMA units. Dropout keeps the entries of `kept`; the sum counts all
// entries. The next chunk begins when this chunk is almost complete, because interleaving would delay both.
template <Sm100ForwardConfig T, bool plain>
TANDEM_DEVICE void exponentials(const float (&x)[kChunk], Exponents& e, Float2* sum, u32 to, float* largest,
                                u32 keep_mask = 0) {
  // From here on enough work remains for the next chunk to begin.
  constexpr int kNextFrom = !T.lazy_max() ? 8 : T.head_dim > 64 || T.options.bounded_left ? 12 : 10;
  u32 packed[kChunk / 2];
  Float2 known;
#pragma unroll
  for (int n = 0; n < kChunk / 2; ++n) {
    const Float2 scores = float2_of(x[2 * n], x[2 * n + 1]);
    const Float2 y =
        !plain && on_fma_units<T>(n) ? exp2_fma(scores, e, T.lazy_max() ? largest : nullptr) : exp2_mufu(scores, e);
    *sum = *sum + y;
    float low, high;
    split(y, &low, &high);
    if constexpr (T.options.dropout) {
      low = keep_or_zero(keep_mask, Dropout::bit_in_row(2 * n), low);
      high = keep_or_zero(keep_mask, Dropout::bit_in_row(2 * n + 1), high);
    }
    packed[n] = pack<T>(low, high);
    if (n == kNextFrom) known = *sum;
  }
  if (!plain) e.use_after(known);
  tmem_store(to, packed);
}

// The chunks of an iteration that some row of the warp sees. All rows see chunks [0, all_end) completely: all chunks,
// or all but one. A bound moves by at most one column per row.
template <Sm100ForwardConfig T>
struct VisibleChunks {
  int some_end, all_end;
  u32 some_bits;  // one bit per chunk, with a left bound

  TANDEM_DEVICE VisibleChunks(const KeyRange& keys, int n_block) {
    const int most_end = __shfl_sync(~0u, keys.end - n_block * T.tile_n, 31);
    some_end = (most_end + 31) >> 5;
    all_end = (most_end - 31) >> 5;
    if constexpr (T.options.bounded_left) {
      const int least = max(warp_uniform(keys.begin - n_block * T.tile_n), 0) >> 5;
      some_bits = bit_range(least, max(some_end - least, 0));
    }
  }
  TANDEM_DEVICE bool some(int c) const { return T.options.bounded_left ? some_bits >> c & 1 : c == 0 || c < some_end; }
  // With both bounds the test costs more than it saves.
  TANDEM_DEVICE bool all(int c) const { return !T.options.bounded_left && c < all_end; }
};

// Sets the scores of chunk c that the row does not see to -infinity.
template <Sm100ForwardConfig T>
TANDEM_DEVICE void apply_mask(float (&x)[kChunk], const KeyRange& keys, int n_block, int c) {
  const int first = c * kChunk, end = keys.end - n_block * T.tile_n;
  u32 visible;
  if constexpr (T.options.bounded_left) {
    const int begin = max(keys.begin - n_block * T.tile_n, first);
    visible = bit_range(begin - first, max(end - begin, 0));
  } else {
    visible = bit_range(0, max(end - first, 0));
  }
#pragma unroll
  for (int n = 0; n < kChunk; ++n) x[n] = masked_score(visible, n, x[n]);
}

TANDEM_DEVICE float max_of(const float (&x)[kChunk], float largest) {
#pragma unroll
  for (int n = 0; n < kChunk; ++n) largest = fmaxf(largest, x[n]);
  return largest;
}
