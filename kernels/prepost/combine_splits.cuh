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
TANDEM_DEVICE void store_columns(void* to, bool is_f32, i64 at, const float (&x)[kCombineColumns]) {
  struct alignas(8) Packed {
    u32 x[kCombineColumns / 2];
  };
  static_assert(kCombineColumns == 4);
  if (is_f32) {
    *reinterpret_cast<Chunk*>(static_cast<float*>(to) + at) = {
        {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])}};
  } else {
    *reinterpret_cast<Packed*>(static_cast<u16*>(to) + at) = {{pack<T>(x[0], x[1]), pack<T>(x[2], x[3])}};
  }
}

// The 16-byte loads of a lane that are in flight together.
constexpr int kLoadsAtOnce = 8;

// The splits of a row of the result (a query and head), and the row.
struct SplitResults {
  const float *out, *lse;      // the first split's
  i64 out_stride, lse_stride;  // between splits
  int count;
  void* to;
  i64 to_row;
  float* to_lse;  // or null
};

// The n-th row of a result whose every tile is split.
template <auto T>
TANDEM_DEVICE bool find_split_row(const ForwardParams& p, i64 n, SplitResults* row) {
  const SplitParams& split = p.split;
  const int rows = p.cu_seqlens_q ? p.total_q : p.seqlen_q;
  if (n >= static_cast<i64>(split.batches) * rows * p.heads_q) return false;
  const SplitRow at(n, rows, p.heads_q);
  if (!has_sequence<T>(p, static_cast<int>(at.row))) return false;
  row->out = static_cast<const float*>(p.out_data) + at.batch * p.out_batch + at.row * p.out_row + at.head * p.out_head;
  row->lse = p.lse + at.batch * p.lse_batch + at.row * p.lse_row + at.head * p.lse_head;
  row->out_stride = split.batches * p.out_batch;
  row->lse_stride = split.batches * p.lse_batch;
  row->count = split.count;
  row->to = split.out;
  row->to_row = combined_out_at(split, at);
  row->to_lse = split.lse ? split.lse + combined_lse_at(split, at) : nullptr;
  return true;
}

// T.device_splits: the n-th row that a split sequence may have. Rows beyond the used queries get the result of no
// splits, because the tile of a split does not store them.
template <auto T>
TANDEM_DEVICE bool find_device_split_row(const ForwardParams& p, i64 n, SplitResults* row) {
  const SplitParams& split = p.split;
  const SplitRow at(n, split.queries, p.heads_q);
  if (at.batch >= p.batch) return false;
  const int first_row = split.first_rows[at.batch], query = static_cast<int>(at.row);
  if (first_row < 0) return false;
  const TileCoords sequence = varlen_coords(p, static_cast<int>(at.batch));
  if (query >= sequence.q_rows) return false;
  const SplitRange splits = split_range<T>(p, sequence);
  const i64 first = split_result_at(p, first_row, query, at.head);
  row->lse_stride = static_cast<i64>(sequence.q_len) * p.heads_q;
  row->out_stride = row->lse_stride * p.head_dim_v;
  row->lse = split.row_lse + first;
  row->out = split.row_out + first * p.head_dim_v;
  row->count = query < sequence.q_len ? splits.end - splits.begin : 0;
  row->to = p.out_data;
  row->to_row = out_row_at(p, sequence, query, at.head);
  row->to_lse = p.lse ? p.lse + lse_at(p, sequence, query, at.head) : nullptr;
  return true;
}

// Stores the columns of a lane: kChunks chunks of kCombineColumns columns at a time, which are 16 bytes of a float32
// row. The plan aligns all rows to 16 bytes.
template <auto T, int kChunks, class Lse>
TANDEM_DEVICE void combine_columns(const ForwardParams& p, const SplitResults& row, int lane, const Lse& lse,
                                   float largest, float inverse) {
  constexpr int kSplits = kLoadsAtOnce / kChunks;
  const int step = p.split.lanes * kCombineColumns;  // columns between two chunks of a lane
#pragma unroll 1
  for (int begin = lane * kCombineColumns; begin < p.head_dim_v; begin += kChunks * step) {
    float out[kChunks][kCombineColumns] = {};
#pragma unroll 1
    for (int first = 0; first < row.count; first += kSplits) {
      Chunk x[kSplits][kChunks];
      float part[kSplits];
#pragma unroll
      for (int i = 0; i < kSplits; ++i) part[i] = first + i < row.count ? lse(first + i) : -kInfinity;
#pragma unroll
      for (int i = 0; i < kSplits; ++i) {
        if (part[i] == -kInfinity) continue;
        const float* const from = row.out + (first + i) * row.out_stride + begin;
#pragma unroll
        for (int j = 0; j < kChunks; ++j)
          x[i][j] = begin + j * step < p.head_dim_v ? *reinterpret_cast<const Chunk*>(from + j * step) : Chunk{};
      }
#pragma unroll
      for (int i = 0; i < kSplits; ++i) {
        if (part[i] == -kInfinity) continue;
        const float weight = expf(part[i] - largest) * inverse;
#pragma unroll
        for (int j = 0; j < kChunks; ++j)
#pragma unroll
          for (int c = 0; c < kCombineColumns; ++c) out[j][c] = fmaf(weight, __uint_as_float(x[i][j].x[c]), out[j][c]);
      }
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j)
      if (begin + j * step < p.head_dim_v)
        store_columns<T>(row.to, p.split.f32_out, row.to_row + begin + j * step, out[j]);
  }
}

template <auto T>
TANDEM_DEVICE void combine_splits(const ForwardParams& p) {
  const SplitParams& split = p.split;
  const int lane = threadIdx.x & (split.lanes - 1), rows_of_block = kCombineThreads / split.lanes;
  const i64 own = static_cast<i64>(blockIdx.x) * rows_of_block + threadIdx.x / split.lanes;
  grid_dependency_wait();
  SplitResults row;
  if (!(T.device_splits ? find_device_split_row<T>(p, own, &row) : find_split_row<T>(p, own, &row))) return;
  const auto lse = [&](int n) { return row.lse[n * row.lse_stride]; };
  const float largest = largest_lse(lse, row.count);
  const bool sees = !(largest == -kInfinity);  // true for NaN
  const float sum = sees ? sum_exp_lse(lse, row.count, largest) : 0, inverse = sees ? 1 / sum : 0;
  if (split.lanes <= kFewCombineLanes) {
    combine_columns<T, 4>(p, row, lane, lse, largest, inverse);
  } else {
    combine_columns<T, 1>(p, row, lane, lse, largest, inverse);
  }
  if (row.to_lse && lane == 0) *row.to_lse = sees ? largest + logf(sum) : -kInfinity;
}
