// The forward for a few queries over many keys. Such a forward is memory-bound, so that keys and values are read once,
// without packing.
//
// Lanes run along head_dim. Scores use the [keys][panel] tile of the tiled forward, so that both share the code of
// options, masks and softmax. Long key ranges are cut into parts by the scheduler; combine() joins them in order.
#pragma once

#include "cpu/forward.h"

namespace tandem::cpu::TANDEM_TARGET {

template <class T>
inline VF widen_tail(const T* p, int64_t n) {
  T tail[kLanes] = {};
  std::memcpy(static_cast<void*>(tail), p, static_cast<size_t>(n) * sizeof(T));
  return widen(tail);
}

// Reads rows of keys or values in order. A prefetch of the row about 8 KB ahead keeps as many reads in flight as the
// memory supports. Hardware prefetching alone reaches two thirds of that rate.
template <class T>
struct Stream {
  uintptr_t row_bytes, ahead;  // possibly past the end: a prefetch touches nothing
  int64_t rows_ahead = 0;      // pages: the row's distance in the list of rows

  Stream(const Problem& p, const View& view, int64_t n) {
    constexpr uintptr_t kAheadBytes = 8192;
    row_bytes = static_cast<uintptr_t>(n) * sizeof(T);
    const uintptr_t rows = (kAheadBytes - 1) / row_bytes + 1;
    ahead = rows * static_cast<uintptr_t>(view.row) * sizeof(T);
    if (!p.page_table.present) return;
    // Twice as far, because hardware prefetching stops at the end of a page.
    rows_ahead = minimum(static_cast<int64_t>(rows) * 2, kForwardKeys);
    ahead = 0;
  }
  void prefetch(const T* const* row) const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(row[rows_ahead]) + ahead;
    for (uintptr_t byte = 0; byte < row_bytes; byte += 64)
      __builtin_prefetch(reinterpret_cast<const void*>(address + byte), 0, 2);
  }
};

// Rows of floats at intervals of `stride`.
template <class Float>
struct FloatRows {
  Float* data;
  int64_t stride;
};

// Values where they lie, n columns each.
template <class T>
struct ValueRows {
  const T* const* rows;
  int64_t count, n;
};

// The position of the score of a key and a row.
struct DecodeLayout {
  int64_t key, row;
};
constexpr DecodeLayout kQueriesInLanes{kPanel, 1}, kKeysInLanes{1, kForwardKeys};

// Computes scores[key][row] = q[row] . k[key] for R rows and up to 4 keys.
template <class T, int R>
inline void dot_rows(FloatRows<const float> q, const T* const* keys, int count, int64_t n, DecodeLayout at,
                     float* scores) {
  for (int j = 0; j < count; ++j) {
    VF acc[R];
    for (int r = 0; r < R; ++r) acc[r] = hn::Zero(FTag());
    int64_t c = 0;
    for (; c + kLanes <= n; c += kLanes) {
      const VF x = widen(keys[j] + c);
      for (int r = 0; r < R; ++r) acc[r] = hn::MulAdd(x, load(q.data + r * q.stride + c), acc[r]);
    }
    if (c < n) {
      const VF x = widen_tail(keys[j] + c, n - c);
      for (int r = 0; r < R; ++r) acc[r] = hn::MulAdd(x, load(q.data + r * q.stride + c), acc[r]);
    }
    for (int r = 0; r < R; ++r) scores[j * at.key + r * at.row] = hn::GetLane(hn::SumOfLanes(FTag(), acc[r]));
  }
}

// Computes scores[row][key] = q[row] . key for R rows and kLanes keys in lanes: keys is [n][kLanes].
template <int R>
inline void score_block(const float* q, int64_t q_stride, const float* keys, int64_t n, float* scores) {
  VF acc[R];
  for (int r = 0; r < R; ++r) acc[r] = hn::Zero(FTag());
  for (int64_t c = 0; c < n; ++c) {
    const VF x = load(keys + c * kLanes);
    for (int r = 0; r < R; ++r) acc[r] = hn::MulAdd(x, set(q[r * q_stride + c]), acc[r]);
  }
  for (int r = 0; r < R; ++r) store(acc[r], scores + r * kForwardKeys);
}

// Columns [first, first + V * kLanes) of R rows of o += sum over keys of p[key] * values[key][...]. stream: null, or of
// the values.
template <class T, int R, int V>
inline void add_values(const float* p, DecodeLayout at, ValueRows<T> values, const Stream<T>* stream, int64_t first,
                       FloatRows<float> o) {
  VF acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < V; ++i) acc[r][i] = load(o.data + r * o.stride + first + i * kLanes);
  const bool whole = first + V * kLanes <= values.n;
  for (int64_t j = 0; j < values.count; ++j) {
    const T* v = values.rows[j] + first;
    if (stream != nullptr) stream->prefetch(values.rows + j);
    for (int i = 0; i < V; ++i) {
      const int64_t left = values.n - first - i * kLanes;
      const VF y = whole || left >= kLanes ? widen(v + i * kLanes) : widen_tail(v + i * kLanes, left);
      for (int r = 0; r < R; ++r) acc[r][i] = hn::MulAdd(y, set(p[j * at.key + r * at.row]), acc[r][i]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < V; ++i) store(acc[r][i], o.data + r * o.stride + first + i * kLanes);
}

// update_max and exponentiate for the row of one lane, with keys in lanes.
template <int Degree>
inline bool softmax_of_row(float* scores, int64_t count, int lane, SoftmaxState* state) {
  for (int64_t j = count; j < round_up(count, kLanes); ++j) scores[j] = -kInfinity;
  VF m = set(-kInfinity);
  for (int64_t j = 0; j < count; j += kLanes) m = hn::Max(m, load(scores + j));
  const float tile = hn::GetLane(hn::MaxOfLanes(FTag(), m)), old = state->max[lane];
  const bool grown = tile > old + kRescaleThreshold / kLog2e;
  state->alpha[lane] = grown ? exp2f((old - tile) * kLog2e) : 1.0f;
  state->max[lane] = grown ? tile : old;
  const VF max = finite_max(set(state->max[lane]));
  ProbabilitySum<Degree> sum;
  for (int64_t j = 0; j < count; j += kLanes) {
    const VF p = exp2<Degree>(hn::Mul(hn::Sub(load(scores + j), max), set(kLog2e)));
    store(p, scores + j);
    sum.add(p);
  }
  state->sum[lane] = state->sum[lane] * state->alpha[lane] + hn::GetLane(hn::SumOfLanes(FTag(), sum.sum()));
  return grown;
}

// Scaled queries of a piece of few rows, as floats, and memory for their products with keys.
struct StreamedRows {
  int64_t stride;  // floats between queries
  float* q;
  float *key_rows, *keys;  // kLanes keys as floats: [key][stride], [stride][kLanes]
  float* across;           // [row][kForwardKeys]

  StreamedRows(const Problem& p, Arena& a) : stride(round_up(p.head_dim, kLanes)) {
    q = a.take<float>(kStreamedRows * stride);
    key_rows = a.take<float>(kLanes * stride);
    keys = a.take<float>(kLanes * stride);
    across = a.take<float>(kStreamedRows * kForwardKeys);
  }

  // rows: the number in the whole piece.
  template <class T>
  void load(const Problem& p, int64_t row, const T* query) const {
    load_row(query, p.head_dim, stride, q + row * stride);
    scale_row(q + row * stride, stride, p.softmax_scale);
  }
};

// Keys lie in lanes if more than a few rows share them: transposing keys costs less than a sum over lanes per score.
// The choice sets the order of a score's sum. The choice depends only on the rows of the sequence, and the backward
// makes the same choice.
inline bool streams_across(const Piece& piece) {
  return kLanes >= 4 && piece.streamed_rows >= 4 && piece.streamed_rows * kLanes >= piece.problem->head_dim;
}

// Processes up to kForwardKeys keys in the caller's memory.
template <class T>
struct StreamedKeys {
  const T* const* rows;
  const Stream<T>& stream;
  int64_t count, head_dim;
};

template <class T>
inline void scores_by_key(const StreamedRows& s, int rows, const StreamedKeys<T>& k, DecodeLayout at, float* to) {
  const int64_t count = k.count, n = k.head_dim;
  const T* const* keys = k.rows;
  for (int64_t j = 0; j < count; j += 4) {
    const int block = static_cast<int>(minimum(4, count - j));
    for (int i = 0; i < block; ++i) k.stream.prefetch(keys + j + i);
    float* scores = to + j * at.key;
    int r = 0;
    for (; r + 4 <= rows; r += 4)
      dot_rows<T, 4>({s.q + r * s.stride, s.stride}, keys + j, block, n, at, scores + r * at.row);
    for (; r + 2 <= rows; r += 2)
      dot_rows<T, 2>({s.q + r * s.stride, s.stride}, keys + j, block, n, at, scores + r * at.row);
    for (; r < rows; ++r) dot_rows<T, 1>({s.q + r * s.stride, s.stride}, keys + j, block, n, at, scores + r * at.row);
  }
}

// to: [row][kForwardKeys], for up to kForwardKeys keys.
template <class T>
inline void scores_across(const StreamedRows& s, int rows, const StreamedKeys<T>& k, float* to) {
  const int64_t count = k.count, n = k.head_dim;
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t block = minimum(kLanes, count - j);
    for (int64_t i = 0; i < block; ++i) {
      k.stream.prefetch(k.rows + j + i);
      load_row(k.rows[j + i], n, s.stride, s.key_rows + i * s.stride);
    }
    std::memset(s.key_rows + block * s.stride, 0, static_cast<size_t>((kLanes - block) * s.stride) * sizeof(float));
    transpose(s.key_rows, s.stride, kLanes, s.stride, s.keys, kLanes);
    int r = 0;
    for (; r + 8 <= rows; r += 8) score_block<8>(s.q + r * s.stride, s.stride, s.keys, n, to + r * kForwardKeys + j);
    for (; r + 4 <= rows; r += 4) score_block<4>(s.q + r * s.stride, s.stride, s.keys, n, to + r * kForwardKeys + j);
    for (; r < rows; ++r) score_block<1>(s.q + r * s.stride, s.stride, s.keys, n, to + r * kForwardKeys + j);
  }
}

// Computes products of the rows and up to kForwardKeys keys, with queries in lanes: to[key][stride]. Only the first
// `rows` lanes are written.
template <class T>
inline void streamed_scores(const StreamedRows& s, int rows, bool across, const StreamedKeys<T>& keys, float* to,
                            int64_t stride) {
  if (!across) return scores_by_key(s, rows, keys, {stride, 1}, to);
  scores_across(s, rows, keys, s.across);
  for (int r = 0; r < rows; ++r)
    for (int64_t j = 0; j < keys.count; ++j) to[j * stride + r] = s.across[r * kForwardKeys + j];
}

template <class T, int Degree>
struct Decode {
  struct DecodeScratch {
    PanelRows* rows;
    SoftmaxState* softmax;
    float *o, *scores, *dropout;
    TileMemory options;
    int64_t o_stride;
    StreamedRows queries;
    size_t bytes;

    DecodeScratch(const Problem& p, int64_t row_count, void* base) : DecodeScratch(p, row_count, Arena(base)) {}

   private:
    DecodeScratch(const Problem& p, int64_t row_count, Arena a) : queries(p, a) {
      o_stride = round_up(p.head_dim_v, kLanes);
      rows = a.take<PanelRows>(1);
      softmax = a.take<SoftmaxState>(1);
      o = a.take<float>(row_count * o_stride);
      scores = a.take<float>(kForwardKeys * kPanel);
      options = option_memory(p, a);
      dropout = a.take<float>(p.dropout.p > 0 ? kForwardKeys * kPanel : 0);
      bytes = a.used();
    }
  };

  static size_t scratch(const Problem& p, int64_t rows) { return DecodeScratch(p, rows, nullptr).bytes; }

  static void tile_values(const DecodeScratch& s, ValueRows<T> values, const Stream<T>* stream, int rows,
                          DecodeLayout at) {
    const int64_t narrow = s.o_stride / (4 * kLanes) * 4 * kLanes;
    for (int r = 0; r < rows; ++r) {
      const float* p = s.scores + r * at.row;
      float* o = s.o + r * s.o_stride;
      for (int64_t c = 0; c < narrow; stream = nullptr) {  // once is enough
        if (c + 8 * kLanes <= narrow) {
          add_values<T, 1, 8>(p, at, values, stream, c, {o, s.o_stride});
          c += 8 * kLanes;
        } else {
          add_values<T, 1, 4>(p, at, values, stream, c, {o, s.o_stride});
          c += 4 * kLanes;
        }
      }
    }
    // The remaining one to three vectors of a row would wait for each other's sums, so that four rows are processed at
    // once.
    for (int64_t c = narrow; c < s.o_stride; c += kLanes) {
      int r = 0;
      for (; r + 4 <= rows; r += 4, stream = nullptr)
        add_values<T, 4, 1>(s.scores + r * at.row, at, values, stream, c, {s.o + r * s.o_stride, s.o_stride});
      for (; r < rows; ++r, stream = nullptr)
        add_values<T, 1, 1>(s.scores + r * at.row, at, values, stream, c, {s.o + r * s.o_stride, s.o_stride});
    }
  }

  static void run(const Piece& piece, const Partial* partial, void* base) {
    const Problem& p = *piece.problem;
    const Sequence& q = piece.sequence;
    const int rows = static_cast<int>(piece.row_end - piece.row_begin);
    DecodeScratch s(p, rows, base);
    fill_rows(piece, piece.row_begin, s.rows);
    s.softmax->clear();
    std::memset(s.o, 0, static_cast<size_t>(rows * s.o_stride) * sizeof(float));
    for (int r = 0; r < rows; ++r)
      s.queries.load(p, r, row_of<T>(p.q, q, q.q_begin, s.rows->query[r], s.rows->head[r]));
    const ScoreUnit unit = score_unit(p, true);
    const bool across = streams_across(piece);

    const int64_t begin = s.rows->begin_min / kForwardKeys * kForwardKeys, end = s.rows->end_max;
    const T *keys[2 * kForwardKeys], *values[2 * kForwardKeys];
    const Stream<T> key_stream(p, p.k, p.head_dim), value_stream(p, p.v, p.head_dim_v);
    for (int64_t key = begin; key < end; key += kForwardKeys) {
      const int64_t count = minimum(kForwardKeys, piece.key_end - key);
      TileMemory options;
      if (!shown_keys(piece, *s.rows, key, count, s.options, &options)) continue;
      // With pages the next rows follow, because they are prefetched.
      fill_key_rows(p.k, piece, s.rows->begin_min, key, count + key_stream.rows_ahead, keys);
      fill_key_rows(p.v, piece, s.rows->begin_min, key, count + value_stream.rows_ahead, values);
      // If a softmax is the only step after the product, keys are in lanes, because few queries would leave most lanes
      // idle.
      const bool plain = plain_scores(p) && p.dropout.p == 0 && !p.masked() && !p.max_scores.present &&
                         s.rows->shows(key, key + count);
      const DecodeLayout at = plain ? kKeysInLanes : kQueriesInLanes;
      const StreamedKeys<T> tile_keys{keys, key_stream, count, p.head_dim};
      if (!plain) {
        std::memset(s.scores, 0, sizeof(float) * kForwardKeys * kPanel);  // lanes without a row stay finite
        streamed_scores(s.queries, rows, across, tile_keys, s.scores, kPanel);
      } else if (across) {
        scores_across(s.queries, rows, tile_keys, s.scores);
      } else {
        scores_by_key(s.queries, rows, tile_keys, at, s.scores);
      }
      bool rescale = false;
      if (plain) {
        for (int r = 0; r < rows; ++r) rescale |= softmax_of_row<Degree>(s.scores + r * at.row, count, r, s.softmax);
      } else {
        finish_scores({piece, *s.rows, key, count, s.scores, kPanel}, unit, options);
        rescale = update_max(s.scores, kPanel, count, unit.log2, s.softmax);
        if (p.max_scores.present) add_largest(s.scores, kPanel, count, s.softmax);
        exponentiate<Degree>(s.scores, kPanel, count, unit.log2, s.softmax);
        if (p.dropout.p > 0) {
          dropout_factors(piece, *s.rows, key, count, s.dropout, kPanel);
          multiply_tile(s.scores, s.dropout, kPanel, count);
        }
      }
      if (rescale) {
        for (int r = 0; r < rows; ++r)
          for (int64_t c = 0; c < s.o_stride; c += kLanes)
            store(hn::Mul(load(s.o + r * s.o_stride + c), set(s.softmax->alpha[r])), s.o + r * s.o_stride + c);
      }
      tile_values(s, {values, count, p.head_dim_v}, &value_stream, rows, at);
    }

    if (partial == nullptr) {
      write_rows<T>(piece, *s.rows, s.o, s.o_stride, {s.softmax->max, s.softmax->sum, s.softmax->largest, unit.stored});
      return;
    }
    for (int r = 0; r < rows; ++r) {
      std::memcpy(partial->out + r * partial->stride, s.o + r * s.o_stride,
                  static_cast<size_t>(p.head_dim_v) * sizeof(float));
      partial->max[r] = s.softmax->max[r];
      partial->sum[r] = s.softmax->sum[r];
      partial->largest[r] = s.softmax->largest[r];
    }
  }
};

// Joins the partials of consecutive key ranges from the first to the last. kernels.h has their layout. scratch: kPanel
// * stride floats.
template <class Mma, class T>
inline void combine(const Piece& piece, const float* parts, int64_t count, int64_t stride, void* scratch) {
  const ScoreUnit unit = score_unit(*piece.problem, piece.streamed_rows > 0 || Mma::kPair == 1);
  const int64_t row_count = piece.row_end - piece.row_begin, part = row_count * (stride + kRowFloats);
  auto* out = static_cast<float*>(scratch);
  for (int64_t first = 0; first < row_count; first += kPanel) {
    PanelRows rows;
    fill_rows(piece, piece.row_begin + first, &rows);
    float max[kPanel], sum[kPanel], largest[kPanel];
    for (int i = 0; i < rows.count; ++i) {
      const int64_t r = first + i;
      const float* maxima = parts + row_count * stride + r;
      const float *sums = maxima + row_count, *scores = sums + row_count;
      max[i] = -kInfinity;
      for (int64_t j = 0; j < count; ++j) max[i] = maxima[j * part] > max[i] ? maxima[j * part] : max[i];
      sum[i] = 0;
      largest[i] = -kInfinity;
      for (int64_t j = 0; j < count; ++j) {
        const float one = scores[j * part];
        largest[i] = one > largest[i] || one != one ? one : largest[i];
      }
      float* o = out + i * stride;
      std::memset(o, 0, static_cast<size_t>(stride) * sizeof(float));
      for (int64_t j = 0; j < count; ++j) {
        const float weight = maxima[j * part] == -kInfinity ? 0.0f : exp2f((maxima[j * part] - max[i]) * unit.log2);
        sum[i] += sums[j * part] * weight;
        const float* from = parts + j * part + r * stride;
        for (int64_t c = 0; c < stride; c += kLanes) store(hn::MulAdd(load(from + c), set(weight), load(o + c)), o + c);
      }
    }
    write_rows<T>(piece, rows, out, stride, {max, sum, largest, unit.stored});
  }
}

}  // namespace tandem::cpu::TANDEM_TARGET
