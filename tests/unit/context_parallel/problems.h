// Random problems of context parallelism, and the visibility of each pair by the definition of the mask.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <ostream>
#include <set>
#include <tuple>
#include <vector>

#include "context_parallel/plan.h"
#include "support/random.h"

namespace tandem::test {

using context_parallel::LayoutKind;

inline constexpr LayoutKind kLayouts[] = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::per_document,
                                          LayoutKind::striped, LayoutKind::balanced};

struct ContextCase {
  std::vector<context_parallel::PackedDocument> documents;
  std::vector<int64_t> row_begin;
  std::vector<int32_t> key_blocks;
  int64_t block_q = 0, block_k = 0;
  int64_t left = TANDEM_UNBOUNDED, right = TANDEM_UNBOUNDED, chunk = 0;
  int32_t ranks = 1;
  LayoutKind layout = LayoutKind::contiguous;

  // The problem points into this case.
  context_parallel::ContextProblem problem() const {
    return {documents, left, right, {block_q, block_k, row_begin, key_blocks, {}}, ranks, layout, chunk};
  }
  context_parallel::ContextPlan plan() const {
    context_parallel::ContextPlan plan;
    const Status status = context_parallel::make_context_plan(problem(), &plan);
    EXPECT_TRUE(status.ok()) << status.message;
    return plan;
  }

  bool in_blocks(int32_t document, int64_t i, int64_t j) const {
    if (block_q == 0) return true;
    int64_t row = i / block_q;
    for (int32_t d = 0; d < document; ++d) row += (documents[static_cast<size_t>(d)].q_len + block_q - 1) / block_q;
    const auto begin = key_blocks.begin() + row_begin[static_cast<size_t>(row)];
    const auto end = key_blocks.begin() + row_begin[static_cast<size_t>(row) + 1];
    return std::find(begin, end, j / block_k) != end;
  }
  bool visible(int32_t document, int64_t i, int64_t j) const {
    const int64_t distance = j - i - documents[static_cast<size_t>(document)].diagonal;
    return (left == TANDEM_UNBOUNDED || -distance <= left) && (right == TANDEM_UNBOUNDED || distance <= right) &&
           in_blocks(document, i, j);
  }
  void add_blocks(Random& r, int64_t size_q, int64_t size_k, double density) {
    block_q = size_q;
    block_k = size_k;
    row_begin.assign(1, 0);
    for (const context_parallel::PackedDocument& d : documents) {
      for (int64_t q = 0; q < d.q_len; q += block_q) {
        for (int64_t k = 0; k < d.k_len; k += block_k) {
          if (r.chance(density)) key_blocks.push_back(static_cast<int32_t>(k / block_k));
        }
        row_begin.push_back(static_cast<int64_t>(key_blocks.size()));
      }
    }
  }
};

inline std::ostream& operator<<(std::ostream& out, const ContextCase& c) {
  out << "layout " << name_of(c.layout) << ", ranks " << c.ranks << ", chunk " << c.chunk << ", window " << c.left
      << " and " << c.right << ", blocks " << c.block_q << " x " << c.block_k << ", documents";
  for (const auto& d : c.documents) out << " " << d.q_len << "x" << d.k_len << "@" << d.diagonal;
  return out;
}

inline ContextCase random_context(Random& r) {
  ContextCase c;
  c.ranks = static_cast<int32_t>(r.between(1, 16));
  c.layout = kLayouts[r.between(0, 4)];
  const bool same = r.chance(0.6);
  const int64_t alignment = r.between(0, 2);
  const auto length = [&] { return r.chance(0.3) ? r.between(0, 1) : r.between(0, 40); };
  for (int64_t n = r.between(0, 5); n > 0; --n) {
    const int64_t q_len = length(), k_len = same ? q_len : length();
    c.documents.push_back({q_len, k_len, alignment == 0 ? 0 : alignment == 1 ? k_len - q_len : r.between(-50, 50)});
  }
  if (r.chance(0.6)) c.right = r.chance(0.7) ? 0 : r.between(-3, 20);
  if (r.chance(0.4)) c.left = r.between(-3, 20);
  if (r.chance(0.4)) c.chunk = r.between(1, 12);
  if (r.chance(0.3)) c.add_blocks(r, r.between(1, 9), r.between(1, 9), 0.4);
  return c;
}

// Calls check(c, r) for the random problems of the seeds 1 to `count`, until a check fails fatally. A failure prints
// the seed and the problem. r: more random numbers of the seed.
template <class Check>
void for_random_contexts(uint64_t count, Check&& check) {
  for (uint64_t seed = 1; seed <= count && !testing::Test::HasFatalFailure(); ++seed) {
    Random r(seed);
    ContextCase c = random_context(r);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c);
    check(c, r);
  }
}

// One document of self-attention under a causal mask.
inline ContextCase causal(int64_t tokens, int32_t ranks, LayoutKind layout = LayoutKind::balanced) {
  ContextCase c;
  c.documents = {{tokens, tokens, 0}};
  c.right = 0;
  c.ranks = ranks;
  c.layout = layout;
  return c;
}

// Evaluates the mask of a step as a call would: rows count from 0 in q and in k; only a block mask reads positions.
inline bool shows(const context_parallel::ContextStep& s, const ContextCase& c, int64_t i, int64_t j) {
  if (s.mask == context_parallel::StepMask::full) return true;
  const int64_t distance = i + s.diagonal - j;
  if (s.window_left != TANDEM_UNBOUNDED && distance > s.window_left) return false;
  if (s.window_right != TANDEM_UNBOUNDED && -distance > s.window_right) return false;
  return s.mask == context_parallel::StepMask::band || c.in_blocks(s.q.document, s.q.position(i), s.k.position(j));
}

// Counts for each (document, query, key) how many steps compute the pair, and expects one if the pair is visible and
// none otherwise.
inline void expect_covered_once(const ContextCase& c, const context_parallel::ContextPlan& plan) {
  std::vector<std::vector<int>> computed;
  for (const auto& d : c.documents) computed.emplace_back(static_cast<size_t>(d.q_len * d.k_len), 0);
  for (int32_t rank = 0; rank < plan.ranks(); ++rank) {
    for (const context_parallel::ContextStep& s : plan.steps(rank)) {
      const int64_t k_len = c.documents[static_cast<size_t>(s.q.document)].k_len;
      for (int64_t i = 0; i < s.q.count; ++i) {
        for (int64_t j = 0; j < s.k.count; ++j) {
          if (!shows(s, c, i, j)) continue;
          ++computed[static_cast<size_t>(s.q.document)][static_cast<size_t>(s.q.position(i) * k_len + s.k.position(j))];
        }
      }
    }
  }
  for (size_t d = 0; d < c.documents.size(); ++d) {
    const int64_t k_len = c.documents[d].k_len;
    for (size_t n = 0; n < computed[d].size(); ++n) {
      const auto i = static_cast<int64_t>(n) / k_len, j = static_cast<int64_t>(n) % k_len;
      ASSERT_EQ(computed[d][n], c.visible(static_cast<int32_t>(d), i, j) ? 1 : 0)
          << "document " << d << ", query " << i << ", key " << j;
    }
  }
}

inline double largest_over_mean(const context_parallel::ContextPlan& plan) {
  double sum = 0, largest = 0;
  for (int32_t rank = 0; rank < plan.ranks(); ++rank) {
    const auto pairs = static_cast<double>(plan.pairs(rank));
    sum += pairs;
    largest = std::max(largest, pairs);
  }
  return sum > 0 ? largest / (sum / plan.ranks()) : 1;
}

}  // namespace tandem::test
