// Interval arithmetic of an expression on the device: config/mod_range.h, and the functions that read memory. All lanes
// of a warp work on one block; src/score_mod/print.cpp prints the calls.
#pragma once
#include "config/mod_range.h"
#include "device/mod_functions.cuh"

// The positions of a block: one range per coordinate.
struct RangePlace {
  IntRange batch, head, q, k, seqlen_q, seqlen_k;
};

// The range of mask_mod()'s value, printed in addition to mask_mod().
template <auto T>
TANDEM_DEVICE IntRange mask_range(const RangePlace& at, const ModNames& names);
// This function is printed in addition to score_captures() if derivatives are constant and indices read no memory.
// Returns false if the tile may read several elements of a tensor. Otherwise calls captures.add() for the one element
// of each tensor.
template <auto T, class Captures>
TANDEM_DEVICE bool tile_captures(const RangePlace& at, const ModNames& names, const Captures& captures);

TANDEM_DEVICE IntRange union_over_lanes(IntRange a) {
#pragma unroll 1
  for (int d = 1; d < 32; d *= 2)
    a = union_of(a, IntRange{__shfl_xor_sync(~0u, a.low, d), __shfl_xor_sync(~0u, a.high, d)});
  return a;
}
TANDEM_DEVICE FloatRange union_over_lanes(FloatRange a) {
#pragma unroll 1
  for (int d = 1; d < 32; d *= 2)
    a = union_of(
        a, FloatRange{__shfl_xor_sync(~0u, a.low, d), __shfl_xor_sync(~0u, a.high, d), __any_sync(~0u, a.nan) != 0});
  return a;
}
TANDEM_DEVICE IntRange any_like(int) { return kAnyInt; }
TANDEM_DEVICE FloatRange any_like(float) { return kAnyFloat; }

// The range of all elements that indices in these ranges name, each clamped to its dimension. If elements are few, the
// lanes read them together.
template <ModElement element, class... Index>
TANDEM_DEVICE auto range_gather(const ModTensor& tensor, Index... indices) {
  constexpr int kRank = sizeof...(indices);
  const IntRange at[kRank + 1] = {indices..., {0, 0}};
  int first[kRank + 1], size[kRank + 1];
  i64 count = 1;
#pragma unroll
  for (int n = 0; n < kRank; ++n) {
    first[n] = min(max(at[n].low, 0), tensor.size[n] - 1);
    size[n] = min(max(at[n].high, 0), tensor.size[n] - 1) - first[n] + 1;
    count *= size[n];
    if (count > kRangeElements) break;
  }
  using Range = decltype(range_of(mod_load<element>(nullptr)));
  if (count > kRangeElements) {
    if constexpr (element == ModElement::boolean)
      return kAnyBool;
    else
      return any_like(decltype(mod_load<element>(nullptr)){});
  }
  Range range{};
#pragma unroll 1
  for (int i = threadIdx.x % 32, n = 0; n < count; i += 32, n += 32) {
    int rest = i < count ? i : 0;  // further lanes repeat the first element
    i64 offset = 0;
#pragma unroll
    for (int dim = kRank - 1; dim >= 0; --dim) {
      offset += (first[dim] + rest % size[dim]) * tensor.stride[dim];
      rest /= size[dim];
    }
    const Range one = range_of(mod_load<element>(static_cast<const char*>(tensor.data) + offset * size_of(element)));
    range = n == 0 ? one : union_of(range, one);
  }
  return union_over_lanes(range);
}
