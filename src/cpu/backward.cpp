// Schedules the backward. Each phase is a parallel loop over items:
//
//   1. rows     delta = rowsum(dout * out) - dlse; sums of rows whose lse has too few digits; dq cleared
//   2. keys     an item holds a block of keys, walks over the queries that see it, keeps dK and dV, and adds its share
//               of dQ to a float32 accumulator. Blocks add to a tile of queries in the order of their keys; each
//               waits for its turn. Sums are bitwise equal on any number of threads. Items start in the
//               same order, so every earlier block is already running.
//   3. bias     dbias and dsink, each element summed by one thread in a fixed order
//   4. captured the gradients of the tensors that a score_mod reads: a fixed number of parts share the tiles. Each part
//               adds its tiles in order to a separate float64 table; the tables are added up in order
//
// A float32 dq is its own accumulator, which is not cleared for `accumulate`. The accumulator of a 16-bit dq is a slot
// of the workspace, converted when the last block of its head is done. Heads share a few slots in turn. If not even the
// accumulator of one head fits the budget, a separate loop over queries computes dQ, which costs seven products instead
// of five.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "cpu/cpu.h"
#include "cpu/schedule.h"
#include "problem/bound_expression.h"
#include "problem/convert.h"

namespace tandem::cpu {

namespace {

constexpr int64_t kMaxParts = 64;                          // captured gradients: the most threads that share the work
constexpr int64_t kTableBudget = (int64_t{16} << 20) / 8;  // cells of all tables, unless one table has more
constexpr size_t kSlotBudget = size_t{8} << 20;            // bytes; more where the inputs are large themselves

struct Head {  // for one (sequence, key head)
  int32_t sequence, head_k;
  int64_t cost;
  int64_t first_tile;  // row tiles of this head in Layout::turns
  std::atomic<int32_t> blocks_left;
};

struct Item {
  int32_t head, index;  // block of keys, or tile of rows
};

struct BackwardLayout {
  bool want_dq, want_dkv, slots_needed, separate_dq;
  int64_t slot_floats, slots;
  RowTerms* terms;  // [row of q][heads_q]
  Head* heads;
  int32_t* order;
  Item* items;
  std::atomic<int32_t>* turns;      // per row tile: the block whose turn it is
  std::atomic<int32_t>* slot_head;  // per slot: the head that may use it
  float* accumulators;
  int64_t parts, cells;  // captured gradients: number of tables, elements of each
  double* tables;        // [parts][cells]
  std::byte* scratch;
  size_t scratch_bytes, bytes;

  BackwardLayout(const Problem& p, int threads, void* base) {
    want_dq = p.dq.present;
    want_dkv = p.dk.present || p.dv.present;
    slots_needed = want_dq && want_dkv && p.dq.dtype != DType::f32;
    slot_floats = std::min(p.seqlen_q, p.total_q) * p.group() * p.head_dim;
    const int64_t head_count = p.batch * p.heads_k;
    const auto slot_bytes = static_cast<size_t>(slot_floats) * sizeof(float);
    const auto q_bytes = static_cast<size_t>(p.total_q * p.heads_q * p.head_dim * size_of(p.dtype));
    const size_t budget = std::max(kSlotBudget, q_bytes / 2);
    slots =
        slots_needed && slot_bytes > 0 ? std::min<int64_t>(head_count, static_cast<int64_t>(budget / slot_bytes)) : 0;
    separate_dq = want_dq && (!want_dkv || (slots_needed && slots == 0));

    const int64_t blocks =
        p.heads_k * (ceil_div(p.packed_k() ? p.total_k : p.batch * p.seqlen_k, kBackwardKeys) + p.batch);
    const int64_t tiles = p.heads_k * (ceil_div(p.total_q * p.group(), kBackwardRows) + p.batch);
    Workspace w(base);
    terms = w.take<RowTerms>(p.total_q * p.heads_q);
    heads = w.take<Head>(head_count);
    order = w.take<int32_t>(head_count);
    items = w.take<Item>(std::max(blocks, tiles));
    turns = w.take<std::atomic<int32_t>>(tiles);
    slot_head = w.take<std::atomic<int32_t>>(slots);
    accumulators = w.take<float>(slots * slot_floats);
    cells = p.score_mod ? p.score_mod->cells : 0;
    parts = cells > 0 ? std::clamp<int64_t>(kTableBudget / cells, 1, std::clamp<int64_t>(tiles, 1, kMaxParts)) : 0;
    tables = w.take<double>(parts * cells);
    const auto local = std::max<size_t>(static_cast<size_t>(kBackwardRows * p.head_dim) * sizeof(float),
                                        p.dbias ? kBackwardRows * kBackwardKeys * sizeof(double) : 0);
    scratch_bytes = scratch_stride(kernels().backward_scratch(p)) + local;
    scratch = w.take<std::byte>(static_cast<int64_t>(scratch_bytes) * threads);
    bytes = w.bytes();
  }

  // The part of a tile's memory after the kernel's scratch.
  template <class T>
  T* local(const Problem& p, std::byte* mine) const {
    return reinterpret_cast<T*>(mine + scratch_stride(kernels().backward_scratch(p)));
  }
};

void wait_for(const std::atomic<int32_t>& value, int32_t wanted) {
  for (int spin = 0; spin < 2000; ++spin)
    if (value.load(std::memory_order_acquire) == wanted) return;
  for (int32_t seen; (seen = value.load(std::memory_order_acquire)) != wanted;) value.wait(seen);
}

void announce(std::atomic<int32_t>* value, int32_t now) {
  value->store(now, std::memory_order_release);
  value->notify_all();
}

// The index of the sequence's first row in the terms, which cover all rows of q.
int64_t row_of(const Sequence& s, const Problem& p) { return p.packed_q() ? s.q_begin : s.batch_index * p.seqlen_q; }

class Backward {
 public:
  Backward(const Problem& p, Threads& threads, void* workspace)
      : p_(p), threads_(threads), layout_(p, threads.count(), workspace) {}

  void run() {
    plan_heads();
    rows_phase();
    if (layout_.want_dkv) keys_phase();
    if (layout_.separate_dq) queries_phase();
    if (p_.dbias) bias_phase();
    if (p_.dsink) sink_phase();
    if (layout_.parts > 0) captured_phase();
    if (p_.accumulate) return;  // zero is added to unused elements
    clear_unused_rows(p_, p_.dq, true, p_.heads_q, p_.head_dim);
    clear_unused_rows(p_, p_.dk, false, p_.heads_k, p_.head_dim);
    clear_unused_rows(p_, p_.dv, false, p_.heads_k, p_.head_dim_v);
  }

 private:
  Piece piece(const Head& head) const {
    return whole_piece(p_, sequence_of(p_, head.sequence), head.sequence, head.head_k);
  }
  static int64_t blocks(const Piece& x) { return ceil_div(x.key_end, kBackwardKeys); }
  static int64_t tiles(const Piece& x) { return ceil_div(x.row_end, kBackwardRows); }

  void set_block(Piece* x, const Piece& whole, int64_t block) const {
    x->key_begin = block * kBackwardKeys;
    x->key_end = std::min(whole.key_end, x->key_begin + kBackwardKeys);
  }
  void set_tile(Piece* x, const Piece& whole, int64_t tile) const {
    x->row_begin = tile * kBackwardRows;
    x->row_end = std::min(whole.row_end, x->row_begin + kBackwardRows);
  }

  // The blocks of keys [first, end) that may have visible keys for a tile of rows.
  KeySpan blocks_of_tile(const Piece& whole, int64_t tile) const {
    Piece x = whole;
    set_tile(&x, whole, tile);
    const KeySpan keys = keys_of_rows(p_, whole.sequence, whole.heads, x.row_begin, x.row_end);
    return {keys.begin / kBackwardKeys, ceil_div(keys.end, kBackwardKeys)};
  }

  // Returns true if the block mask lets any query of a tile see any key of a block.
  bool masks_in(const Piece& whole, int64_t tile, int64_t block) const {
    const BlockMaskView& mask = p_.block_mask;
    if (!mask) return true;
    Piece x = whole;
    set_tile(&x, whole, tile);
    set_block(&x, whole, block);
    const int64_t heads = mask.head_stride == 0 ? 1 : x.heads, last_query = (x.row_end - 1) / x.heads;
    for (int64_t h = x.head_first; h < x.head_first + heads; ++h) {
      for (int64_t i = x.row_begin / x.heads; i <= last_query; i = (i / mask.block_q + 1) * mask.block_q) {
        for (int64_t j = x.key_begin; j < x.key_end; j = (j / mask.block_k + 1) * mask.block_k)
          if (mask.at(x.sequence.batch_index, h, i, j) != BlockState::hidden) return true;
      }
    }
    return false;
  }

  // Returns the first block in [block, end) that the tile needs, or `end`.
  int64_t next_block(const Piece& whole, int64_t tile, int64_t block, int64_t end) const {
    while (block < end && !masks_in(whole, tile, block)) ++block;
    return block;
  }

  RowTermsView terms_of(const Piece& x) const {
    return {layout_.terms + row_of(x.sequence, p_) * p_.heads_q, p_.heads_q, 1};
  }

  // Stores a row of a gradient, or adds it to the stored row.
  void put_row(DType type, const float* from, int64_t n, void* to) const {
    (p_.accumulate ? kernels().add_row : kernels().store_row)(type, from, n, to);
  }

  int32_t first_block(const Piece& whole, int64_t tile) const {
    const KeySpan range = blocks_of_tile(whole, tile);
    return static_cast<int32_t>(next_block(whole, tile, range.begin, range.end));
  }

  // Heads in order of falling cost, so that the longest sequences of a packed batch are not the last to start.
  void plan_heads() {
    count_ = 0;
    work_ = 0;
    int64_t tile_count = 0;
    for (int64_t b = 0; b < p_.batch; ++b) {
      const Sequence s = sequence_of(p_, b);
      for (int64_t h = 0; h < p_.heads_k; ++h) {
        Head* head = new (layout_.heads + count_)
            Head{static_cast<int32_t>(b), static_cast<int32_t>(h), s.q_len * s.k_len, tile_count, {}};
        const Piece whole = piece(*head);
        head->blocks_left.store(static_cast<int32_t>(blocks(whole)), std::memory_order_relaxed);
        for (int64_t t = 0; t < tiles(whole); ++t)
          new (layout_.turns + tile_count++) std::atomic<int32_t>(first_block(whole, t));
        work_ += 2.5 * static_cast<double>(s.q_len * p_.group()) * static_cast<double>(s.k_len + 16) *
                 static_cast<double>(p_.head_dim + p_.head_dim_v);
        layout_.order[count_] = static_cast<int32_t>(count_);
        ++count_;
      }
    }
    std::sort(layout_.order, layout_.order + count_, [&](int32_t a, int32_t b) {
      const int64_t x = layout_.heads[a].cost, y = layout_.heads[b].cost;
      return x != y ? x > y : a < b;
    });
  }

  // Items: every tile of rows of every head.
  int64_t list_tiles() {
    int64_t n = 0;
    for (int64_t h = 0; h < count_; ++h)
      for (int64_t t = 0; t < tiles(piece(layout_.heads[h])); ++t)
        layout_.items[n++] = {static_cast<int32_t>(h), static_cast<int32_t>(t)};
    return n;
  }

  void rows_phase() {
    const int64_t n = list_tiles();
    for_each_item(
        threads_, {Take::kInOrder, n, work_ / 8}, layout_.scratch, layout_.scratch_bytes,
        [&](int64_t i, std::byte* scratch) {
          const Piece whole = piece(layout_.heads[layout_.items[i].head]);
          Piece x = whole;
          set_tile(&x, whole, layout_.items[i].index);
          const auto needed = [&](int64_t key) { return masks_in(whole, layout_.items[i].index, key / kBackwardKeys); };
          const BlockFilter blocks{
              [](const void* f, int64_t key) { return (*static_cast<const decltype(needed)*>(f))(key); }, &needed};
          kernels().row_terms(x, terms_of(x), blocks, scratch);
          if (!p_.dq || p_.accumulate) return;
          for (int64_t r = x.row_begin; r < x.row_end; ++r)
            std::memset(p_.dq.at(x.sequence.batch_index, x.sequence.q_begin + r / x.heads, x.head_first + r % x.heads),
                        0, static_cast<size_t>(p_.head_dim * size_of(p_.dq.dtype)));
        });
  }

  // ---- dK, dV and dQ together ----

  void keys_phase() {
    for (int64_t i = 0; i < layout_.slots; ++i)
      new (layout_.slot_head + i) std::atomic<int32_t>(static_cast<int32_t>(i));
    std::memset(layout_.accumulators, 0, static_cast<size_t>(layout_.slots * layout_.slot_floats) * sizeof(float));
    int64_t n = 0;
    int32_t turn = 0;  // number of earlier heads with blocks
    for (int64_t i = 0; i < count_; ++i) {
      Head& head = layout_.heads[layout_.order[i]];
      const int64_t all = blocks(piece(head));
      for (int64_t j = 0; j < all; ++j) layout_.items[n++] = {layout_.order[i], static_cast<int32_t>(j)};
      if (all > 0) head.cost = turn++;  // the order is settled: cost now holds the turn
    }
    for_each_item(threads_, {Take::kInOrder, n, work_}, layout_.scratch, layout_.scratch_bytes,
                  [&](int64_t i, std::byte* scratch) { keys_item(layout_.items[i], scratch); });
  }

  void keys_item(const Item& item, std::byte* scratch) {
    Head& head = layout_.heads[item.head];
    const Piece whole = piece(head);
    const bool with_dq = layout_.want_dq && !layout_.separate_dq;
    const auto turn = static_cast<int32_t>(head.cost);
    if (layout_.slots > 0 && with_dq) wait_for(layout_.slot_head[turn % layout_.slots], turn);
    Piece x = whole;
    set_block(&x, whole, item.index);
    kernels().backward_keys(x, true, with_dq, scratch);
    for (int64_t t = 0; t < tiles(whole); ++t) {
      const KeySpan range = blocks_of_tile(whole, t);
      if (item.index < range.begin || item.index >= range.end || !masks_in(whole, t, item.index)) continue;
      set_tile(&x, whole, t);
      const bool any = kernels().backward_tile(x, terms_of(x), true, with_dq, nullptr, scratch);
      if (!with_dq) continue;
      std::atomic<int32_t>& its_turn = layout_.turns[head.first_tile + t];
      wait_for(its_turn, item.index);
      if (any) kernels().backward_add_dq(x, accumulator(x, turn), scratch);
      announce(&its_turn, static_cast<int32_t>(next_block(whole, t, item.index + 1, range.end)));
    }
    kernels().backward_store_dkv(x, scratch);
    if (head.blocks_left.fetch_sub(1, std::memory_order_acq_rel) == 1 && layout_.slots > 0 && with_dq)
      release_slot(whole, turn);
  }

  RowAccumulator accumulator(const Piece& x, int32_t turn) const {
    if (layout_.slots > 0) {
      float* slot = layout_.accumulators + turn % layout_.slots * layout_.slot_floats;
      return {slot, x.heads * p_.head_dim, p_.head_dim, 0};
    }
    return {reinterpret_cast<float*>(p_.dq.at(x.sequence.batch_index, x.sequence.q_begin, x.head_first)), p_.dq.row,
            p_.dq.head, 0};
  }

  // Converts a finished head's dQ, and leaves the slot clear for the head that waits for it.
  void release_slot(const Piece& whole, int32_t turn) {
    float* slot = layout_.accumulators + turn % layout_.slots * layout_.slot_floats;
    for (int64_t r = 0; r < whole.row_end; ++r)
      put_row(p_.dq.dtype, slot + r * p_.head_dim, p_.head_dim,
              p_.dq.at(whole.sequence.batch_index, whole.sequence.q_begin + r / whole.heads,
                       whole.head_first + r % whole.heads));
    std::memset(slot, 0, static_cast<size_t>(whole.row_end * p_.head_dim) * sizeof(float));
    announce(&layout_.slot_head[turn % layout_.slots], turn + static_cast<int32_t>(layout_.slots));
  }

  // ---- dQ without dK and dV ----

  void queries_phase() {
    int64_t n = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t all = tiles(piece(layout_.heads[layout_.order[i]]));
      // Under a causal mask the last rows see most keys, so that they go first.
      for (int64_t t = all - 1; t >= 0; --t) layout_.items[n++] = {layout_.order[i], static_cast<int32_t>(t)};
    }
    for_each_item(threads_, {Take::kInOrder, n, work_}, layout_.scratch, layout_.scratch_bytes,
                  [&](int64_t i, std::byte* scratch) { queries_item(layout_.items[i], scratch); });
  }

  void queries_item(const Item& item, std::byte* scratch) {
    const Piece whole = piece(layout_.heads[item.head]);
    Piece x = whole;
    set_tile(&x, whole, item.index);
    auto* dq = layout_.local<float>(p_, scratch);
    std::memset(dq, 0, static_cast<size_t>((x.row_end - x.row_begin) * p_.head_dim) * sizeof(float));
    const KeySpan range = blocks_of_tile(whole, item.index);
    for (int64_t block = range.begin; block < range.end; ++block) {
      if (!masks_in(whole, item.index, block)) continue;
      set_block(&x, whole, block);
      kernels().backward_keys(x, false, true, scratch);
      if (!kernels().backward_tile(x, terms_of(x), false, true, nullptr, scratch)) continue;
      kernels().backward_add_dq(x, {dq, x.heads * p_.head_dim, p_.head_dim, x.row_begin * p_.head_dim}, scratch);
    }
    for (int64_t r = x.row_begin; r < x.row_end; ++r)
      put_row(p_.dq.dtype, dq + (r - x.row_begin) * p_.head_dim, p_.head_dim,
              p_.dq.at(x.sequence.batch_index, x.sequence.q_begin + r / x.heads, x.head_first + r % x.heads));
  }

  // ---- dbias: one item per block of its elements, which sums over the broadcast dimensions ----

  void bias_phase() {
    const int64_t* shape = p_.dbias.shape;
    const int64_t query_tiles = shape[2] == 1 ? 1 : ceil_div(shape[2], kBackwardRows);
    const int64_t key_blocks = shape[3] == 1 ? 1 : ceil_div(shape[3], kBackwardKeys);
    const int64_t items = shape[0] * shape[1] * query_tiles * key_blocks;
    for_each_item(threads_, {Take::kInOrder, items, work_}, layout_.scratch, layout_.scratch_bytes,
                  [&](int64_t i, std::byte* scratch) {
                    const int64_t block = i % key_blocks, tile = i / key_blocks % query_tiles;
                    const int64_t h = i / (key_blocks * query_tiles) % shape[1],
                                  b = i / (key_blocks * query_tiles * shape[1]);
                    bias_item(b, h, tile, block, scratch);
                  });
  }

  void bias_item(int64_t b, int64_t h, int64_t tile, int64_t block, std::byte* scratch) {
    const BiasView& to = p_.dbias;
    const bool one_batch = to.shape[0] == 1, one_head = to.shape[1] == 1;
    const bool one_query = to.shape[2] == 1, one_key = to.shape[3] == 1;
    auto* sum = layout_.local<double>(p_, scratch);
    std::memset(sum, 0, sizeof(double) * kBackwardRows * kBackwardKeys);
    for (int64_t bb = one_batch ? 0 : b; bb < (one_batch ? p_.batch : b + 1); ++bb) {
      for (int64_t hh = one_head ? 0 : h; hh < (one_head ? p_.heads_q : h + 1); ++hh) {
        Piece whole = whole_piece(p_, sequence_of(p_, bb), bb, hh / p_.group());
        whole.head_first = hh, whole.heads = 1, whole.row_end = whole.sequence.q_len;
        const int64_t tile_end = one_query ? tiles(whole) : std::min(tiles(whole), tile + 1);
        for (int64_t t = one_query ? 0 : tile; t < tile_end; ++t) {
          const KeySpan range = blocks_of_tile(whole, t);
          const int64_t first = std::max(range.begin, one_key ? 0 : block);
          const int64_t end = std::min(range.end, one_key ? range.end : block + 1);
          for (int64_t j = first; j < end; ++j) {
            if (!masks_in(whole, t, j)) continue;
            Piece x = whole;
            set_tile(&x, whole, t);
            set_block(&x, whole, j);
            kernels().backward_keys(x, false, false, scratch);
            if (!kernels().backward_tile(x, terms_of(x), false, false, nullptr, scratch)) continue;
            kernels().backward_add_dbias(x, sum, one_query ? 0 : kBackwardKeys, one_key ? 0 : 1, scratch);
          }
        }
      }
    }
    const int64_t row = one_query ? 0 : tile * kBackwardRows, key = one_key ? 0 : block * kBackwardKeys;
    for (int64_t r = row; r < std::min(to.shape[2], row + kBackwardRows); ++r)
      for (int64_t j = key; j < std::min(to.shape[3], key + kBackwardKeys); ++j) {
        const auto value = static_cast<float>(sum[(r - row) * kBackwardKeys + (j - key)]);
        put_row(to.dtype, &value, 1, to.at(b, h, r, j));
      }
  }

  // ---- dsink = -sum over rows of P_sink * delta ----

  void sink_phase() {
    for_each_item(threads_, {Take::kInOrder, p_.heads_q, work_ / 8}, layout_.scratch, layout_.scratch_bytes,
                  [&](int64_t h, std::byte*) {
                    float sink = 0;
                    kernels().load_row(p_.sink.dtype, p_.sink.at(0, h), 1, &sink);
                    double sum = 0;
                    for (int64_t b = 0; b < p_.batch; ++b) {
                      const Sequence s = sequence_of(p_, b);
                      for (int64_t i = 0; i < s.q_len; ++i) {
                        const float lse = *reinterpret_cast<const float*>(p_.lse.at(s.batch_index, s.q_begin + i, h));
                        if (std::isinf(lse) && lse < 0) continue;  // the sink itself is -inf
                        const RowTerms& row = layout_.terms[(row_of(s, p_) + i) * p_.heads_q + h];
                        const double p = row.inverse_sum != 0 ? row.sink : std::exp(static_cast<double>(sink) - lse);
                        sum -= p * row.delta;
                      }
                    }
                    const auto value = static_cast<float>(sum);
                    put_row(p_.dsink.dtype, &value, 1, p_.dsink.at(0, h));
                  });
  }

  // ---- Gradients of the tensors that a score_mod reads ----

  void captured_phase() {
    const int64_t n = list_tiles();
    const int64_t cells = layout_.cells;
    for_each_item(threads_, {Take::kInOrder, layout_.parts, work_}, layout_.scratch, layout_.scratch_bytes,
                  [&](int64_t part, std::byte* scratch) {
                    double* table = layout_.tables + part * cells;
                    std::fill_n(table, cells, 0.0);
                    for (int64_t i = part; i < n; i += layout_.parts) captured_item(layout_.items[i], table, scratch);
                  });
    for (int64_t part = 1; part < layout_.parts; ++part)
      for (int64_t i = 0; i < cells; ++i) layout_.tables[i] += layout_.tables[part * cells + i];
    each_captured(*p_.score_mod.read, [&](const BiasView& to, std::byte* at, int64_t cell) {
      store(to.dtype, at, layout_.tables[cell] + (p_.accumulate ? load(to.dtype, at) : 0));
    });
  }

  void captured_item(const Item& item, double* table, std::byte* scratch) {
    const Piece whole = piece(layout_.heads[item.head]);
    Piece x = whole;
    set_tile(&x, whole, item.index);
    const KeySpan range = blocks_of_tile(whole, item.index);
    for (int64_t block = range.begin; block < range.end; ++block) {
      if (!masks_in(whole, item.index, block)) continue;
      set_block(&x, whole, block);
      kernels().backward_keys(x, false, false, scratch);
      kernels().backward_tile(x, terms_of(x), false, false, table, scratch);
    }
  }

  const Problem& p_;
  Threads& threads_;
  const BackwardLayout layout_;
  int64_t count_ = 0;  // heads
  double work_ = 0;    // multiply-adds of the five products
};

}  // namespace

size_t backward_workspace_size(const Problem& p, int threads) { return BackwardLayout(p, threads, nullptr).bytes; }

void backward(const Problem& p, Threads& threads, void* workspace) { Backward(p, threads, workspace).run(); }

}  // namespace tandem::cpu
