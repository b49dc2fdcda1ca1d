// Fills the pages of an Instance and their table.
#include <algorithm>
#include <limits>
#include <numeric>

#include "support/instance.h"
#include "support/random.h"

namespace tandem::test {

// The first key that query 0 of a sequence sees; all keys of a sequence without queries are unseen.
int64_t Instance::first_seen_key(int64_t b) const {
  if (used_q(c, b) == 0) return used_k(c, b);
  if (c.left == TANDEM_UNBOUNDED) return 0;
  const int64_t own = c.diagonals.empty() ? 0 : c.diagonals[static_cast<size_t>(b)];
  const int64_t diagonal = c.explicit_diagonal ? clamp_diagonal(c.diagonal + own)
                           : c.top_left        ? 0
                                               : used_k(c, b) - used_q(c, b);
  return std::clamp<int64_t>(diagonal - c.left, 0, used_k(c, b));
}

// Sequences get pages from a shuffled deck, and some pages of the preceding sequence. Other entries have any value.
// Rows past a sequence's length, and pages before its first visible key, stay poison.
void Instance::fill_pages() {
  Random r(static_cast<uint64_t>(c.seed) + 7);
  const int64_t columns = c.seqlen_k / c.page_size;
  std::vector<int64_t> deck(static_cast<size_t>(k.shape()[0]));
  std::iota(deck.begin(), deck.end(), 0);
  for (size_t n = deck.size(); n > 1; --n)
    std::swap(deck[n - 1], deck[static_cast<size_t>(r.between(0, static_cast<int64_t>(n) - 1))]);
  const int64_t wild[] = {-1, INT32_MIN, INT32_MAX, 1 << 20, deck.front()};  // a page that stays poison
  page_table = Tensor(DType::i32, {c.sequences(), columns});
  for (int64_t b = 0; b < c.sequences(); ++b) {
    const int64_t first = first_seen_key(b) / c.page_size * c.page_size;
    for (int64_t i = 0; i < columns; ++i) page_table.set(b * columns + i, static_cast<double>(wild[r.between(0, 4)]));
    for (int64_t j = first; j < used_k(c, b); ++j) {
      const int64_t entry = b * columns + j / c.page_size;
      if (j % c.page_size == 0) {
        const bool shared = b > 0 && j >= first_seen_key(b - 1) && j < used_k(c, b - 1) && r.chance(0.3);
        page_table.set(entry, shared ? page_table.get(entry - columns) : static_cast<double>(deck.back()));
        if (!shared) deck.pop_back();
      }
      const auto page = static_cast<int64_t>(page_table.get(entry));
      for (Tensor* t : {&k, &v}) {
        const int64_t row_size = t->shape()[2] * t->shape()[3];
        for (int64_t n = 0; n < row_size; ++n) {
          const bool integer = c.values == "integer" && t == &v;
          t->set((page * c.page_size + j % c.page_size) * row_size + n,
                 integer ? static_cast<double>(r.between(-4, 4)) : r.normal());
        }
      }
    }
  }
}

}  // namespace tandem::test
