// From raw scores to probabilities on one tile of up to key_tile keys x kPanel queries: options, masks, online softmax.
//
// A tile is stored key by key, with queries in lanes. No step crosses lanes, so that a query's result does not depend
// on other queries. Scores are in natural units, as in standard attention. A row's largest score is subtracted before
// the product with log2 e, so that the largest probability is exactly 1 at any magnitude.
#pragma once

#include "cpu/kernels.h"
#include "cpu/mods.h"
#include "cpu/pack.h"
#include "problem/philox.h"

namespace tandem::cpu::TANDEM_TARGET {

// The query of each lane of a panel. Lanes beyond the last row repeat its query; their results are never stored.
struct PanelRows {
  int count;                                       // lanes that are rows
  int64_t query[kPanel], head[kPanel];             // row index within the sequence, query head
  int32_t key_begin[kPanel], key_end[kPanel];      // the keys that causal, window and the piece leave visible
  int32_t begin_min, begin_max, end_min, end_max;  // over the lanes
  float position[kPanel];                          // query + diagonal
  float slope[kPanel];                             // ALiBi
  float distance[kPanel];                          // ALiBi: distance from key 0
  int64_t key_distance;                            // ALiBi: distance of neighbouring keys

  // hides(): no lane sees any of keys [begin, end). shows(): every lane sees all of them.
  bool hides(int64_t begin, int64_t end) const { return end <= begin_min || begin >= end_max; }
  bool shows(int64_t begin, int64_t end) const { return begin >= begin_max && end <= end_min; }
};

inline void fill_rows(const Piece& piece, int64_t row, PanelRows* rows) {
  const Problem& p = *piece.problem;
  const Sequence& s = piece.sequence;
  rows->count = static_cast<int>(minimum(kPanel, piece.row_end - row));
  rows->begin_min = rows->end_min = INT32_MAX;
  rows->begin_max = rows->end_max = 0;
  int64_t first = s.diagonal;  // ALiBi's distance of query 0 from key 0
  rows->key_distance = 1;
  if (p.placed) {
    const tandem_place& place = p.places[piece.sequence_number];
    first = int64_t{place.first_query} + place.diagonal - place.first_key;
    rows->key_distance = place.stride;
  }
  int64_t query = row / piece.heads, of_group = row % piece.heads;
  for (int i = 0; i < kPanel; ++i) {
    if (i > 0 && i < rows->count && ++of_group == piece.heads) {  // beyond count the last row is repeated
      of_group = 0;
      ++query;
    }
    const int64_t head = piece.head_first + of_group;
    const int64_t at = query + s.diagonal;
    int64_t begin = piece.key_begin, end = piece.key_end;
    if (p.window_left != TANDEM_UNBOUNDED) begin = maximum(begin, at - p.window_left);
    if (p.window_right != TANDEM_UNBOUNDED) end = minimum(end, at + p.window_right + 1);
    begin = minimum(begin, piece.key_end);
    end = maximum(end, begin);
    rows->query[i] = query;
    rows->head[i] = head;
    rows->key_begin[i] = static_cast<int32_t>(begin);
    rows->key_end[i] = static_cast<int32_t>(end);
    rows->begin_max = static_cast<int32_t>(maximum(rows->begin_max, begin));
    rows->end_min = static_cast<int32_t>(minimum(rows->end_min, end));
    if (begin < end) {  // lanes without visible keys do not count
      rows->begin_min = static_cast<int32_t>(minimum(rows->begin_min, begin));
      rows->end_max = static_cast<int32_t>(maximum(rows->end_max, end));
    }
    rows->position[i] = static_cast<float>(at);
    if (p.alibi_slopes.present) {
      rows->distance[i] = static_cast<float>(first + query * rows->key_distance);
      const HeadView& a = p.alibi_slopes;
      const auto* slope = reinterpret_cast<const float*>(a.data) + s.batch_index * a.batch + head * a.head;
      rows->slope[i] = *slope;
    }
  }
}

// Returns true if scores are only the product times a positive number.
inline bool plain_scores(const Problem& p) {
  return p.softcap == 0 && p.softmax_scale > 0 && !p.bias.present && !p.alibi_slopes.present && !p.score_mod.present;
}

// ---- Bias -------------------------------------------------------------------------------------------------------

inline float bias_value(const BiasView& b, int64_t offset) {
  switch (b.dtype) {
    case DType::boolean: return reinterpret_cast<const uint8_t*>(b.data)[offset] != 0 ? 0.0f : -kInfinity;
    case DType::f32: return reinterpret_cast<const float*>(b.data)[offset];
    default: break;
  }
  // Converts one 16-bit value by the row converters, which support every target.
  float out[kLanes];
  if (b.dtype == DType::bf16) {
    load_row(reinterpret_cast<const BF16*>(b.data) + offset, 1, kLanes, out);
  } else {
    load_row(reinterpret_cast<const F16*>(b.data) + offset, 1, kLanes, out);
  }
  return out[0];
}

template <class T>
inline void bias_row(const BiasView& b, int64_t offset, int64_t count, int64_t padded, float* dst) {
  load_row(reinterpret_cast<const T*>(b.data) + offset, count, padded, dst);
}

// The bias of a tile: [key][kPanel], in scratch, which has 2 * kPanel * padded floats, padded = round_up(keys,
// max(kLanes, 4)).
inline const float* bias_tile(const Piece& piece, const PanelRows& rows, int64_t key, int64_t count, float* scratch) {
  const BiasView& b = piece.problem->bias;
  const int64_t batch = piece.sequence.batch_index;
  const int64_t padded = round_up(count, kLanes < 4 ? 4 : kLanes);
  for (int i = 0; i < kPanel; ++i) {
    float* dst = scratch + i * padded;
    const int64_t at =
        batch * b.stride[0] + rows.head[i] * b.stride[1] + rows.query[i] * b.stride[2] + key * b.stride[3];
    if (b.stride[3] == 1 && b.dtype == DType::f32) {
      bias_row<float>(b, at, count, padded, dst);
    } else if (b.stride[3] == 1 && b.dtype == DType::bf16) {
      bias_row<BF16>(b, at, count, padded, dst);
    } else if (b.stride[3] == 1 && b.dtype == DType::f16) {
      bias_row<F16>(b, at, count, padded, dst);
    } else {
      for (int64_t j = 0; j < count; ++j) dst[j] = bias_value(b, at + j * b.stride[3]);
    }
  }
  float* across = scratch + kPanel * padded;
  transpose(scratch, padded, kPanel, round_up(count, 4), across, kPanel);
  return across;
}

// The scores of kPanel rows and of keys [key, key + count): [key][stride].
struct ScoreTile {
  const Piece& piece;
  const PanelRows& rows;
  int64_t key, count;
  float* scores;
  int64_t stride;
};

// scores += bias.
inline void add_bias(ScoreTile t, float* scratch) {
  const float* bias = bias_tile(t.piece, t.rows, t.key, t.count, scratch);
  for (int64_t j = 0; j < t.count; ++j) {
    for (int h = 0; h < kPanel; h += kLanes) {
      float* s = t.scores + j * t.stride + h;
      store(hn::Add(load(bias + j * kPanel + h), load(s)), s);
    }
  }
}

// Scores are -inf where a boolean bias is false, whatever they were.
inline void hide_by_bias(ScoreTile t, float* scratch) {
  const float* bias = bias_tile(t.piece, t.rows, t.key, t.count, scratch);
  for (int64_t j = 0; j < t.count; ++j) {
    for (int h = 0; h < kPanel; h += kLanes) {
      float* s = t.scores + j * t.stride + h;
      const VF from = load(bias + j * kPanel + h);
      store(select(hn::Eq(from, hn::Zero(FTag())), load(s), from), s);
    }
  }
}

// ---- Scores -----------------------------------------------------------------------------------------------------

// A stored score times its unit is the natural score. Queries packed as floats contain softmax_scale, rounded once for
// each number; a factor of all scores would add the same rounding error to each. bfloat16 words cannot contain it.
struct ScoreUnit {
  double product;  // unit of the products of queries and keys
  double stored;   // unit of the scores that finish_scores() stores
  float log2;      // stored unit times log2 e, for exponents
};
inline ScoreUnit score_unit(const Problem& p, bool scaled_queries) {
  const double product = scaled_queries ? 1.0 : p.softmax_scale, stored = plain_scores(p) ? product : 1.0;
  return {product, stored, static_cast<float>(stored * 1.44269504088896340736)};
}

// The memory that options need in addition to a tile of scores; null without those options.
struct TileMemory {
  float* bias = nullptr;        // the layout that add_bias() expects
  float* slope = nullptr;       // output: d score / d (scaled product); null: not wanted
  float* unmodified = nullptr;  // receives scores as score_mod reads them; null: not wanted
  int32_t* visible = nullptr;   // [key][kPanel]: 1: visible, 0: hidden; null: all visible
  float* mods = nullptr;        // mod_floats()
};

inline ModTile mod_tile(const Piece& piece, const PanelRows& rows, int64_t key, int64_t count, int64_t stride,
                        float* scratch) {
  return {piece, rows.query, rows.head, kPanel, key, count, stride, scratch};
}

// Turns products into natural scores, up to the input of a score_mod.
inline void apply_options(ScoreTile tile, double unit, const TileMemory& memory) {
  const auto& [piece, rows, key, count, scores, stride] = tile;
  const Problem& p = *piece.problem;
  const VF cap = set(static_cast<float>(p.softcap));
  const VF scale = set(static_cast<float>(p.softcap == 0 ? unit : unit / p.softcap));
  for (int64_t j = 0; j < count; ++j) {
    const VF column = set(static_cast<float>((key + j) * rows.key_distance));
    for (int h = 0; h < kPanel; h += kLanes) {
      float* at = scores + j * stride + h;
      VF s = hn::Mul(load(at), scale);
      if (p.softcap != 0) {
        const VF t = tanh(s);
        s = hn::Mul(t, cap);
        if (memory.slope != nullptr) store(hn::NegMulAdd(t, t, set(1.0f)), memory.slope + j * stride + h);
      }
      if (p.alibi_slopes.present)
        s = hn::NegMulAdd(load(rows.slope + h), hn::Abs(hn::Sub(load(rows.distance + h), column)), s);
      store(s, at);
    }
  }
  if (p.bias.present && p.bias.dtype != DType::boolean) add_bias(tile, memory.bias);
}

// Turns products into masked scores in unit.stored. memory.visible has been filled.
inline void finish_scores(ScoreTile tile, ScoreUnit unit, const TileMemory& memory) {
  const auto& [piece, rows, key, count, scores, stride] = tile;
  const Problem& p = *piece.problem;
  if (!plain_scores(p)) apply_options(tile, unit.product, memory);
  if (p.score_mod.present) {
    for (int64_t j = 0; memory.unmodified != nullptr && j < count; ++j)
      std::memcpy(memory.unmodified + j * stride, scores + j * stride, kPanel * sizeof(float));
    modify_scores(mod_tile(piece, rows, key, count, stride, memory.mods), scores);
  }
  if (p.bias.present && p.bias.dtype == DType::boolean) hide_by_bias(tile, memory.bias);
  const VF hidden = set(-kInfinity);
  if (memory.visible != nullptr) {
    for (int64_t j = 0; j < count; ++j) {
      for (int h = 0; h < kPanel; h += kLanes) {
        const auto shown = hn::Ne(load(memory.visible + j * kPanel + h), hn::Zero(ITag()));
        float* at = scores + j * stride + h;
        store(select(hn::RebindMask(FTag(), shown), load(at), hidden), at);
      }
    }
  }
  if (!rows.shows(key, key + count)) {
    for (int64_t j = 0; j < count; ++j) {
      const VI column = hn::Set(ITag(), static_cast<int32_t>(key + j));
      for (int h = 0; h < kPanel; h += kLanes) {
        const auto before = hn::Lt(column, load(rows.key_begin + h));
        const auto inside = hn::AndNot(before, hn::Lt(column, load(rows.key_end + h)));
        float* at = scores + j * stride + h;
        store(select(hn::RebindMask(FTag(), inside), load(at), hidden), at);
      }
    }
  }
}

// ---- Dropout ----------------------------------------------------------------------------------------------------

// The factor of kept entries. Results are multiplied by the factor, because 16-bit probabilities would round it.
inline float keep_factor(const Problem& p) { return static_cast<float>(1.0 / (1.0 - p.dropout.p)); }

// Replaces the counters w of a panel's rows by their random words.
inline void draw_panel(const DropoutOptions& dropout, uint32_t (&w)[4][kPanel]) {
  auto key0 = static_cast<uint32_t>(dropout.seed), high = static_cast<uint32_t>(dropout.offset >> 32);
  uint32_t key1 = static_cast<uint32_t>(dropout.seed >> 32) + high;
  for (int round = 0; round < kDropoutRounds; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
    for (int i = 0; i < kPanel; ++i) {
      const uint64_t a = uint64_t{0xD2511F53u} * w[0][i], b = uint64_t{0xCD9E8D57u} * w[2][i];
      w[0][i] = static_cast<uint32_t>(b >> 32) ^ w[1][i] ^ key0;
      w[1][i] = static_cast<uint32_t>(b);
      w[2][i] = static_cast<uint32_t>(a >> 32) ^ w[3][i] ^ key1;
      w[3][i] = static_cast<uint32_t>(a);
    }
  }
}

// Sets factors[key][lane] to 0 (dropped) or 1 for keys [key, key + count), by Philox as tandem.h defines it. The
// compiler vectorises the loops over lanes.
inline void dropout_factors(const Piece& piece, const PanelRows& rows, int64_t key, int64_t count, float* factors,
                            int64_t stride) {
  const Problem& p = *piece.problem;
  tandem_place place{static_cast<int32_t>(piece.sequence_number), 0, 0, 1, 0, 0, 0, 0, static_cast<int32_t>(p.heads_q)};
  if (p.placed) place = p.places[piece.sequence_number];
  const uint32_t threshold = dropout_threshold(p.dropout.p);
  int64_t group = -1;
  uint32_t w[4][kPanel];
  for (int64_t j = 0; j < count; ++j) {
    const int64_t column = place.first_key + (key + j) * place.stride;
    if (column / kDropoutGroup != group) {
      group = column / kDropoutGroup;
      for (int i = 0; i < kPanel; ++i) {
        w[0][i] = static_cast<uint32_t>(group);
        w[1][i] = static_cast<uint32_t>(place.first_query + rows.query[i] * place.stride);
        w[2][i] = static_cast<uint32_t>(place.document * place.heads_q + place.first_head + rows.head[i]);
        w[3][i] = static_cast<uint32_t>(p.dropout.offset);
      }
      draw_panel(p.dropout, w);
    }
    const uint32_t* const words = w[dropout_word(column)];
    const int shift = dropout_shift(column);
    float* at = factors + j * stride;
    for (int i = 0; i < kPanel; ++i) at[i] = (words[i] >> shift & 255) < threshold ? 0.0f : 1.0f;
  }
}

// ---- Online softmax -----------------------------------------------------------------------------------------------

// Running state of a panel (Milakov and Gimelshein 2018), with FlashAttention-4's conditional rescaling. The reference
// maximum changes only when the true maximum exceeds it by more than 8 (a factor 2^8), which float32 can represent.
// Each lane decides separately. If no lane rescales, no output is multiplied.
struct SoftmaxState {
  float max[kPanel];      // reference maximum, a stored score; -inf: no visible key yet
  float sum[kPanel];      // sum of e^(score - max)
  float alpha[kPanel];    // factor of earlier sums, valid if update_max() returned true
  float largest[kPanel];  // stored score, by add_largest() where the caller wants it

  void clear() {
    for (int i = 0; i < kPanel; ++i) max[i] = largest[i] = -kInfinity, sum[i] = 0;
  }
};

constexpr float kRescaleThreshold = 8.0f;  // log2 units

// Updates the maximum by a tile's scores. factor: converts to log2 units. Returns true if alpha must be applied to the
// output.
inline bool update_max(const float* scores, int64_t stride, int64_t count, float factor, SoftmaxState* state) {
  VF m0 = set(-kInfinity), m1 = m0, m2 = m0, m3 = m0;
  int64_t j = 0;
  for (; j + 2 <= count; j += 2) {
    m0 = hn::Max(m0, load(scores + j * stride));
    m1 = hn::Max(m1, load(scores + j * stride + kLanes));
    m2 = hn::Max(m2, load(scores + (j + 1) * stride));
    m3 = hn::Max(m3, load(scores + (j + 1) * stride + kLanes));
  }
  for (; j < count; ++j) {
    m0 = hn::Max(m0, load(scores + j * stride));
    m1 = hn::Max(m1, load(scores + j * stride + kLanes));
  }
  bool rescale = false;
  for (int h = 0; h < kPanel; h += kLanes) {
    const VF tile = h == 0 ? hn::Max(m0, m2) : hn::Max(m1, m3);
    const VF old = load(state->max + h);
    const auto grown = hn::Gt(tile, hn::Add(old, set(kRescaleThreshold / factor)));
    if (hn::AllFalse(FTag(), grown)) {
      store(set(1.0f), state->alpha + h);
      continue;
    }
    rescale = true;
    const VF alpha = select(grown, exp2<6>(hn::Mul(hn::Sub(old, tile), set(factor))), set(1.0f));
    store(select(grown, tile, old), state->max + h);
    store(alpha, state->alpha + h);
    store(hn::Mul(load(state->sum + h), alpha), state->sum + h);
  }
  return rescale;
}

// Updates the largest score, because max may be below it. A NaN is kept.
inline void add_largest(const float* scores, int64_t stride, int64_t count, SoftmaxState* state) {
  for (int h = 0; h < kPanel; h += kLanes) {
    VF largest = load(state->largest + h);
    for (int64_t j = 0; j < count; ++j) {
      const VF s = load(scores + j * stride + h);
      largest = select(hn::Or(hn::Gt(s, largest), hn::IsNaN(s)), s, largest);
    }
    store(largest, state->largest + h);
  }
}

// The maximum that exp2 may subtract: 0 for a lane without visible keys, because -inf - -inf would be NaN.
inline VF finite_max(VF m) { return select(hn::Eq(m, set(-kInfinity)), hn::Zero(FTag()), m); }

// Sums probabilities of keys, lane by lane. For float32 (degree 6) the sums are compensated (Kahan 1965). If one key
// dominates a row, each remaining key may add less than half a unit of the sum, although all keys together add more.
template <int Degree>
class ProbabilitySum {
 public:
  void add(VF p) {
    if constexpr (Degree < 6) {
      sum_ = hn::Add(sum_, p);
    } else {
      const VF term = hn::Sub(p, excess_), sum = hn::Add(sum_, term);
      excess_ = hn::Sub(hn::Sub(sum, sum_), term);
      sum_ = sum;
    }
  }
  VF sum() const { return sum_; }

 private:
  VF sum_ = hn::Zero(FTag()), excess_ = hn::Zero(FTag());
};

// Computes scores -> e^(score - max) in place and adds them to the state's sums. factor: converts to log2 units. The
// subtraction comes first, so that the largest score gives exactly 1. The function is never inlined, for the reason at
// gemm_strided().
template <int Degree>
HWY_NOINLINE void exponentiate(float* scores, int64_t stride, int64_t count, float factor, SoftmaxState* state) {
  const VF f = set(factor);
  const VF max0 = finite_max(load(state->max)), max1 = finite_max(load(state->max + kLanes));
  const auto probability = [&](const float* s, VF max)
                               HWY_ATTR { return exp2<Degree>(hn::Mul(hn::Sub(load(s), max), f)); };
  ProbabilitySum<Degree> s0, s1, s2, s3;
  int64_t j = 0;
  for (; j + 2 <= count; j += 2) {
    float* a = scores + j * stride;
    float* b = a + stride;
    const VF p0 = probability(a, max0), p1 = probability(a + kLanes, max1);
    const VF p2 = probability(b, max0), p3 = probability(b + kLanes, max1);
    store(p0, a), store(p1, a + kLanes), store(p2, b), store(p3, b + kLanes);
    s0.add(p0), s1.add(p1), s2.add(p2), s3.add(p3);
  }
  for (; j < count; ++j) {
    float* a = scores + j * stride;
    const VF p0 = probability(a, max0), p1 = probability(a + kLanes, max1);
    store(p0, a), store(p1, a + kLanes);
    s0.add(p0), s1.add(p1);
  }
  store(hn::Add(load(state->sum), hn::Add(s0.sum(), s2.sum())), state->sum);
  store(hn::Add(load(state->sum + kLanes), hn::Add(s1.sum(), s3.sum())), state->sum + kLanes);
}

inline void multiply_tile(float* tile, const float* by, int64_t stride, int64_t count) {
  for (int64_t j = 0; j < count; ++j)
    for (int h = 0; h < kPanel; h += kLanes)
      store(hn::Mul(load(tile + j * stride + h), load(by + j * stride + h)), tile + j * stride + h);
}

#if TANDEM_HAS_BF16_DOT
// Returns (a, b) rounded to bfloat16, interleaved: word i is (a[i], b[i]).
inline VU pair_bf16(VF a, VF b) {
  static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i packed;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(packed) : "v"(a.raw), "v"(b.raw));
  return VU{_mm512_permutexvar_epi16(_mm512_loadu_si512(order), packed)};
}

// Returns the 2 * kLanes values (a, b) rounded to bfloat16, in order.
inline VU join_bf16(VF a, VF b) {
  __m512i packed;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(packed) : "v"(a.raw), "v"(b.raw));
  return VU{packed};
}

// Packs words of two keys for the product over keys: dst[count / 2][dst_stride].
inline void pair_keys(const float* tile, int64_t stride, int64_t count, uint32_t* dst, int64_t dst_stride) {
  for (int64_t j = 0; j < count; j += 2) {
    for (int h = 0; h < kPanel; h += kLanes) {
      const float* a = tile + j * stride + h;
      store(pair_bf16(load(a), j + 1 < count ? load(a + stride) : hn::Zero(FTag())), dst + j / 2 * dst_stride + h);
    }
  }
}
#endif

}  // namespace tandem::cpu::TANDEM_TARGET
