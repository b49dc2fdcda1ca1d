// Merges the splits of a forward: lse = log(sum exp(lse_n)), out = sum exp(lse_n - lse) out_n. The sums run from the
// first split to the last. The first split's lse contains the sink.
//
// A split whose lse is -infinity has no visible keys, and its out has no weight. Neighbouring lanes share a row (a
// query and head). If there are few rows, several CTAs share a row, and copy all splits to shared memory at once. Code
// is short, because instructions that are not cached cost more time than the sums.
#pragma once
#include "config/forward_addresses.h"
#include "device/chunk.cuh"
#include "device/pack.cuh"
#include "device/row.cuh"
#include "prepost/lse_sums.cuh"
#include "ptx/base.cuh"
#include "ptx/cp_async.cuh"
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
  const ResultRow at(n, rows, p.heads_q);
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
  const ResultRow at(n, split.queries, p.heads_q);
  if (at.batch >= p.batch) return false;
  const int query = static_cast<int>(at.row);
  const TileCoords sequence = varlen_coords(p, static_cast<int>(at.batch));
  const SplitRange splits = split_range<T>(p, sequence);
  if (query >= sequence.q_rows || splits.count() == 1) return false;
  const i64 first = split_result_at(p, first_split_row(split, sequence.sequence), query, at.head);
  row->lse_stride = static_cast<i64>(sequence.q_len) * p.heads_q;
  row->out_stride = row->lse_stride * p.head_dim_v;
  row->lse = split.row_lse + first;
  row->out = split.row_out + first * p.head_dim_v;
  row->count = query < sequence.q_len ? splits.count() : 0;
  row->to = p.out_data;
  row->to_row = out_row_at(p, sequence, query, at.head);
  row->to_lse = p.lse ? p.lse + lse_at(p, sequence, query, at.head) : nullptr;
  return true;
}

// Merges a row by neighbouring lanes. Each lane has every n-th chunk of kCombineColumns columns, which are 16 bytes of
// a float32 row, and reads it once from every split. The plan aligns all rows to 16 bytes. The loads of kChunks chunks
// of kSplits splits are in flight together.
template <auto T, int kChunks, int kSplits>
TANDEM_DEVICE void combine_by_lanes(const ForwardParams& p, const SplitResults& row) {
  const int lane = threadIdx.x & (p.split.lanes - 1);
  const int step = p.split.lanes * kCombineColumns;  // columns between two chunks of a lane
  const auto lse = [&](int n) { return row.lse[n * row.lse_stride]; };
  const float largest = largest_lse(lse, row.count);
  const bool sees = !(largest == -kInfinity);  // true for NaN
  const float sum = sees ? sum_exp_lse(lse, row.count, largest) : 0, inverse = sees ? 1 / sum : 0;
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
  if (row.to_lse && lane == 0) *row.to_lse = sees ? largest + logf(sum) : -kInfinity;
}

struct CombineShared {
  float out[kCombineThreads * kCombineCtaColumns];  // some splits
  float weight[kCombineThreads];                    // their weights; negative: none
  float largest[kCombineThreads / 32];
};

// The largest lse of all threads' splits, or NaN if one is NaN or +infinity.
TANDEM_DEVICE float largest_of_cta(CombineShared& shared, const SplitResults& row) {
  float largest = -kInfinity;
#pragma unroll 1
  for (int n = threadIdx.x; n < row.count; n += kCombineThreads) {
    const float lse = row.lse[n * row.lse_stride];
    largest = fmaxf(largest, lse < kInfinity ? lse : kInfinity);
  }
  for (int d = 1; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = largest;
  __syncthreads();
  for (const float other : shared.largest) largest = fmaxf(largest, other);
  return largest < kInfinity ? largest : __uint_as_float(0x7fffffffu);
}

// Merges kCombineCtaColumns columns of a row by a CTA, as many splits at a time as it has threads.
template <auto T>
TANDEM_DEVICE void combine_by_cta(const ForwardParams& p, const SplitResults& row, int first_column) {
  constexpr int kColumns = kCombineCtaColumns, kChunks = kColumns / kCombineColumns;
  __shared__ alignas(16) CombineShared shared;
  const int columns = min(kColumns, p.head_dim_v - first_column);
  const auto copy = [&](int first) {
    const int chunk = threadIdx.x % kChunks * kCombineColumns;
#pragma unroll 1
    for (int n = threadIdx.x / kChunks; n < min(kCombineThreads, row.count - first); n += kCombineThreads / kChunks)
      if (chunk < columns)
        cp_async_16(shared_address(shared.out + n * kColumns + chunk),
                    row.out + (first + n) * row.out_stride + first_column + chunk);
    cp_async_commit();
  };
  copy(0);
  const float largest = largest_of_cta(shared, row);
  const bool sees = !(largest == -kInfinity);  // true for NaN
  float sum = 0;
#pragma unroll 1
  for (int first = 0; sees && first < row.count; first += kCombineThreads) {
    const int n = first + threadIdx.x;
    shared.weight[threadIdx.x] = n < row.count ? expf(row.lse[n * row.lse_stride] - largest) : 0;
    __syncthreads();
    const int end = min(kCombineThreads, row.count - first);
#pragma unroll 4
    for (int i = 0; i < end; ++i) sum += shared.weight[i];
    __syncthreads();
  }
  const float inverse = sees ? 1 / sum : 0;
  float out = 0;
#pragma unroll 1
  for (int first = 0; first < row.count; first += kCombineThreads) {
    const int n = first + threadIdx.x, end = min(kCombineThreads, row.count - first);
    const float lse = n < row.count ? row.lse[n * row.lse_stride] : -kInfinity;
    shared.weight[threadIdx.x] = lse == -kInfinity ? -1 : expf(lse - largest) * inverse;
    cp_async_wait<0>();
    __syncthreads();
    if (threadIdx.x < columns) {
#pragma unroll 4
      for (int i = 0; i < end; ++i) {
        const float weight = shared.weight[i];
        if (!(weight < 0)) out = fmaf(weight, shared.out[i * kColumns + threadIdx.x], out);
      }
    }
    __syncthreads();
    copy(first + kCombineThreads);
  }
  const i64 to = row.to_row + first_column + threadIdx.x;
  if (threadIdx.x < columns) {
    if (p.split.f32_out) {
      static_cast<float*>(row.to)[to] = out;
    } else {
      static_cast<u16*>(row.to)[to] = static_cast<u16>(pack<T>(out, 0));
    }
  }
  if (row.to_lse && first_column + threadIdx.x == 0) *row.to_lse = sees ? largest + logf(sum) : -kInfinity;
}

template <auto T>
TANDEM_DEVICE void combine_splits(const ForwardParams& p) {
  const bool by_cta = p.split.lanes == kCombineThreads;
  const u32 ctas = by_cta ? (p.head_dim_v + kCombineCtaColumns - 1) / kCombineCtaColumns : 1;  // per row
  const i64 own = (static_cast<i64>(blockIdx.x / ctas) * kCombineThreads + threadIdx.x) / p.split.lanes;
  grid_dependency_wait();
  SplitResults row;
  if (!(T.device_splits ? find_device_split_row<T>(p, own, &row) : find_split_row<T>(p, own, &row))) return;
  if (by_cta) {
    combine_by_cta<T>(p, row, blockIdx.x % ctas * kCombineCtaColumns);
  } else if (p.split.lanes <= kFewCombineLanes) {
    combine_by_lanes<T, 4, 2>(p, row);
  } else {
    combine_by_lanes<T, 1, 8>(p, row);
  }
}
