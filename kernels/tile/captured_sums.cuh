// How the gradients of what a score_mod reads are added to (shared/mods.h), and what the main kernel adds to them: of
// tiles whose scores read the same element. By constant derivatives that is the sum of its dS (T.sums_tiles: ranges say
// which tiles these are); else of each score's, where all tiles are such (T.sums_scores).
#pragma once
#include "ptx/global.cuh"
#include "ptx/warp.cuh"
#include "tile/mod_range.cuh"
#include "tile/sequence.cuh"

constexpr u64 kSumNan = 1, kSumPlus = 2, kSumMinus = 4;  // in a cell's last word: NaN, infinities

TANDEM_DEVICE void add_exactly(const CapturedParams& p, i64 cell, float x) {
  const u32 bits = __float_as_uint(x);
  const int exponent = bits >> 23 & 0xff;
  u64* const words = p.words + cell;
  if (exponent == 0xff) {
    global_or(words + kDigits * p.cells, x != x ? kSumNan : x > 0 ? kSumPlus : kSumMinus);
    return;
  }
  const int lowest = max(exponent, 1) - 1;  // the mantissa's lowest bit is 2^lowest times the least number
  const u64 mantissa = (bits & 0x7fffff) | (exponent > 0 ? 0x800000 : 0);
  const u64 shifted = mantissa << lowest % kDigitBits;
  const u64 low = shifted & ((1 << kDigitBits) - 1), high = shifted >> kDigitBits;
  u64* const to = words + lowest / kDigitBits * p.cells;
  const bool negative = static_cast<int>(bits) < 0;
  if (low != 0) global_add(to, negative ? 0 - low : low);
  if (high != 0) global_add(to + p.cells, negative ? 0 - high : high);
}

// Of what all scores of a tile read the same element of: by a thread, of those that it makes; then by a warp.
template <auto T>
struct TileSums {
  static constexpr int kCount = captures_along<T>(CaptureLine::tile);
  float sums[kCount > 0 ? kCount : 1] = {};

  // They take what score_captures() says of one score, in general and where derivatives are finite, and of any.
  struct Adding {
    TileSums& to;
    float ds;

    template <int n, int tensor>
    TANDEM_DEVICE void add(float derivative, i64) const {
      to.sums[n] += ds == 0 ? 0 : ds * derivative;
    }
  };
  struct AddingFinite {
    TileSums& to;
    float ds;
    bool is_seen;

    template <int n, int tensor>
    TANDEM_DEVICE void add(float derivative, i64) const {
      const float sum = fmaf(ds, derivative, to.sums[n]);
      to.sums[n] = is_seen ? sum : to.sums[n];
    }
  };
  struct Storing {
    const TileSums& of;
    const CapturedParams& p;

    template <int n, int tensor>
    TANDEM_DEVICE void add(float, i64 element) const {
      const i64 first = p.tensors[tensor].first;
      if (first < 0) return;
      const float sum = sum_over_lanes<32>(of.sums[n]);
      if (sum != 0 && threadIdx.x % 32 == 0) add_exactly(p, first + element, sum);
    }
  };
  template <class Adds>
  TANDEM_DEVICE static void add(const BackwardParams& p, float given, const ModPlace& at, const Adds& adds) {
    if constexpr (kCount > 0)
      score_captures<T, CaptureLine::tile>(given, at, static_cast<const ModifiedBackwardParams&>(p).mods.score, adds);
  }
  TANDEM_DEVICE void store(const BackwardParams& params, const ModPlace& at) const {
    const auto& p = static_cast<const ModifiedBackwardParams&>(params);
    if constexpr (kCount > 0) score_captures<T, CaptureLine::tile>(0, at, p.mods.score, Storing{*this, p.captured});
  }
};
struct NoSums {};
// Of a step of the main kernel, whose scores are asked one by one.
template <auto T>
using ScoreSums = typename OneOf<T.sums_scores, TileSums<T>, NoSums>::Type;

// The tile of an m_block and a block of keys, also of those that there are not.
template <auto T, int keys>
TANDEM_DEVICE RangePlace range_place_of(const SequenceCoords& s, int head, int m_block, int key_block) {
  const int q = m_block * T.tile_m, k = key_block * keys;
  return {range_of(s.sequence), range_of(head),    {q, q + T.tile_m - 1},
          {k, k + keys - 1},    range_of(s.q_len), range_of(s.k_len)};
}

// For tile_captures(), where nothing is to be added.
struct NoCaptures {
  template <int n, int tensor>
  TANDEM_DEVICE void add(float, i64) const {}
};
// sum: of a thread's dS, then of a warp's. Lanes meet when it is known that they are to, which is behind a branch: else
// ptxas has them meet between the products that are being issued, which wait.
struct TileCaptures {
  const CapturedParams& p;
  float& sum;

  template <int n, int tensor>
  TANDEM_DEVICE void add(float derivative, i64 element) const {
    if constexpr (n == 0) sum = sum_over_lanes<32>(sum);
    const i64 first = p.tensors[tensor].first;
    const float x = sum * derivative;
    if (first >= 0 && x != 0 && threadIdx.x % 32 == 0) add_exactly(p, first + element, x);
  }
};

// By a warp of the main kernel: what its dS of a step add to gradients. sum: of a thread's.
template <auto T, int keys>
TANDEM_DEVICE void add_tile(const BackwardParams& params, const SequenceCoords& sequence, int head, int m_block,
                            int key_block, float sum) {
  const auto& p = static_cast<const ModifiedBackwardParams&>(params);
  tile_captures<T>(range_place_of<T, keys>(sequence, head, m_block, key_block), p.mods.score,
                   TileCaptures{p.captured, sum});
}
