// Backward of one tile: up to kBackwardRows queries against up to kBackwardKeys packed keys. Five products:
//
//   S  = K Q^T   [keys][queries]     P  = 2^(S - lse)              dV += P  dO   [keys][dim_v]
//   dP = V dO^T  [keys][queries]     dS = P * (dP - delta)         dK += dS Q    [keys][dim]
//                                                                  dQ  = dS^T K  [queries][dim]
//
// The scheduler holds a block of keys and walks over the queries (dK and dV stay in scratch, dQ is handed out tile by
// tile), or holds queries and walks over keys when only dQ is wanted. Scores lie [key][query] as in the forward; P and
// dS are read by the last three products through strides, never transposed.
#pragma once

#include "cpu/forward.h"

namespace tandem::cpu::TANDEM_TARGET {

template <class Mma, class T, int Degree>
struct Backward {
  using Word = typename Mma::Word;
  static constexpr int kPair = Mma::kPair;
  static constexpr int64_t kPanels = (kBackwardRows + kPanel - 1) / kPanel;
  static constexpr int64_t kRowsPadded = kPanels * kPanel;
  static constexpr int64_t kStride = kRowsPadded + 16;  // floats between keys: not a power of two, for the cache's sake

  struct BackwardScratch {
    // The block of keys.
    Word *k, *v, *k_panels;  // rows, rows, columns in panels
    float *dk, *dv;          // [keys][dim padded]
    // The tile of queries.
    PanelRows* rows;
    Word *q, *dout, *q_panels, *dout_panels;  // panels over queries; columns in panels over dim
    float *scores, *dscores;                  // [keys][kStride]: S then P, dP then dS
    Word *p_rows, *ds_rows, *ds_pairs;        // MmaBF16: P and dS rounded; [keys][kRowsPadded / 2], [keys / 2][rows]
    float* dq;                                // [queries][dim padded]
    TileMemory options;
    float* dropout;
    T* dout_rows;  // of a float32 dout, as products take it
    Word* row;
    int64_t k_stride, v_stride, q_words, v_words, k_columns, v_columns;  // columns: dim padded to kPanel
    size_t bytes;

    BackwardScratch(const Problem& p, void* base) {
      Arena a(base);
      const int64_t kw = words<Mma>(p.head_dim), vw = words<Mma>(p.head_dim_v);
      k_stride = round_up(kw, kLanes);
      v_stride = round_up(vw, kLanes);
      q_words = round_up(kw, 4);
      v_words = round_up(vw, 4);
      k_columns = round_up(p.head_dim, kPanel);
      v_columns = round_up(p.head_dim_v, kPanel);
      const int64_t widest = maximum(k_columns, v_columns), words_rows = kRowsPadded / kPair;
      k = a.take<Word>(kBackwardKeys * k_stride);
      v = a.take<Word>(kBackwardKeys * v_stride);
      k_panels = a.take<Word>(kBackwardKeys / kPair * k_columns);
      dk = a.take<float>(kBackwardKeys * k_columns);
      dv = a.take<float>(kBackwardKeys * v_columns);
      rows = a.take<PanelRows>(kPanels);
      q = a.take<Word>(kPanels * q_words * kPanel);
      dout = a.take<Word>(kPanels * v_words * kPanel);
      q_panels = a.take<Word>(words_rows * k_columns);
      dout_panels = a.take<Word>(words_rows * v_columns);
      scores = a.take<float>(kBackwardKeys * kStride);
      dscores = a.take<float>(kBackwardKeys * kStride);
      p_rows = a.take<Word>(kPair == 2 ? kBackwardKeys * words_rows : 0);
      ds_rows = a.take<Word>(kPair == 2 ? kBackwardKeys * words_rows : 0);
      ds_pairs = a.take<Word>(kPair == 2 ? kBackwardKeys / 2 * kRowsPadded : 0);
      dq = a.take<float>(kRowsPadded * k_columns);
      if (p.softcap != 0) options.slope = a.take<float>(kBackwardKeys * kStride);
      if (p.bias.present) options.bias = a.take<float>(2 * kPanel * kBackwardKeys);
      if (p.score_mod.present) options.unmodified = a.take<float>(kBackwardKeys * kStride);
      if (p.masked()) options.visible = a.take<int32_t>(kBackwardKeys * kPanel);
      if (p.score_mod.present || p.mask_mod.present) options.mods = a.take<float>(static_cast<int64_t>(mod_floats(p)));
      dropout = a.take<float>(p.dropout.p > 0 ? kBackwardKeys * kStride : 0);
      dout_rows = a.take<T>(rounds_dout(p) ? kRowsPadded * p.head_dim_v : 0);
      row = a.take<Word>(maximum(kPanel * maximum(round_up(kw, 16), round_up(vw, 16)), widest));
      bytes = a.used();
    }
  };

  static size_t scratch(const Problem& p) { return BackwardScratch(p, nullptr).bytes; }

  // Products take 16-bit rows: a float32 dout is rounded, wherever it is read.
  static bool rounds_dout(const Problem& p) { return p.dout.dtype == DType::f32 && sizeof(T) != sizeof(float); }
  static const T* dout_row(const Problem& p, const Sequence& s, int64_t query, int64_t head, T* rounded) {
    if (!rounds_dout(p)) return row_of<T>(p.dout, s, s.q_begin, query, head);
    const float* exact = row_of<float>(p.dout, s, s.q_begin, query, head);
    for (int64_t c = 0; c < p.head_dim_v; c += kLanes) {
      float lanes[kLanes];
      const int64_t count = minimum(kLanes, p.head_dim_v - c);
      load_row(exact + c, count, kLanes, lanes);
      store_row(lanes, count, 1.0f, rounded + c);
    }
    return rounded;
  }

  static void keys(const Piece& piece, bool want_dkv, bool want_dq, void* base) {
    const Problem& p = *piece.problem;
    const Sequence& q = piece.sequence;
    BackwardScratch s(p, base);
    const T* source[kBackwardKeys];
    const int64_t count = piece.key_end - piece.key_begin;
    for (int64_t j = 0; j < count; ++j) {
      source[j] = row_of<T>(p.k, q, q.k_begin, piece.key_begin + j, piece.head_k);
      row_words(source[j], p.head_dim, s.k_stride, s.k + j * s.k_stride);
      row_words(row_of<T>(p.v, q, q.k_begin, piece.key_begin + j, piece.head_k), p.head_dim_v, s.v_stride,
                s.v + j * s.v_stride);
    }
    if (want_dq) pack_column_panels<Mma, T>({source, count}, p.head_dim, kBackwardKeys / kPair, s.row, s.k_panels);
    if (want_dkv) {
      std::memset(s.dk, 0, sizeof(float) * static_cast<size_t>(kBackwardKeys * s.k_columns));
      std::memset(s.dv, 0, sizeof(float) * static_cast<size_t>(kBackwardKeys * s.v_columns));
    }
  }

  static void pack_rows(const Piece& piece, bool want_dkv, BackwardScratch& s) {
    const Problem& p = *piece.problem;
    const Sequence& q = piece.sequence;
    const T *queries[kRowsPadded], *gradients[kRowsPadded];
    int64_t count = 0;
    for (int64_t i = 0; i < kPanels && piece.row_begin + i * kPanel < piece.row_end; ++i) {
      PanelRows* rows = s.rows + i;
      fill_rows(piece, piece.row_begin + i * kPanel, rows);
      const int64_t first = count;
      for (int l = 0; l < rows->count; ++l, ++count) {
        queries[count] = row_of<T>(p.q, q, q.q_begin, rows->query[l], rows->head[l]);
        gradients[count] = dout_row(p, q, rows->query[l], rows->head[l], s.dout_rows + count * p.head_dim_v);
      }
      pack_panel<Mma, T>({queries + first, rows->count}, p.head_dim, score_scale(p), s.row,
                         s.q + i * s.q_words * kPanel);
      pack_panel<Mma, T>({gradients + first, rows->count}, p.head_dim_v, 1.0, s.row, s.dout + i * s.v_words * kPanel);
    }
    if (want_dkv) {
      pack_column_panels<Mma, T>({queries, count}, p.head_dim, kRowsPadded / kPair, s.row, s.q_panels);
      pack_column_panels<Mma, T>({gradients, count}, p.head_dim_v, kRowsPadded / kPair, s.row, s.dout_panels);
    }
  }

  static TileMemory options_of(int64_t panel, const BackwardScratch& s) {
    TileMemory memory = s.options;
    if (memory.slope != nullptr) memory.slope += panel * kPanel;
    if (memory.unmodified != nullptr) memory.unmodified += panel * kPanel;
    return memory;
  }

  // P and dS of one panel, from S and dP.
  static void panel_gradients(const Piece& piece, const PanelRows& rows, int64_t panel, const float* delta,
                              int64_t query_stride, int64_t head_stride, BackwardScratch& s) {
    const Problem& p = *piece.problem;
    const Sequence& q = piece.sequence;
    const int64_t count = piece.key_end - piece.key_begin;
    float *scores = s.scores + panel * kPanel, *dscores = s.dscores + panel * kPanel;
    float* dropout = p.dropout.p > 0 ? s.dropout + panel * kPanel : nullptr;
    const float factor = finish_scores(piece, rows, piece.key_begin, count, pending_factor<Mma>(p), scores, kStride,
                                       options_of(panel, s));
    if (dropout != nullptr) dropout_factors(piece, rows, piece.key_begin, count, dropout, kStride);

    float lse[kPanel], lse_low[kPanel], lane_delta[kPanel];  // lse in log2 units, and what float32 dropped of it
    for (int i = 0; i < kPanel; ++i) {
      const bool row = i < rows.count;
      const float l = row ? *row_of<float>(p.lse, q, q.q_begin, rows.query[i], rows.head[i]) : -kInfinity;
      const double exact = l * 1.44269504088896340736;
      lse[i] = l == -kInfinity ? kInfinity : static_cast<float>(exact);  // a row that saw no key: P = 2^(S - inf) = 0
      lse_low[i] = l == -kInfinity ? 0.0f : static_cast<float>(exact - static_cast<double>(lse[i]));
      lane_delta[i] = row ? delta[rows.query[i] * query_stride + rows.head[i] * head_stride] : 0;
    }
    constexpr bool precise = Degree == 6;
    const VF f = set(factor);
    const auto probability = [&](const float* score, int h) HWY_ATTR {
      VF x = hn::MulSub(load(score + h), f, load(lse + h));
      if (precise) x = hn::Sub(x, load(lse_low + h));
      return exp2<Degree>(x);
    };
    const VF d0 = load(lane_delta), d1 = load(lane_delta + kLanes);
    for (int64_t j = 0; j < count; ++j) {
      float *a = scores + j * kStride, *b = dscores + j * kStride;
      const VF p0 = probability(a, 0), p1 = probability(a, kLanes);
      VF g0 = load(b), g1 = load(b + kLanes), kept0 = p0, kept1 = p1;
      if (dropout != nullptr) {
        const VF m0 = load(dropout + j * kStride), m1 = load(dropout + j * kStride + kLanes);
        kept0 = hn::Mul(p0, m0), kept1 = hn::Mul(p1, m1);
        g0 = hn::Mul(g0, m0), g1 = hn::Mul(g1, m1);
      }
      g0 = hn::Mul(p0, hn::Sub(g0, d0)), g1 = hn::Mul(p1, hn::Sub(g1, d1));
      store(kept0, a), store(kept1, a + kLanes);
      store(g0, b), store(g1, b + kLanes);
    }
  }

  // Through softcap, back to the scaled product. After this dS is what dK and dQ are made of (times softmax_scale).
  static void through_softcap(const Piece& piece, int64_t panel, BackwardScratch& s) {
    multiply_tile(s.dscores + panel * kPanel, s.options.slope + panel * kPanel, kStride,
                  piece.key_end - piece.key_begin);
  }

  // Through score_mod, to the scores that bias was added to.
  static void through_mod(const Piece& piece, int64_t panel, double* captured, BackwardScratch& s) {
    const PanelRows& rows = s.rows[panel];
    const ModTile tile =
        mod_tile(piece, rows, piece.key_begin, piece.key_end - piece.key_begin, kStride, s.options.mods);
    modify_gradients(tile, rows.count, s.options.unmodified + panel * kPanel, s.dscores + panel * kPanel, captured);
  }

  // A panel whose queries see none of the keys.
  static void clear_panel(int64_t panel, int64_t count, BackwardScratch& s) {
    for (int64_t j = 0; j < count; ++j) {
      std::memset(s.scores + j * kStride + panel * kPanel, 0, kPanel * sizeof(float));
      std::memset(s.dscores + j * kStride + panel * kPanel, 0, kPanel * sizeof(float));
    }
  }

#if TANDEM_HAS_BF16_DOT
  static void round_tiles(int64_t count, bool want_dkv, bool want_dq, BackwardScratch& s) {
    constexpr int64_t word_stride = kRowsPadded / 2;
    for (int64_t panel = 0; panel < kPanels; ++panel) {
      const float *p = s.scores + panel * kPanel, *ds = s.dscores + panel * kPanel;
      for (int64_t j = 0; want_dkv && j < count; ++j) {
        const int64_t at = j * word_stride + panel * kLanes;
        store(join_bf16(load(p + j * kStride), load(p + j * kStride + kLanes)), s.p_rows + at);
        store(join_bf16(load(ds + j * kStride), load(ds + j * kStride + kLanes)), s.ds_rows + at);
      }
      if (want_dq) pair_keys(ds, kStride, count, s.ds_pairs + panel * kPanel, kRowsPadded);
    }
  }
#endif

  static void tile(const Piece& piece, const float* delta, int64_t query_stride, int64_t head_stride, bool want_dkv,
                   bool want_dq, double* captured, void* base) {
    const Problem& p = *piece.problem;
    BackwardScratch s(p, base);
    pack_rows(piece, want_dkv, s);
    const int64_t count = piece.key_end - piece.key_begin, row_count = piece.row_end - piece.row_begin;
    const int64_t panels = (row_count + kPanel - 1) / kPanel;
    for (int64_t i = 0; i < panels; ++i) {
      if (!shows_any(piece, s.rows[i], piece.key_begin, count, s.options)) {
        clear_panel(i, count, s);
        continue;
      }
      gemm<Mma>(count, {s.k, s.k_stride, 1}, s.q + i * s.q_words * kPanel, words<Mma>(p.head_dim),
                s.scores + i * kPanel, kStride, false);
      gemm<Mma>(count, {s.v, s.v_stride, 1}, s.dout + i * s.v_words * kPanel, words<Mma>(p.head_dim_v),
                s.dscores + i * kPanel, kStride, false);
      panel_gradients(piece, s.rows[i], i, delta, query_stride, head_stride, s);
      if (p.score_mod.present) through_mod(piece, i, captured, s);
      if (p.softcap != 0 && (want_dkv || want_dq)) through_softcap(piece, i, s);
    }
    if (!want_dkv && !want_dq) return;
    products(count, row_count, want_dkv, want_dq, s);
  }

  static void products(int64_t count, int64_t row_count, bool want_dkv, bool want_dq, BackwardScratch& s) {
    Broadcast<Word> p_rows, ds_rows, ds_columns;
    if constexpr (kPair == 1) {
      p_rows = {s.scores, kStride, 1};
      ds_rows = {s.dscores, kStride, 1};
      ds_columns = {s.dscores, 1, kStride};
    } else {
      round_tiles(count, want_dkv, want_dq, s);
      p_rows = {s.p_rows, kRowsPadded / 2, 1};
      ds_rows = {s.ds_rows, kRowsPadded / 2, 1};
      ds_columns = {s.ds_pairs, 1, kRowsPadded};
    }
    constexpr int64_t capacity = kRowsPadded / kPair * kPanel;
    if (want_dkv) {
      for (int64_t c = 0; c < s.v_columns; c += kPanel)
        gemm<Mma>(count, p_rows, s.dout_panels + c / kPanel * capacity, words<Mma>(row_count), s.dv + c, s.v_columns,
                  true);
      for (int64_t c = 0; c < s.k_columns; c += kPanel)
        gemm<Mma>(count, ds_rows, s.q_panels + c / kPanel * capacity, words<Mma>(row_count), s.dk + c, s.k_columns,
                  true);
    }
    if (want_dq) {
      for (int64_t c = 0; c < s.k_columns; c += kPanel)
        gemm<Mma>(row_count, ds_columns, s.k_panels + c / kPanel * (kBackwardKeys / kPair) * kPanel, words<Mma>(count),
                  s.dq + c, s.k_columns, false);
    }
  }

  static void add_dq(const Piece& piece, RowAccumulator to, void* base) {
    const Problem& p = *piece.problem;
    BackwardScratch s(p, base);
    const VF scale = set(static_cast<float>(p.softmax_scale));
    for (int64_t row = piece.row_begin; row < piece.row_end; ++row) {
      const float* from = s.dq + (row - piece.row_begin) * s.k_columns;
      float* dst = to.data + (row / piece.heads * to.query + row % piece.heads * to.head - to.origin);
      int64_t c = 0;
      for (; c + kLanes <= p.head_dim; c += kLanes) store(hn::MulAdd(load(from + c), scale, load(dst + c)), dst + c);
      for (; c < p.head_dim; ++c) dst[c] += from[c] * static_cast<float>(p.softmax_scale);
    }
  }

  static void store_dkv(const Piece& piece, void* base) {
    const Problem& p = *piece.problem;
    const Sequence& q = piece.sequence;
    BackwardScratch s(p, base);
    const auto put = [&](const View& to, int64_t key, const float* from, int64_t n, double scale) {
      with_row_of<T>(to, q, q.k_begin, key, piece.head_k, [&](auto* row) {
        const auto put_row = p.accumulate ? add_row<std::remove_pointer_t<decltype(row)>>
                                          : store_row<std::remove_pointer_t<decltype(row)>>;
        put_row(from, n, static_cast<float>(scale), row);
      });
    };
    for (int64_t j = 0; j < piece.key_end - piece.key_begin; ++j) {
      const int64_t key = piece.key_begin + j;
      if (p.dk.present) put(p.dk, key, s.dk + j * s.k_columns, p.head_dim, p.softmax_scale);
      if (p.dv.present) put(p.dv, key, s.dv + j * s.v_columns, p.head_dim_v, 1.0);
    }
  }

  static void add_dbias(const Piece& piece, float* sum, int64_t query_stride, int64_t key_stride, void* base) {
    BackwardScratch s(*piece.problem, base);
    for (int64_t row = piece.row_begin; row < piece.row_end; ++row) {
      const float* ds = s.dscores + (row - piece.row_begin);
      float* to = sum + (row - piece.row_begin) * query_stride;
      for (int64_t j = 0; j < piece.key_end - piece.key_begin; ++j) to[j * key_stride] += ds[j * kStride];
    }
  }

  static void delta(const Piece& piece, float* delta, int64_t query_stride, int64_t head_stride, void* base) {
    const Problem& p = *piece.problem;
    const Sequence& q = piece.sequence;
    BackwardScratch s(p, base);
    for (int64_t row = piece.row_begin; row < piece.row_end; ++row) {
      const int64_t query = row / piece.heads, head = piece.head_first + row % piece.heads;
      const T* g = dout_row(p, q, query, head, s.dout_rows);
      VF sum = hn::Zero(FTag());
      with_row_of<T>(p.out, q, q.q_begin, query, head, [&](const auto* o) {
        float a[kLanes], b[kLanes];
        for (int64_t c = 0; c < p.head_dim_v; c += kLanes) {
          load_row(o + c, minimum(kLanes, p.head_dim_v - c), kLanes, a);
          load_row(g + c, minimum(kLanes, p.head_dim_v - c), kLanes, b);
          sum = hn::MulAdd(load(a), load(b), sum);
        }
      });
      float value = hn::GetLane(hn::SumOfLanes(FTag(), sum));
      if (p.dlse.present) value -= *row_of<float>(p.dlse, q, q.q_begin, query, head);
      delta[query * query_stride + head * head_stride] = value;
    }
  }
};

}  // namespace tandem::cpu::TANDEM_TARGET
