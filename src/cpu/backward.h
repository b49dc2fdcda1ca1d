// Backward of one tile: up to kBackwardRows queries against up to kBackwardKeys packed keys. Five products:
//
//   S  = K Q^T   [keys][queries]     P  = e^(S - lse)              dV += P  dO   [keys][dim_v]
//   dP = V dO^T  [keys][queries]     dS = P * (dP - delta)         dK += dS Q    [keys][dim]
//                                                                  dQ  = dS^T K  [queries][dim]
//
// The scheduler keeps a block of keys and iterates over the queries. dK and dV stay in scratch; each dQ is added to
// memory. For dQ alone the scheduler keeps queries and iterates over keys. Scores lie [key][query] as in the forward.
// The last three products read P and dS through strides.
#pragma once

#include "cpu/decode.h"
#include "cpu/row_sums.h"

namespace tandem::cpu::TANDEM_TARGET {

template <class Mma, class T, int Degree>
struct Backward {
  using Word = typename Mma::Word;
  static constexpr int kPair = Mma::kPair;
  static constexpr int64_t kPanels = (kBackwardRows + kPanel - 1) / kPanel;
  static constexpr int64_t kRowsPadded = kPanels * kPanel;
  static constexpr int64_t kStride = kRowsPadded + 16;  // floats between keys; not a power of two (cache conflicts)

  struct BackwardScratch {
    // The block of keys.
    Word *k, *v, *k_panels;  // rows, rows, columns in panels
    float *dk, *dv;          // [keys][dim padded]
    float* by_row;           // dout, out: [kPanel][dim padded], [dim padded][kPanel]
    // The tile of queries.
    PanelRows* rows;
    Word *q, *dout, *q_panels, *dout_panels;  // panels over queries; columns in panels over dim
    float *scores, *dscores;                  // [keys][kStride]: S then P, dP then dS
    Word *p_rows, *ds_rows, *ds_pairs;        // bf16 P, dS: [keys][kRowsPadded / 2], [keys / 2][rows]
    float* dq;                                // [queries][dim padded]
    TileMemory options;
    float* dropout;
    T* dout_rows;  // a float32 dout rounded to T for matrix products
    StreamedRows streamed;
    Word* row;
    int64_t k_stride, v_stride, q_words, v_words, k_columns, v_columns;  // columns: dim padded to kPanel
    size_t bytes;

    BackwardScratch(const Problem& p, void* base) : BackwardScratch(p, Arena(base)) {}

   private:
    BackwardScratch(const Problem& p, Arena a) : streamed(p, a) {
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
      by_row = a.take<float>(4 * kPanel * v_columns);
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

  // Products take 16-bit rows, so that a float32 dout is rounded where it is read.
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

  static void pack_queries(const Piece& piece, const PanelRows& rows, int64_t panel, const T* const* queries,
                           BackwardScratch& s) {
    const Problem& p = *piece.problem;
    if (piece.streamed_rows > 0) {
      for (int l = 0; l < rows.count; ++l) s.streamed.load(p, l, queries[l]);
      return;
    }
    pack_panel<Mma, T>({queries, rows.count}, p.head_dim, p.softmax_scale, s.row, s.q + panel * s.q_words * kPanel);
  }

  // Products of a panel's queries and the piece's packed keys from first_key on. Each sum is in the order of the
  // forward, so that these scores have the same bits as the scores of lse.
  static void multiply_keys(const Piece& piece, int64_t panel, int64_t first_key, BackwardScratch& s) {
    const Problem& p = *piece.problem;
    const int64_t count = piece.key_end - piece.key_begin;
    float* to = s.scores + first_key * kStride + panel * kPanel;
    if (piece.streamed_rows == 0) {
      return gemm<Mma>(count, {s.k + first_key * s.k_stride, s.k_stride, 1}, s.q + panel * s.q_words * kPanel,
                       words<Mma>(p.head_dim), {to, kStride, false});
    }
    const Sequence& q = piece.sequence;
    const Stream<T> stream(p, p.k, p.head_dim);
    for (int64_t j = 0; j < count; ++j) std::memset(to + j * kStride, 0, kPanel * sizeof(float));
    for (int64_t first = 0; first < count; first += kForwardKeys) {
      const T* keys[kForwardKeys];
      const int64_t n = minimum(kForwardKeys, count - first);
      for (int64_t j = 0; j < n; ++j) keys[j] = row_of<T>(p.k, q, q.k_begin, piece.key_begin + first + j, piece.head_k);
      const StreamedKeys<T> tile{keys, stream, n, p.head_dim};
      streamed_scores(s.streamed, s.rows[panel].count, streams_across(piece), tile, to + first * kStride, kStride);
    }
  }

  static void pack_rows(const Piece& piece, bool want_dkv, BackwardScratch& s) {
    const Problem& p = *piece.problem;
    const Sequence& q = piece.sequence;
    const T *queries[kRowsPadded], *gradients[kRowsPadded];
    int64_t count = 0;
    for (int64_t i = 0; i < kPanels && piece.row_begin + i * kPanel < piece.row_end; ++i) {
      const PanelRows* rows = s.rows + i;
      const int64_t first = count;
      for (int l = 0; l < rows->count; ++l, ++count) {
        queries[count] = row_of<T>(p.q, q, q.q_begin, rows->query[l], rows->head[l]);
        gradients[count] = dout_row(p, q, rows->query[l], rows->head[l], s.dout_rows + count * p.head_dim_v);
      }
      pack_queries(piece, *rows, i, queries + first, s);
      pack_panel<Mma, T>({gradients + first, rows->count}, p.head_dim_v, 1.0, s.row, s.dout + i * s.v_words * kPanel);
    }
    if (want_dkv) {
      pack_column_panels<Mma, T>({queries, count}, p.head_dim, kRowsPadded / kPair, s.row, s.q_panels);
      pack_column_panels<Mma, T>({gradients, count}, p.head_dim_v, kRowsPadded / kPair, s.row, s.dout_panels);
    }
  }

  // The keys of a tile that a panel processes, and the memory of their options.
  struct PanelKeys {
    int64_t begin = 0, end = 0;
    TileMemory options;

    explicit operator bool() const { return begin < end; }
    bool same(const PanelKeys& other) const { return begin == other.begin && end == other.end; }
  };

  static PanelKeys panel_keys(const Piece& piece, int64_t panel, const BackwardScratch& s) {
    PanelKeys keys;
    const ShownKeys shown =
        shown_keys(piece, s.rows[panel], piece.key_begin, piece.key_end - piece.key_begin, s.options, &keys.options);
    if (!shown) return keys;
    keys.begin = shown.begin, keys.end = shown.end;
    TileMemory& memory = keys.options;
    const int64_t at = keys.begin * kStride + panel * kPanel;
    if (memory.slope != nullptr) memory.slope += at;
    if (memory.unmodified != nullptr) memory.unmodified += at;
    if (shown.all) memory.visible = nullptr;
    if (memory.visible != nullptr) memory.visible += keys.begin * kPanel;
    return keys;
  }

  // The piece of a panel's keys.
  static Piece piece_of(const Piece& tile, const PanelKeys& keys) {
    Piece x = tile;
    x.key_begin = tile.key_begin + keys.begin;
    x.key_end = tile.key_begin + keys.end;
    return x;
  }

  // Computes P and dS of one panel and the piece's keys from S and dP.
  static void panel_gradients(const Piece& piece, int64_t panel, const PanelKeys& keys, RowTermsView terms,
                              BackwardScratch& s) {
    const PanelRows& rows = s.rows[panel];
    const Problem& p = *piece.problem;
    const int64_t count = piece.key_end - piece.key_begin;
    const int64_t at = keys.begin * kStride + panel * kPanel;
    float *scores = s.scores + at, *dscores = s.dscores + at;
    float* dropout = p.dropout.p > 0 ? s.dropout + at : nullptr;
    const ScoreUnit unit = unit_of(piece);
    finish_scores({piece, rows, piece.key_begin, count, scores, kStride}, unit, keys.options);
    if (dropout != nullptr) dropout_factors(piece, rows, piece.key_begin, count, dropout, kStride);

    const Probabilities<Degree> probability(piece, rows, unit.stored, terms);
    const VF f = set(unit.log2);
    if (probability.summed) {
      for (int64_t j = 0; j < count; ++j) {
        float* a = scores + j * kStride;
        for (int h = 0; h < kPanel; h += kLanes) store(probability.of_any(a, h, f), a + h);
      }
    }
    const VF d0 = load(probability.delta), d1 = load(probability.delta + kLanes), keep = set(keep_factor(p));
    for (int64_t j = 0; j < count; ++j) {
      float *a = scores + j * kStride, *b = dscores + j * kStride;
      const VF p0 = probability.summed ? load(a) : probability(a, 0, f);
      const VF p1 = probability.summed ? load(a + kLanes) : probability(a, kLanes, f);
      VF g0 = load(b), g1 = load(b + kLanes), kept0 = p0, kept1 = p1;
      if (dropout != nullptr) {
        const VF m0 = load(dropout + j * kStride), m1 = load(dropout + j * kStride + kLanes);
        kept0 = hn::Mul(p0, m0), kept1 = hn::Mul(p1, m1);
        g0 = hn::Mul(hn::Mul(g0, m0), keep), g1 = hn::Mul(hn::Mul(g1, m1), keep);
      }
      g0 = hn::Mul(p0, hn::Sub(g0, d0)), g1 = hn::Mul(p1, hn::Sub(g1, d1));
      store(kept0, a), store(kept1, a + kLanes);
      store(g0, b), store(g1, b + kLanes);
    }
  }

  // Converts dS to the gradient of the scaled products.
  static void through_softcap(const Piece& piece, int64_t panel, const PanelKeys& keys, BackwardScratch& s) {
    multiply_tile(s.dscores + keys.begin * kStride + panel * kPanel, keys.options.slope, kStride,
                  piece.key_end - piece.key_begin);
  }

  // Converts dS to the gradient of the scores that score_mod reads.
  static void through_mod(const Piece& piece, int64_t panel, const PanelKeys& keys, double* captured,
                          BackwardScratch& s) {
    const PanelRows& rows = s.rows[panel];
    const ModTile tile =
        mod_tile(piece, rows, piece.key_begin, piece.key_end - piece.key_begin, kStride, s.options.mods);
    modify_gradients(tile, rows.count, keys.options.unmodified, s.dscores + keys.begin * kStride + panel * kPanel,
                     captured);
  }

  static void clear_dscores(int64_t panel, int64_t first, int64_t end, BackwardScratch& s) {
    for (int64_t j = first; j < end; ++j)
      std::memset(s.dscores + j * kStride + panel * kPanel, 0, kPanel * sizeof(float));
  }

  // Neighbouring panels with the same keys.
  struct Run {
    int64_t first_panel, end_panel, rows, key, keys;
  };

#if TANDEM_HAS_BF16_DOT
  static void round_tiles(const Run& run, bool want_dkv, bool want_dq, BackwardScratch& s) {
    constexpr int64_t word_stride = kRowsPadded / 2;
    for (int64_t panel = run.first_panel; panel < run.end_panel; ++panel) {
      const float *p = s.scores + panel * kPanel, *ds = s.dscores + panel * kPanel;
      for (int64_t j = run.key; want_dkv && j < run.key + run.keys; ++j) {
        const int64_t at = j * word_stride + panel * kLanes;
        store(join_bf16(load(p + j * kStride), load(p + j * kStride + kLanes)), s.p_rows + at);
        store(join_bf16(load(ds + j * kStride), load(ds + j * kStride + kLanes)), s.ds_rows + at);
      }
      if (want_dq) {
        pair_keys(ds + run.key * kStride, kStride, run.keys, s.ds_pairs + run.key / 2 * kRowsPadded + panel * kPanel,
                  kRowsPadded);
      }
    }
  }
#endif

  // Returns false, without computing, if no row sees a key.
  static bool tile(const Piece& piece, RowTermsView terms, bool want_dkv, bool want_dq, double* captured, void* base) {
    const Problem& p = *piece.problem;
    BackwardScratch s(p, base);
    const int64_t count = piece.key_end - piece.key_begin;
    const int64_t panels = (piece.row_end - piece.row_begin + kPanel - 1) / kPanel;
    PanelKeys keys[kPanels];
    bool packed = false;
    for (int64_t i = 0; i < panels; ++i) fill_rows(piece, piece.row_begin + i * kPanel, s.rows + i);
    for (int64_t i = 0; i < panels; ++i) {
      keys[i] = panel_keys(piece, i, s);
      if (!want_dkv && !want_dq) {  // add_dbias() reads the whole tile
        clear_dscores(i, 0, keys[i].begin, s);
        clear_dscores(i, keys[i].end, count, s);
      }
      if (!keys[i]) continue;
      if (!packed) pack_rows(piece, want_dkv, s);
      packed = true;
      const Piece x = piece_of(piece, keys[i]);
      multiply_keys(x, i, keys[i].begin, s);
      gemm<Mma>(keys[i].end - keys[i].begin, {s.v + keys[i].begin * s.v_stride, s.v_stride, 1},
                s.dout + i * s.v_words * kPanel, words<Mma>(p.head_dim_v),
                {s.dscores + keys[i].begin * kStride + i * kPanel, kStride, false});
      panel_gradients(x, i, keys[i], terms, s);
      if (p.score_mod.present) through_mod(x, i, keys[i], captured, s);
      if (p.softcap != 0 && (want_dkv || want_dq)) through_softcap(x, i, keys[i], s);
    }
    if (packed && (want_dkv || want_dq)) products(piece, keys, want_dkv, want_dq, s);
    return packed;
  }

  static void products(const Piece& piece, const PanelKeys* keys, bool want_dkv, bool want_dq, BackwardScratch& s) {
    const int64_t row_count = piece.row_end - piece.row_begin, panels = (row_count + kPanel - 1) / kPanel;
    for (int64_t i = 0, next; i < panels; i = next) {
      for (next = i + 1; next < panels && keys[next].same(keys[i]);) ++next;
      const Run run{i, next, minimum(row_count, next * kPanel) - i * kPanel, keys[i].begin,
                    keys[i].end - keys[i].begin};
      if (keys[i]) {
        run_products(run, want_dkv, want_dq, s);
      } else if (want_dq) {
        std::memset(s.dq + i * kPanel * s.k_columns, 0, static_cast<size_t>(run.rows * s.k_columns) * sizeof(float));
      }
    }
  }

  static void run_products(const Run& run, bool want_dkv, bool want_dq, BackwardScratch& s) {
    const int64_t row = run.first_panel * kPanel;
    Broadcast<Word> p_rows, ds_rows, ds_columns;
    if constexpr (kPair == 1) {
      p_rows = {s.scores + run.key * kStride + row, kStride, 1};
      ds_rows = {s.dscores + run.key * kStride + row, kStride, 1};
      ds_columns = {s.dscores + run.key * kStride + row, 1, kStride};
    } else {
      round_tiles(run, want_dkv, want_dq, s);
      p_rows = {s.p_rows + run.key * (kRowsPadded / 2) + row / 2, kRowsPadded / 2, 1};
      ds_rows = {s.ds_rows + run.key * (kRowsPadded / 2) + row / 2, kRowsPadded / 2, 1};
      ds_columns = {s.ds_pairs + run.key / 2 * kRowsPadded + row, 1, kRowsPadded};
    }
    constexpr int64_t row_capacity = kRowsPadded / kPair, key_capacity = kBackwardKeys / kPair;
    const int64_t first_row = row / kPair, first_key = run.key / kPair;
    if (want_dkv) {
      for (int64_t c = 0; c < s.v_columns; c += kPanel)
        gemm<Mma>(run.keys, p_rows, s.dout_panels + (c / kPanel * row_capacity + first_row) * kPanel,
                  words<Mma>(run.rows), {s.dv + run.key * s.v_columns + c, s.v_columns, true});
      for (int64_t c = 0; c < s.k_columns; c += kPanel)
        gemm<Mma>(run.keys, ds_rows, s.q_panels + (c / kPanel * row_capacity + first_row) * kPanel,
                  words<Mma>(run.rows), {s.dk + run.key * s.k_columns + c, s.k_columns, true});
    }
    if (want_dq) {
      for (int64_t c = 0; c < s.k_columns; c += kPanel)
        gemm<Mma>(run.rows, ds_columns, s.k_panels + (c / kPanel * key_capacity + first_key) * kPanel,
                  words<Mma>(run.keys), {s.dq + row * s.k_columns + c, s.k_columns, false});
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
      if (p.dv.present) put(p.dv, key, s.dv + j * s.v_columns, p.head_dim_v, keep_factor(p));
    }
  }

  static void add_dbias(const Piece& piece, double* sum, int64_t query_stride, int64_t key_stride, void* base) {
    BackwardScratch s(*piece.problem, base);
    for (int64_t row = piece.row_begin; row < piece.row_end; ++row) {
      const float* ds = s.dscores + (row - piece.row_begin);
      double* to = sum + (row - piece.row_begin) * query_stride;
      for (int64_t j = 0; j < piece.key_end - piece.key_begin; ++j) to[j * key_stride] += ds[j * kStride];
    }
  }

  static ScoreUnit unit_of(const Piece& piece) {
    return score_unit(*piece.problem, piece.streamed_rows > 0 || Mma::kPair == 1);
  }
};

}  // namespace tandem::cpu::TANDEM_TARGET
