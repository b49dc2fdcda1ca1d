// Additions to the gradients of the tensors that a score_mod reads (config/mods.h). The main kernel adds tiles whose
// scores all read the same element. With constant derivatives the kernel adds the sum of dS (T.captured_per_tile:
// ranges select these tiles). If all tiles are of this kind, it adds the terms of each score (T.captured_per_score).
#pragma once
#include "config/backward_addresses.h"
#include "device/mod_range.cuh"
#include "device/sequence.cuh"
#include "ptx/global.cuh"
#include "ptx/warp.cuh"

constexpr u64 kSumNan = 1, kSumPlus = 2, kSumMinus = 4;  // in a cell's last word: NaN, infinities

TANDEM_DEVICE void add_exactly(const CapturedParams& p, i64 cell, float x) {
  const u32 bits = __float_as_uint(x);
  const int exponent = bits >> 23 & 0xff;
  u64* const words = p.words + cell;
  if (exponent == 0xff) {
    global_or(words + captured_word_at(p, kDigits, 0), x != x ? kSumNan : x > 0 ? kSumPlus : kSumMinus);
    return;
  }
  const int lowest = max(exponent, 1) - 1;  // lowest mantissa bit: 2^lowest times the least number
  const u64 mantissa = (bits & 0x7fffff) | (exponent > 0 ? 0x800000 : 0);
  const u64 shifted = mantissa << lowest % kDigitBits;
  const u64 low = shifted & ((1 << kDigitBits) - 1), high = shifted >> kDigitBits;
  u64* const to = words + captured_word_at(p, lowest / kDigitBits, 0);
  const bool negative = static_cast<int>(bits) < 0;
  if (low != 0) global_add(to, negative ? 0 - low : low);
  if (high != 0) global_add(to + captured_word_at(p, 1, 0), negative ? 0 - high : high);
}

// Sums the terms of an element that all scores of a tile read: first per thread, then per warp.
template <auto T>
struct TileSums {
  static constexpr int kCount = captures_along<T>(CaptureLine::tile);
  float sums[kCount > 0 ? kCount : 1] = {};

  // Receivers of the derivatives that score_captures() passes for one score: for any derivatives, for finite
  // derivatives only, and for any element.
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
  TANDEM_DEVICE static void add(const BackwardParams& p, float mod_input, const ModPlace& at, const Adds& adds) {
    if constexpr (kCount > 0)
      score_captures<T, CaptureLine::tile>(mod_input, at, static_cast<const ModifiedBackwardParams&>(p).mods.score,
                                           adds);
  }
  TANDEM_DEVICE void store(const BackwardParams& params, const ModPlace& at) const {
    const auto& p = static_cast<const ModifiedBackwardParams&>(params);
    if constexpr (kCount > 0) score_captures<T, CaptureLine::tile>(0, at, p.mods.score, Storing{*this, p.captured});
  }
};
struct NoSums {};
// Evaluates the scores of an iteration of the main kernel one by one.
template <auto T>
using ScoreSums = typename OneOf<T.captured_per_score, TileSums<T>, NoSums>::Type;

// The tile of an m_block and a block of keys; either may lie beyond the sequence.
template <auto T, int keys>
TANDEM_DEVICE RangePlace range_place_of(const SequenceCoords& s, int head, int m_block, int key_block) {
  const int q = m_block * T.tile_m, k = key_block * keys;
  return {range_of(s.sequence), range_of(head),    {q, q + T.tile_m - 1},
          {k, k + keys - 1},    range_of(s.q_len), range_of(s.k_len)};
}

// An argument of tile_captures() that adds nothing.
struct NoCaptures {
  template <int n, int tensor>
  TANDEM_DEVICE void add(float, i64) const {}
};
// sum: a thread's sum of dS, then the warp's. Lanes converge only in the branch that needs the sum. Otherwise ptxas
// inserts a convergence between the issues of products, which delays the products.
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

// Adds an iteration's dS to the gradients, by a warp of the main kernel. sum: the thread's sum of dS.
template <auto T, int keys>
TANDEM_DEVICE void add_tile(const BackwardParams& params, const SequenceCoords& sequence, int head, int m_block,
                            int key_block, float sum) {
  const auto& p = static_cast<const ModifiedBackwardParams&>(params);
  tile_captures<T>(range_place_of<T, keys>(sequence, head, m_block, key_block), p.mods.score,
                   TileCaptures{p.captured, sum});
}
