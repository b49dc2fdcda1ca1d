// What becomes of a product before the softmax: softcap, ALiBi, bias, and what a query may not see; and what becomes of
// a row's sum after the last step. By rows; how a thread's registers lie in them is the kernel's.
#pragma once
#include "ptx/warp.cuh"
#include "tile/work.cuh"

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

// Which query of the sequence a row of a tile is, of which head.
struct Row {
  int query, head;

  Row() = default;
  TANDEM_DEVICE Row(const ForwardParams& p, const Tile& t, int row) {
    const int shift = log2_of(p.together);
    query = row >> shift;
    head = (t.head << shift) + (row & (p.together - 1));
  }
};

// A row's scores in log2 units, from products. Beyond the tensor, where all is hidden, stands its last bias: a load
// that depends on nothing needs no branch, and branches for each element are what takes long to compile.
template <auto T>
struct Change {
  static constexpr int kBiasBytes = T.bias == Bias::boolean ? 1 : T.bias == Bias::f32 ? 4 : 2;
  float slope, position;
  const char* bias;  // the row's
  i64 step;          // bytes from one column of it to the next

  Change() = default;
  TANDEM_DEVICE Change(const ForwardParams& p, const Tile& t, const Row& row) {
    if constexpr (T.alibi) {
      slope = kLog2e * p.alibi_slopes[t.sequence * p.alibi_batch + row.head * p.alibi_head];
      position = static_cast<float>(row.query + diagonal_of(p, t));
    }
    if constexpr (T.bias != Bias::none) {
      const i64 at = t.batch * p.bias_batch + row.head * p.bias_head + min(row.query, p.seqlen_q - 1) * p.bias_row;
      bias = static_cast<const char*>(p.bias) + at * kBiasBytes;
      step = p.bias_column * kBiasBytes;
    }
  }
  TANDEM_DEVICE float operator()(float x, const ForwardParams& p, int column) const {
    if constexpr (T.softcap) {  // tanh to float's precision, where tanh.approx has eleven bits
      x = fmaf(-2 * p.softcap_log2, reciprocal(1.0f + exp2_approx(x * p.scale_softcap)), p.softcap_log2);
    } else {
      x *= p.scale_log2;
    }
    if constexpr (T.alibi) x -= slope * fabsf(position - static_cast<float>(column));
    if constexpr (T.bias != Bias::none) {
      const char* at = bias + min(column, p.seqlen_k - 1) * step;
      if constexpr (T.bias == Bias::boolean) {
        if (*at == 0) x = -kInfinity;
      } else {
        x += kLog2e * load_element<T.f16>(at, 0, T.bias == Bias::f32);
      }
    }
    return x;
  }
};

// The keys that a row sees: neither beyond the sequence nor outside the window.
struct Seen {
  int begin, end;
};
template <auto T>
TANDEM_DEVICE Seen seen_by(const ForwardParams& p, const Tile& t, const Row& row) {
  const int diagonal = diagonal_of(p, t);
  Seen seen;
  seen.end = T.right ? min(t.k_len, row.query + diagonal + p.window_right + 1) : t.k_len;
  seen.begin = T.left ? row.query + diagonal - p.window_left : 0;
  return seen;
}

// Of 32 columns, a bit for each of these. PTX ISA "bmsk".
TANDEM_DEVICE u32 columns_of(int begin, int count) {
  u32 bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(begin), "r"(count));
  return bits;
}
// x, or -infinity where bit n is not set. In PTX, since the compiler would ask for bit 0 in another way than for the
// others, for which there is one instruction to seven bits.
TANDEM_DEVICE float score_where(u32 bits, int n, float x) {
  float y;
  asm("{.reg .pred p; .reg .b32 bit;\n"
      "and.b32 bit, %2, %3; setp.ne.b32 p, bit, 0; selp.f32 %0, %1, %4, p;}"
      : "=f"(y)
      : "f"(x), "r"(bits), "r"(1u << n), "f"(-kInfinity));
  return y;
}

// Of a row whose exponentials, against shift, have this sum: what its result is multiplied by, 0 where it sees nothing,
// and its log-sum-exp.
struct RowEnd {
  float inverse, lse;
};
template <auto T>
TANDEM_DEVICE RowEnd end_of_row(const ForwardParams& p, const Row& row, bool used, float sum, float shift) {
  const bool nothing = sum == 0;
  float top = nothing ? -kInfinity : shift, factor = 1;
  if (p.sink) {
    const float sink = kLog2e * load_element<T.f16>(p.sink, row.head * p.sink_head, p.sink_is_f32);
    const float higher = fmaxf(top, sink);
    if (higher > -kInfinity) {
      factor = exp2_approx(top - higher);
      sum = sum * factor + exp2_approx(sink - higher);
      top = higher;
    }
  }
  return {used && !nothing ? factor / sum : 0.0f, used && sum != 0 ? kLn2 * (top + __log2f(sum)) : -kInfinity};
}
