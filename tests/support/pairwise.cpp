#include "support/pairwise.h"

#include <compare>
#include <set>
#include <utility>

#include "support/random.h"

namespace tandem::test {
namespace {

struct Pair {
  size_t a, b;  // options, a < b
  int x, y;     // their values
  auto operator<=>(const Pair&) const = default;
};

template <class Use>
void each_pair(const std::vector<int>& combination, Use&& use) {
  for (size_t b = 1; b < combination.size(); ++b) {
    for (size_t a = 0; a < b; ++a) use(Pair{a, b, combination[a], combination[b]});
  }
}

std::set<Pair> all_pairs(std::span<const int> choices) {
  std::set<Pair> pairs;
  for (size_t b = 1; b < choices.size(); ++b) {
    for (size_t a = 0; a < b; ++a) {
      for (int x = 0; x < choices[a]; ++x) {
        for (int y = 0; y < choices[b]; ++y) pairs.insert({a, b, x, y});
      }
    }
  }
  return pairs;
}

}  // namespace

// Greedy: selects the best of some random combinations, of which each value was exchanged while that covers more pairs.
std::vector<std::vector<int>> pairwise(std::span<const int> choices) {
  std::set<Pair> open = all_pairs(choices);
  Random random(1);
  std::vector<std::vector<int>> chosen;
  const auto covered = [&open](const std::vector<int>& c) {
    int count = 0;
    each_pair(c, [&](const Pair& pair) { count += open.contains(pair); });
    return count;
  };
  while (!open.empty()) {
    std::vector<int> best;
    int most = -1;
    for (int n = 0; n < 20; ++n) {
      std::vector<int> c;
      for (const int count : choices) c.push_back(static_cast<int>(random.between(0, count - 1)));
      const Pair& first = *open.begin();  // so that every choice covers at least one pair
      c[first.a] = first.x, c[first.b] = first.y;
      int closed = covered(c);
      for (bool improved = true; improved;) {
        improved = false;
        for (size_t option = 0; option < c.size(); ++option) {
          if (option == first.a || option == first.b) continue;
          for (int value = 0; value < choices[option]; ++value) {
            const int before = std::exchange(c[option], value), count = covered(c);
            if (count > closed) {
              closed = count, improved = true;
            } else {
              c[option] = before;
            }
          }
        }
      }
      if (closed > most) most = closed, best = c;
    }
    each_pair(best, [&](const Pair& pair) { open.erase(pair); });
    chosen.push_back(best);
  }
  return chosen;
}

}  // namespace tandem::test
