// Merges parts of an attention: lse = log(sum exp(part_lse)), out = sum exp(part_lse - lse) part_out.
//
// A few neighbouring lanes share a row (a query and head). Each lane has some columns and reads them once from every
// part. A result may be a part's tensor. A lane overwrites only elements that no other lane reads; it overwrites the
// lse after all lanes have read it.
#pragma once
#include "config/merge.h"
#include "config/result_row.h"
#include "device/chunk.cuh"
#include "device/row.cuh"
#include "prepost/lse_sums.cuh"

TANDEM_DEVICE i64 offset_of(const ResultRow& row, const StridedRows& t) {
  return row.batch * t.batch + row.row * t.row + row.head * t.head;
}

// Loads `count` numbers from an element on, or kColumns at once if everything is aligned.
TANDEM_DEVICE void load_columns(const void* data, ElementType type, i64 at, int count, bool aligned,
                                float (&x)[MergeParams::kColumns]) {
  struct alignas(8) Halves {
    u16 x[MergeParams::kColumns];
  };
  if (aligned && type == ElementType::f32) {
    const Chunk chunk = *reinterpret_cast<const Chunk*>(static_cast<const float*>(data) + at);
#pragma unroll
    for (int n = 0; n < MergeParams::kColumns; ++n) x[n] = __uint_as_float(chunk.x[n]);
  } else if (aligned) {
    const Halves halves = *reinterpret_cast<const Halves*>(static_cast<const u16*>(data) + at);
#pragma unroll
    for (int n = 0; n < MergeParams::kColumns; ++n)
      x[n] = type == ElementType::f16 ? to_float<true>(halves.x[n]) : to_float<false>(halves.x[n]);
  } else {
#pragma unroll
    for (int n = 0; n < MergeParams::kColumns; ++n) {
      if (n >= count) break;
      if (type == ElementType::boolean) {
        x[n] = static_cast<const unsigned char*>(data)[at + n] != 0 ? 1.0f : 0.0f;
        continue;
      }
      x[n] = type == ElementType::f16 ? load_element<true>(data, at + n, false)
                                      : load_element<false>(data, at + n, type == ElementType::f32);
    }
  }
}

TANDEM_DEVICE u16 to_half(float x, ElementType type) {
  u16 y;
  if (type == ElementType::f16) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  } else {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  }
  return y;
}

TANDEM_DEVICE void store_columns(void* data, ElementType type, i64 at, int count, bool aligned,
                                 const float (&x)[MergeParams::kColumns]) {
  if (aligned && type == ElementType::f32) {
    *reinterpret_cast<Chunk*>(static_cast<float*>(data) + at) = {
        {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])}};
    return;
  }
#pragma unroll
  for (int n = 0; n < MergeParams::kColumns; ++n) {
    if (n >= count) break;
    if (type == ElementType::f32) {
      static_cast<float*>(data)[at + n] = x[n];
    } else if (type == ElementType::boolean) {
      static_cast<unsigned char*>(data)[at + n] = x[n] != 0;
    } else {
      static_cast<u16*>(data)[at + n] = to_half(x[n], type);
    }
  }
}

TANDEM_DEVICE void merge_parts(const MergeParams& p) {
  constexpr int kColumns = MergeParams::kColumns, kInFlight = 2;  // parts whose loads are in flight
  const i64 rows = static_cast<i64>(p.batch) * p.seqlen * p.heads;
  const int lane = threadIdx.x & (p.lanes - 1), rows_of_block = MergeParams::kThreads / p.lanes;
#pragma unroll 1
  for (i64 first = static_cast<i64>(blockIdx.x) * rows_of_block; first < rows;
       first += static_cast<i64>(gridDim.x) * rows_of_block) {
    const i64 own = first + threadIdx.x / p.lanes;
    // Lanes beyond the last row read nothing, because another warp may be writing it.
    const bool has_row = own < rows;
    const ResultRow row(own, p.seqlen, p.heads);
    const auto part_lse = [&](int n) {
      return p.sum ? 0.0f : static_cast<const float*>(p.part_lse[n].data)[offset_of(row, p.part_lse[n])];
    };
    const float largest = has_row ? largest_lse(part_lse, p.parts) : -kInfinity;
    const bool sees = !(largest == -kInfinity);  // also true for NaN
    const float sum = sees ? sum_exp_lse(part_lse, p.parts, largest) : 0, inverse = p.sum ? 1 : sees ? 1 / sum : 0;
#pragma unroll 1
    for (int column = lane * kColumns; has_row && column < p.head_dim; column += p.lanes * kColumns) {
      const int count = min(kColumns, p.head_dim - column);
      float out[kColumns] = {};
#pragma unroll 1
      for (int begin = 0; begin < p.parts; begin += kInFlight) {
        float lse[kInFlight], x[kInFlight][kColumns] = {};
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) lse[n] = begin + n < p.parts ? part_lse(begin + n) : -kInfinity;
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
          if (lse[n] == -kInfinity) continue;
          const StridedRows& part = p.part_out[begin + n];
          load_columns(part.data, p.part_type[begin + n], offset_of(row, part) + column, count, p.aligned, x[n]);
        }
#pragma unroll
        for (int n = 0; n < kInFlight; ++n) {
          if (lse[n] == -kInfinity) continue;
          const float weight = expf(lse[n] - largest) * inverse;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) out[c] = fmaf(weight, x[n][c], out[c]);
        }
      }
      store_columns(p.out.data, p.out_type, offset_of(row, p.out) + column, count, p.aligned, out);
    }
    if (!p.lse.data) continue;
    __syncwarp();
    if (has_row && lane == 0)
      static_cast<float*>(p.lse.data)[offset_of(row, p.lse)] = sees ? largest + logf(sum) : -kInfinity;
  }
}
