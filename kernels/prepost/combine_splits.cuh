// Merges the splits of a forward: lse = log(sum exp(lse_n)), out = sum exp(lse_n - lse) out_n. The sums run from the
// first split to the last. The first split's lse contains the sink.
//
// A few neighbouring lanes share a row (a query and head). Each lane has some columns and reads them once from every
// split. A split whose lse is -infinity has no visible keys, and its out is not read.
#pragma once
#include "config/forward_addresses.h"
#include "device/chunk.cuh"
#include "device/pack.cuh"
#include "device/row.cuh"
#include "prepost/lse_sums.cuh"
#include "ptx/base.cuh"
#include "ptx/warp.cuh"

// Rows of packed tensors that belong to no sequence stay as they are.
template <auto T>
TANDEM_DEVICE bool has_sequence(const ForwardParams& p, int row) {
  if (!T.options.varlen || !p.cu_seqlens_q) return true;
  const int first = clamp(index_at(p.cu_seqlens_q, p.cu_seqlens_q_stride, 0), 0, p.total_q);
  const int end = clamp(index_at(p.cu_seqlens_q, p.cu_seqlens_q_stride, p.batch), first, p.total_q);
  return row >= first && row < end;
}

template <auto T>
TANDEM_DEVICE void store_columns(const SplitParams& split, i64 at, const float (&x)[kCombineColumns]) {
  struct alignas(8) Packed {
    u32 x[kCombineColumns / 2];
  };
  static_assert(kCombineColumns == 4);
  if (split.f32_out) {
    *reinterpret_cast<Chunk*>(static_cast<float*>(split.out) + at) = {
        {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])}};
  } else {
    *reinterpret_cast<Packed*>(static_cast<u16*>(split.out) + at) = {{pack<T>(x[0], x[1]), pack<T>(x[2], x[3])}};
  }
}

// The splits whose loads are in flight together.
constexpr int kSplitsAtOnce = 8;

// A lane has kCombineColumns columns at a time, which are 16 bytes of a float32 row. The plan aligns all rows to 16
// bytes.
template <auto T>
TANDEM_DEVICE void combine_splits(const ForwardParams& p) {
  const SplitParams& split = p.split;
  const int lane = threadIdx.x & (split.lanes - 1), rows_of_block = kCombineThreads / split.lanes;
  const int rows = p.cu_seqlens_q ? p.total_q : p.seqlen_q;
  const i64 all = static_cast<i64>(split.batches) * rows * p.heads_q;
  const i64 own = static_cast<i64>(blockIdx.x) * rows_of_block + threadIdx.x / split.lanes;
  grid_dependency_wait();
  if (own >= all) return;
  const SplitRow at(own, rows, p.heads_q);
  if (!has_sequence<T>(p, static_cast<int>(at.row))) return;
  const float* const first_lse = p.lse + at.batch * p.lse_batch + at.row * p.lse_row + at.head * p.lse_head;
  const auto lse = [&](int n) { return first_lse[n * (split.batches * p.lse_batch)]; };
  const float largest = largest_lse(lse, split.count);
  const bool sees = !(largest == -kInfinity);  // true for NaN
  const float sum = sees ? sum_exp_lse(lse, split.count, largest) : 0, inverse = sees ? 1 / sum : 0;
  const float* const from =
      static_cast<const float*>(p.out_data) + at.batch * p.out_batch + at.row * p.out_row + at.head * p.out_head;
  const i64 to = combined_out_at(split, at);
#pragma unroll 1
  for (int column = lane * kCombineColumns; column < p.head_dim_v; column += split.lanes * kCombineColumns) {
    float out[kCombineColumns] = {};
#pragma unroll 1
    for (int first = 0; first < split.count; first += kSplitsAtOnce) {
      Chunk x[kSplitsAtOnce];
      float part[kSplitsAtOnce];
#pragma unroll
      for (int i = 0; i < kSplitsAtOnce; ++i) part[i] = first + i < split.count ? lse(first + i) : -kInfinity;
#pragma unroll
      for (int i = 0; i < kSplitsAtOnce; ++i) {
        if (part[i] == -kInfinity) continue;
        x[i] = *reinterpret_cast<const Chunk*>(from + (first + i) * (split.batches * p.out_batch) + column);
      }
#pragma unroll
      for (int i = 0; i < kSplitsAtOnce; ++i) {
        if (part[i] == -kInfinity) continue;
        const float weight = expf(part[i] - largest) * inverse;
#pragma unroll
        for (int c = 0; c < kCombineColumns; ++c) out[c] = fmaf(weight, __uint_as_float(x[i].x[c]), out[c]);
      }
    }
    store_columns<T>(split, to + column, out);
  }
  if (split.lse && lane == 0) split.lse[combined_lse_at(split, at)] = sees ? largest + logf(sum) : -kInfinity;
}
