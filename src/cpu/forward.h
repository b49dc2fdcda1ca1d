// The forward of one piece: rows of queries that share a key head, against a range of keys.
//
//   for each tile of keys:                      pack K, V (converted, contiguous)
//     for each panel of queries that sees it:   S = K Q^T        [keys][panel]   product over head_dim
//                                               P = softmax step [keys][panel]   in place, O rescaled if it must be
//                                               O += V^T P       [dim_v][panel]  product over keys
//
// Everything is stored with queries in lanes: maxima, sums and factors are vectors, and no step crosses lanes. decode()
// is the same loop for a few queries: it reads K and V once, without packing, with head_dim in lanes.
#pragma once

#include "cpu/scores.h"

namespace tandem::cpu::TANDEM_TARGET {

constexpr int64_t kForwardKeys = 64;
constexpr int64_t kBiasWords = 2 * kPanel * kForwardKeys;

extern "C" double log(double);
extern "C" double sqrt(double);
extern "C" float exp2f(float);

// Returns parts of the scratch memory. With a null base this class only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    const size_t at = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// The memory of options for tiles of kForwardKeys keys.
inline TileMemory option_memory(const Problem& p, Arena& a) {
  TileMemory memory;
  if (p.bias.present) memory.bias = a.take<float>(kBiasWords);
  if (p.masked()) memory.visible = a.take<int32_t>(kForwardKeys * kPanel);
  if (p.score_mod.present || p.mask_mod.present) memory.mods = a.take<float>(static_cast<int64_t>(mod_floats(p)));
  return memory;
}

template <class T>
inline const T* row_of(const View& v, const Sequence& s, int64_t begin, int64_t row, int64_t head) {
  return reinterpret_cast<const T*>(v.data) + s.batch_index * v.batch + (begin + row) * v.row + head * v.head;
}
template <class T>
inline T* mutable_row_of(const View& v, const Sequence& s, int64_t begin, int64_t row, int64_t head) {
  return reinterpret_cast<T*>(v.data) + s.batch_index * v.batch + (begin + row) * v.row + head * v.head;
}

// A row that replaces keys and values which the call must not read; 512 floats are the longest row.
alignas(64) inline constexpr float kZeroRow[512] = {};

// Fills rows with rows [key, key + count) of a sequence's keys or values. With pages two kinds of rows are zeros: rows
// of pages that end before `first`, and rows after the sequence. The page table may have any value there.
template <class T>
inline void fill_key_rows(const View& v, const Piece& piece, int64_t first, int64_t key, int64_t count,
                          const T** rows) {
  const Sequence& s = piece.sequence;
  const PageTable& t = piece.problem->page_table;
  if (!t.present) {
    for (int64_t j = 0; j < count; ++j) rows[j] = row_of<T>(v, s, s.k_begin, key + j, piece.head_k);
    return;
  }
  const int64_t used = minimum(count, s.k_len - key);
  int64_t j = 0;
  for (int64_t index = key / t.page_size, row = key % t.page_size; j < used; ++index, row = 0) {
    const int64_t end = minimum(used, j + t.page_size - row);
    if ((index + 1) * t.page_size <= first) {
      for (; j < end; ++j) rows[j] = reinterpret_cast<const T*>(kZeroRow);
    } else {
      const T* from = reinterpret_cast<const T*>(v.data) +
                      t.data[s.batch_index * t.batch + index * t.column] * v.batch + piece.head_k * v.head;
      for (; j < end; ++j, ++row) rows[j] = from + row * v.row;
    }
  }
  for (; j < count; ++j) rows[j] = reinterpret_cast<const T*>(kZeroRow);
}

// Calls f with a row of a tensor of T or float32: a result, or an input of the backward.
template <class T, class F>
inline void with_row_of(const View& v, const Sequence& s, int64_t begin, int64_t row, int64_t head, F&& f) {
  if (v.dtype == DType::f32) {
    f(mutable_row_of<float>(v, s, begin, row, head));
  } else {
    f(mutable_row_of<T>(v, s, begin, row, head));
  }
}

// The out factor and lse of a row, computed from its maximum and sum and the sink.
struct RowResult {
  float out_factor, lse;
};

// Returns the sink of a query head, or -inf without sinks.
inline float sink_of(const Problem& p, int64_t head) {
  if (!p.sink.present) return -kInfinity;
  const int64_t at = head * p.sink.head;
  if (p.sink.dtype == DType::f32) return reinterpret_cast<const float*>(p.sink.data)[at];
  float x[kLanes];
  if (p.sink.dtype == DType::bf16) {
    load_row(reinterpret_cast<const BF16*>(p.sink.data) + at, 1, kLanes, x);
  } else {
    load_row(reinterpret_cast<const F16*>(p.sink.data) + at, 1, kLanes, x);
  }
  return x[0];
}

// max: in natural units.
inline RowResult finish_row(const Problem& p, int64_t head, double max, float sum) {
  float factor = 1.0f;
  const double sink = sink_of(p, head);
  if (sink != -kInfinity) {
    const double top = max > sink ? max : sink;
    factor = exp2f(static_cast<float>((max - top) * kLog2e));
    sum = sum * factor + exp2f(static_cast<float>((sink - top) * kLog2e));
    max = top;
  }
  if (sum == 0) return {0.0f, static_cast<float>(max)};
  return {factor / sum * keep_factor(p), p.lse.present ? static_cast<float>(max + log(sum)) : 0.0f};
}

// A panel's softmax state, and the conversion of a stored score to natural units.
struct RowStates {
  const float *max, *sum, *largest;
  double unit;
};

// Writes the results of a panel's rows from O with rows padded to kLanes.
template <class T>
inline void write_rows(const Piece& piece, const PanelRows& rows, const float* o, int64_t stride,
                       const RowStates& state) {
  const Problem& p = *piece.problem;
  const Sequence& s = piece.sequence;
  for (int i = 0; i < rows.count; ++i) {
    const RowResult result = finish_row(p, rows.head[i], state.max[i] * state.unit, state.sum[i]);
    with_row_of<T>(p.out, s, s.q_begin, rows.query[i], rows.head[i], [&](auto* out) {
      if (state.sum[i] == 0) {
        std::memset(static_cast<void*>(out), 0, static_cast<size_t>(p.head_dim_v) * sizeof *out);
      } else {
        store_row(o + i * stride, p.head_dim_v, result.out_factor, out);
      }
    });
    if (p.lse.present) *mutable_row_of<float>(p.lse, s, s.q_begin, rows.query[i], rows.head[i]) = result.lse;
    if (p.max_scores.present) {
      *mutable_row_of<float>(p.max_scores, s, s.q_begin, rows.query[i], rows.head[i]) =
          static_cast<float>(state.largest[i] * state.unit);
    }
  }
}

// Returns the keys that any lane may see. Sets *memory for finish_scores() of the tile of these keys.
inline ShownKeys shown_keys(const Piece& piece, const PanelRows& rows, int64_t key, int64_t count,
                            const TileMemory& of_piece, TileMemory* memory) {
  *memory = of_piece;
  if (rows.hides(key, key + count)) return {};
  if (!piece.problem->masked()) return {0, count, true};  // memory->visible is null
  const ShownKeys shown = show_visible(mod_tile(piece, rows, key, count, kPanel, of_piece.mods), of_piece.visible);
  if (shown.all && shown.begin == 0 && shown.end == count) memory->visible = nullptr;
  return shown;
}

template <class Mma>
inline ScoreUnit tile_unit(const Problem& p) {
  return score_unit(p, Mma::kPair == 1);
}

template <class Mma, class T, int Degree>
struct Forward {
  using Word = typename Mma::Word;

  // One panel: its packed queries, its running softmax, its output [head_dim_v][kPanel].
  struct Panel {
    PanelRows rows;
    SoftmaxState softmax;
    bool started;
  };

  struct ForwardScratch {
    Panel* panels;
    Word *q, *k, *v, *row, *pairs;
    float *o, *scores, *dropout, *out_rows;
    TileMemory options;
    int64_t q_words, k_stride, v_stride, o_rows, out_stride;
    size_t bytes;

    ForwardScratch(const Problem& p, int64_t panel_count, void* base) {
      Arena a(base);
      const int64_t w = words<Mma>(p.head_dim), row_words_count = round_up(w, kLanes < 4 ? 4 : kLanes);
      q_words = round_up(w, 4);
      k_stride = round_up(w, kLanes);
      v_stride = round_up(p.head_dim_v, kLanes);
      o_rows = round_up(p.head_dim_v, 4);
      out_stride = round_up(o_rows, kLanes);
      panels = a.take<Panel>(panel_count);
      q = a.take<Word>(panel_count * q_words * kPanel);
      o = a.take<float>(panel_count * o_rows * kPanel);
      k = a.take<Word>(kForwardKeys * k_stride);
      v = a.take<Word>(kForwardKeys / Mma::kPair * v_stride);
      scores = a.take<float>(kForwardKeys * kPanel);
      pairs = a.take<Word>(Mma::kPair == 2 ? kForwardKeys / 2 * kPanel : 0);
      row = a.take<Word>(kPanel * row_words_count);
      out_rows = a.take<float>(kPanel * out_stride);
      options = option_memory(p, a);
      dropout = a.take<float>(p.dropout.p > 0 ? kForwardKeys * kPanel : 0);
      bytes = a.used();
    }
  };

  static size_t scratch(const Problem& p, int64_t rows) {
    return ForwardScratch(p, (rows + kPanel - 1) / kPanel, nullptr).bytes;
  }

  static void pack_queries(const Piece& piece, Panel* panel, ForwardScratch& s, int64_t index) {
    const Problem& p = *piece.problem;
    const T* source[kPanel];
    for (int i = 0; i < panel->rows.count; ++i)
      source[i] = row_of<T>(p.q, piece.sequence, piece.sequence.q_begin, panel->rows.query[i], panel->rows.head[i]);
    pack_panel<Mma, T>({source, panel->rows.count}, p.head_dim, p.softmax_scale, s.row,
                       s.q + index * s.q_words * kPanel);
    panel->softmax.clear();
    panel->started = false;
  }

  // first: the first key that a row of the piece sees.
  static void pack_keys(const Piece& piece, int64_t first, int64_t key, int64_t count, ForwardScratch& s) {
    const Problem& p = *piece.problem;
    const T *keys[kForwardKeys], *values[kForwardKeys];
    fill_key_rows(p.k, piece, first, key, count, keys);
    fill_key_rows(p.v, piece, first, key, count, values);
    for (int64_t j = 0; j < count; ++j) row_words(keys[j], p.head_dim, s.k_stride, s.k + j * s.k_stride);
    pack_columns<Mma, T>({values, count}, p.head_dim_v, s.v);
  }

  static void softmax_step(const Piece& piece, int64_t index, int64_t key, int64_t count, const TileMemory& options,
                           ForwardScratch& s) {
    Panel* panel = s.panels + index;
    float* o = s.o + index * s.o_rows * kPanel;
    const int64_t o_rows = piece.problem->head_dim_v;
    const ScoreUnit unit = tile_unit<Mma>(*piece.problem);
    finish_scores({piece, panel->rows, key, count, s.scores, kPanel}, unit, options);
    if (update_max(s.scores, kPanel, count, unit.log2, &panel->softmax) && panel->started) {
      const VF a0 = load(panel->softmax.alpha), a1 = load(panel->softmax.alpha + kLanes);
      for (int64_t c = 0; c < o_rows; ++c) {
        store(hn::Mul(load(o + c * kPanel), a0), o + c * kPanel);
        store(hn::Mul(load(o + c * kPanel + kLanes), a1), o + c * kPanel + kLanes);
      }
    }
    if (piece.problem->max_scores.present) add_largest(s.scores, kPanel, count, &panel->softmax);
    exponentiate<Degree>(s.scores, kPanel, count, unit.log2, &panel->softmax);
    if (piece.problem->dropout.p > 0) {
      dropout_factors(piece, panel->rows, key, count, s.dropout, kPanel);
      multiply_tile(s.scores, s.dropout, kPanel, count);
    }
  }

  static void panel_step(const Piece& piece, int64_t index, int64_t key, int64_t count, const TileMemory& options,
                         ForwardScratch& s) {
    const Problem& p = *piece.problem;
    Panel* panel = s.panels + index;
    float* o = s.o + index * s.o_rows * kPanel;
    gemm<Mma>(count, {s.k, s.k_stride, 1}, s.q + index * s.q_words * kPanel, words<Mma>(p.head_dim),
              {s.scores, kPanel, false});
    softmax_step(piece, index, key, count, options, s);
    const Word* probabilities;
    if constexpr (Mma::kPair == 1) {
      probabilities = s.scores;
    } else {
      pair_keys(s.scores, kPanel, count, s.pairs, kPanel);
      probabilities = s.pairs;
    }
    gemm<Mma>(p.head_dim_v, {s.v, 1, s.v_stride}, probabilities, words<Mma>(count), {o, kPanel, panel->started});
    panel->started = true;
  }

  static void write(const Piece& piece, const Partial* partial, Panel* panel, int64_t index, ForwardScratch& s) {
    const int64_t dv = piece.problem->head_dim_v;
    float* o = s.o + index * s.o_rows * kPanel;
    if (!panel->started) std::memset(o, 0, static_cast<size_t>(s.o_rows * kPanel) * sizeof(float));
    for (int64_t c = dv; c < s.o_rows; ++c) std::memset(o + c * kPanel, 0, kPanel * sizeof(float));
    if (partial == nullptr) {
      transpose(o, kPanel, static_cast<int>(s.o_rows), kPanel, s.out_rows, s.out_stride);
      const SoftmaxState& state = panel->softmax;
      write_rows<T>(piece, panel->rows, s.out_rows, s.out_stride,
                    {state.max, state.sum, state.largest, tile_unit<Mma>(*piece.problem).stored});
      return;
    }
    transpose(o, kPanel, static_cast<int>(s.o_rows), kPanel, s.out_rows, s.out_stride);
    const int64_t row = index * kPanel;
    for (int i = 0; i < panel->rows.count; ++i) {
      std::memcpy(partial->out + (row + i) * partial->stride, s.out_rows + i * s.out_stride,
                  static_cast<size_t>(dv) * sizeof(float));
      partial->max[row + i] = panel->softmax.max[i];
      partial->sum[row + i] = panel->softmax.sum[i];
      partial->largest[row + i] = panel->softmax.largest[i];
    }
  }

  static void run(const Piece& piece, const Partial* partial, void* base) {
    const int64_t panel_count = (piece.row_end - piece.row_begin + kPanel - 1) / kPanel;
    ForwardScratch s(*piece.problem, panel_count, base);
    int64_t begin = piece.key_end, end = piece.key_begin;
    for (int64_t i = 0; i < panel_count; ++i) {
      Panel* panel = s.panels + i;
      fill_rows(piece, piece.row_begin + i * kPanel, &panel->rows);
      pack_queries(piece, panel, s, i);
      begin = minimum(begin, panel->rows.begin_min);
      end = maximum(end, panel->rows.end_max);
    }
    // Tiles start at multiples of the tile size, so that the tiles of a query do not depend on its piece.
    for (int64_t key = begin / kForwardKeys * kForwardKeys; key < end; key += kForwardKeys) {
      const int64_t count = minimum(kForwardKeys, piece.key_end - key);
      bool packed = false;  // keys stay unpacked if a mask hides them from all rows
      for (int64_t i = 0; i < panel_count; ++i) {
        TileMemory options;
        if (!shown_keys(piece, s.panels[i].rows, key, count, s.options, &options)) continue;
        if (!packed) pack_keys(piece, begin, key, count, s);
        packed = true;
        panel_step(piece, i, key, count, options, s);
      }
    }
    for (int64_t i = 0; i < panel_count; ++i) write(piece, partial, s.panels + i, i, s);
  }
};

}  // namespace tandem::cpu::TANDEM_TARGET
