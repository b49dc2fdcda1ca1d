// A row of a tile: its query and head, and its final sum.
#pragma once
#include "config/forward_addresses.h"
#include "device/coords.cuh"
#include "ptx/warp.cuh"

constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

template <bool f16>
TANDEM_DEVICE float to_float(u16 x) {
  if constexpr (!f16) return __uint_as_float(static_cast<u32>(x) << 16);
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
template <bool f16>
TANDEM_DEVICE float load_element(const void* base, i64 offset, bool is_f32) {
  return is_f32 ? static_cast<const float*>(base)[offset] : to_float<f16>(static_cast<const u16*>(base)[offset]);
}

// The query of the sequence and the head of a row of a tile.
struct Row {
  int query, head;

  Row() = default;
  TANDEM_DEVICE Row(const ForwardParams& p, const TileCoords& t, int row) {
    const int pack_shift = log2_of(p.pack_gqa);
    query = row >> pack_shift;
    head = (t.head << pack_shift) + (row & (p.pack_gqa - 1));
  }
};

// The final values of a row: the factor of its result (0 without visible keys) and its log-sum-exp.
struct RowFinal {
  float inverse, lse;
};
// sum: of exponentials relative to row_max. used: the row is a query of the sequence. first_split: a function; only the
// first split has the sink.
template <auto T, class FirstSplit>
TANDEM_DEVICE RowFinal finalize_row(const ForwardParams& p, const Row& row, bool used, float sum, float row_max,
                                    const FirstSplit& first_split) {
  const bool nothing = sum == 0;
  float top = nothing ? -kInfinity : row_max, alpha = 1;
  if (p.sink && first_split()) {
    const float sink = kLog2e * load_element<T.options.f16>(p.sink, row.head * p.sink_head, p.sink_is_f32);
    const float higher = fmaxf(top, sink);
    if (higher > -kInfinity) {
      alpha = exp2_approx(top - higher);
      sum = sum * alpha + exp2_approx(sink - higher);
      top = higher;
    }
  }
  return {used && !nothing ? alpha / sum : 0.0f, used && sum != 0 ? kLn2 * (top + __log2f(sum)) : -kInfinity};
}

TANDEM_DEVICE void store_lse(const ForwardParams& p, const TileCoords& t, const Row& row, float lse) {
  p.lse[lse_at(p, t, row.query, row.head)] = lse;
}
// T.device_splits: stores the lse of a split.
TANDEM_DEVICE void store_split_lse(const ForwardParams& p, const TileCoords& t, const Row& row, float lse) {
  p.split.row_lse[split_result_at(p, t.split_row, row.query, row.head)] = lse;
}
// Stores the lse of a work tile's row if the row has a place: a split's result, or a result that the caller wants.
template <auto T>
TANDEM_DEVICE void store_work_lse(const ForwardParams& p, const TileCoords& t, int work, const Row& row, float lse) {
  if (T.device_splits && t.split_row >= 0) {
    if (row.query < t.q_len) store_split_lse(p, t, row, lse);
  } else if (p.lse && row.query < t.q_rows) {
    store_lse(p, result_coords<T>(p, t, work), row, lse);
  }
}
