// Computes a block mask from a mask_mod like kernels/prepost/make_blocks.cuh: a state for each block, and lists of
// states. Interval arithmetic decides a block if it can.
#include <algorithm>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/schedule.h"
#include "problem/bound_expression.h"
#include "score_mod/ranges.h"
#include "score_mod/tile.h"

namespace tandem::cpu {
namespace {

enum class State : uint8_t { empty, partial, full };

// Evaluates mask_mod for the blocks of one thread.
class Asker {
 public:
  Asker(const MakeBlocksProblem& problem, float* memory)
      : m_(problem),
        program_(*problem.mask_mod->program),
        ranges_(program_.mod.graph, {&program_.mod.result, 1}, problem.mask_mod->values),
        run_(program_.result_tiles, problem.mask_mod->values, memory) {}

  State state_of(int64_t batch, int64_t head, int64_t i, int64_t j) {
    const int64_t q = i * m_.block_q, rows = std::min(m_.block_q, m_.seqlen_q - q);
    const int64_t k = j * m_.block_k, keys = std::min(m_.block_k, m_.seqlen_k - k);
    const bool whole = rows == m_.block_q && keys == m_.block_k;  // torch's rule: a block that ends early is never full
    ranges_.run({one(batch), one(head), range(q, rows), range(k, keys), one(m_.seqlen_q), one(m_.seqlen_k)});
    const IntRange seen = ranges_.integers(program_.mod.result);
    bool some = seen.low != 0, hidden = seen.high == 0;
    if (!is_point(seen)) {
      run_.begin({.batch = static_cast<int32_t>(batch),
                  .seqlen_q = static_cast<int32_t>(m_.seqlen_q),
                  .seqlen_k = static_cast<int32_t>(m_.seqlen_k)});
      std::fill_n(head_, score_mod::kTile, static_cast<int32_t>(head));
      for (int64_t row = q; row < q + rows && !(some && hidden); ++row) {
        std::fill_n(q_, score_mod::kTile, static_cast<int32_t>(row));
        for (int64_t key = k; key < k + keys && !(some && hidden); key += score_mod::kTile)
          ask(key, static_cast<int>(std::min<int64_t>(score_mod::kTile, k + keys - key)), &some, &hidden);
      }
    }
    return !some ? State::empty : hidden || !whole ? State::partial : State::full;
  }

 private:
  static IntRange one(int64_t x) { return range_of(static_cast<int>(x)); }
  static IntRange range(int64_t first, int64_t count) {
    return {static_cast<int>(first), static_cast<int>(first + count - 1)};
  }
  void ask(int64_t key, int count, bool* some, bool* hidden) {
    for (int n = 0; n < count; ++n) k_[n] = static_cast<int32_t>(key + n);
    run_.run({.count = count, .head = head_, .q = q_, .k = k_});
    int32_t any = 0, all = 1;
    for (const int32_t seen : run_.integers(0)) any |= seen, all &= seen;
    *some = *some || any != 0;
    *hidden = *hidden || all == 0;
  }

  const MakeBlocksProblem& m_;
  const score_mod::Program& program_;
  score_mod::RangeEvaluator ranges_;
  score_mod::TileRun run_;
  int32_t head_[score_mod::kTile], q_[score_mod::kTile], k_[score_mod::kTile];
};

// The states of a row of blocks: column j has states[j * step].
struct ListRow {
  int64_t batch, head, number;
  const State* states;
  int64_t step, columns;
};

// Writes one row of one list: first the columns with a state between these two, then the remaining columns.
void list_row(const MadeList& list, const ListRow& row, State least, State most) {
  const int64_t batch = row.batch, head = row.head, number = row.number, columns = row.columns;
  int32_t* const index =
      list.index + batch * list.index_stride[0] + head * list.index_stride[1] + number * list.index_stride[2];
  const auto is_listed = [&](int64_t column) {
    return least <= row.states[column * row.step] && row.states[column * row.step] <= most;
  };
  int64_t listed = 0;
  for (int64_t column = 0; column < columns; ++column) listed += is_listed(column);
  int64_t at = 0, others = listed;
  for (int64_t column = 0; column < columns; ++column)
    index[(is_listed(column) ? at++ : others++) * list.index_stride[3]] = static_cast<int32_t>(column);
  list.count[batch * list.count_stride[0] + head * list.count_stride[1] + number * list.count_stride[2]] =
      static_cast<int32_t>(listed);
}

}  // namespace

void make_blocks(const MakeBlocksProblem& m, Threads& threads, std::byte* workspace) {
  auto* const states = reinterpret_cast<State*>(workspace);
  const double work = static_cast<double>(m.blocks()) * 64;
  const size_t floats = m.mask_mod->program->result_tiles.floats() + 16;
  std::vector<float> memory(floats * static_cast<size_t>(threads.count()));
  // A row of blocks at once.
  for_each_item(threads, {Take::kInSections, m.lists() * m.blocks_q, work}, reinterpret_cast<std::byte*>(memory.data()),
                floats * sizeof(float), [&](int64_t item, std::byte* own) {
                  Asker asker(m, reinterpret_cast<float*>(own));
                  const int64_t list = item / m.blocks_q;
                  for (int64_t j = 0; j < m.blocks_k; ++j)
                    states[item * m.blocks_k + j] =
                        asker.state_of(list / m.heads, list % m.heads, item % m.blocks_q, j);
                });
  const int64_t of_queries = m.lists() * m.blocks_q;
  for_each_item(threads, {Take::kInSections, m.rows(), work}, nullptr, 0, [&](int64_t item, std::byte*) {
    const int by_keys = item >= of_queries;
    const int64_t rows = by_keys ? m.blocks_k : m.blocks_q, columns = by_keys ? m.blocks_q : m.blocks_k;
    const int64_t number = item - (by_keys ? of_queries : 0), list = number / rows, row = number % rows;
    const int64_t place = list * m.blocks_q * m.blocks_k + (by_keys ? row : row * m.blocks_k);
    const State* const first = columns > 0 ? states + place : states;  // no columns: no states to point into
    const ListRow x{list / m.heads, list % m.heads, row, first, by_keys ? m.blocks_k : 1, columns};
    list_row(m.partial[by_keys], x, State::partial, m.full[by_keys] ? State::partial : State::full);
    if (m.full[by_keys]) list_row(m.full[by_keys], x, State::full, State::full);
  });
}

}  // namespace tandem::cpu
