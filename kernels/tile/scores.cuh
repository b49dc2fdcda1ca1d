// What becomes of a product before the softmax: softcap, ALiBi, bias, and what a query may not see.
//
// A thread has two rows of a fragment, and in each every register r at column 8 (r / 4) + r % 2 from its first.
#pragma once
#include "ptx/warp.cuh"
#include "tile/softmax.cuh"
#include "tile/work.cuh"

constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

TANDEM_DEVICE constexpr int column_of(int r) { return 8 * (r >> 2) + (r & 1); }

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

// tanh to float's precision, where tanh.approx has eleven bits.
TANDEM_DEVICE float tanh_of(float x) { return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2.0f * kLog2e * x)); }

// The two rows of a thread: which query of the sequence each is, of which head.
struct Rows {
  int query[2], head[2];

  TANDEM_DEVICE Rows(const ForwardParams& p, const Tile& t, int row) {
    const int shift = log2_of(p.together);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      query[i] = (row + 8 * i) >> shift;
      head[i] = (t.head << shift) + ((row + 8 * i) & (p.together - 1));
    }
  }
};

// Scores in log2 units from products.
template <ForwardTile T, int n>
TANDEM_DEVICE void change(float (&s)[n], const ForwardParams& p, const Tile& t, const Rows& rows, int column0) {
  float slope[2], position[2];
  i64 bias[2];
  const int diagonal = diagonal_of(p, t);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    position[i] = static_cast<float>(rows.query[i] + diagonal);
    if constexpr (T.alibi) slope[i] = kLog2e * p.alibi_slopes[t.sequence * p.alibi_batch + rows.head[i] * p.alibi_head];
    if constexpr (T.bias != Bias::none)
      bias[i] = t.batch * p.bias_batch + rows.head[i] * p.bias_head + rows.query[i] * p.bias_row;
  }
#pragma unroll
  for (int r = 0; r < n; ++r) {
    const int i = row_of(r), column = column0 + column_of(r);
    float x = s[r];
    if constexpr (T.softcap) {
      x = p.softcap * kLog2e * tanh_of(x * (p.scale / p.softcap));
    } else {
      x *= p.scale_log2;
    }
    if constexpr (T.alibi) x -= slope[i] * fabsf(position[i] - static_cast<float>(column));
    if constexpr (T.bias != Bias::none) {
      if (rows.query[i] < t.q_len && column < t.k_len) {
        const i64 at = bias[i] + column * p.bias_column;
        if constexpr (T.bias == Bias::boolean) {
          if (static_cast<const unsigned char*>(p.bias)[at] == 0) x = -kInfinity;
        } else {
          x += kLog2e * load_element<T.f16>(p.bias, at, T.bias == Bias::f32);
        }
      }
    }
    s[r] = x;
  }
}

// Hides what lies beyond the keys or outside the window.
template <ForwardTile T, int n>
TANDEM_DEVICE void hide(float (&s)[n], const ForwardParams& p, const Tile& t, const Rows& rows, int column0) {
  const int diagonal = diagonal_of(p, t);
  int begin[2], end[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    end[i] = T.right ? min(t.k_len, rows.query[i] + diagonal + p.window_right + 1) : t.k_len;
    begin[i] = T.left ? rows.query[i] + diagonal - p.window_left : 0;
  }
#pragma unroll
  for (int r = 0; r < n; ++r) {
    const int i = row_of(r), column = column0 + column_of(r);
    if (column >= end[i] || (T.left && column < begin[i])) s[r] = -kInfinity;
  }
}
