// Checks the shares of work of the balanced layout.
#include "context_parallel/balance.h"

#include "unit/context_parallel/problems.h"

namespace tandem::test {
namespace {

using namespace context_parallel;

TEST(WorkCurves, CountAllPairsBeforeAQuery) {
  for_random_contexts(500, [](const ContextCase& c, Random&) {
    const BlockMask blocks = c.problem().block_mask;
    std::vector<int64_t> starts{0}, k_lens;
    std::vector<DocumentMask> masks;
    int64_t rows = 0;
    for (const PackedDocument& d : c.documents) {
      starts.push_back(starts.back() + d.q_len);
      k_lens.push_back(d.k_len);
      KeyBand band;
      if (c.left != TANDEM_UNBOUNDED) band.low = d.diagonal - c.left;
      if (c.right != TANDEM_UNBOUNDED) band.high = d.diagonal + c.right;
      masks.push_back({band, blocks ? &blocks : nullptr, rows});
      if (blocks) rows += ceil_div(d.q_len, blocks.block_q);
    }
    const WorkCurve work(starts, k_lens, masks);
    int64_t pairs = 0, packed = 0;
    for (size_t d = 0; d < c.documents.size(); ++d) {
      for (int64_t i = 0; i < c.documents[d].q_len; ++i) {
        ASSERT_EQ(work.before(packed++), pairs);
        for (int64_t j = 0; j < k_lens[d]; ++j) pairs += c.visible(static_cast<int32_t>(d), i, j) ? 1 : 0;
      }
    }
    ASSERT_EQ(work.total(), pairs);
  });
}

// Masks of training: full, causal, causal windows, bidirectional windows and block masks.
void set_mask(Random& r, int kind, ContextCase& c) {
  c.right = kind == 0 ? TANDEM_UNBOUNDED : 0;
  if (kind >= 2) c.left = kind == 2 ? 1024 : 4095;
  if (kind == 3) c.right = 4095;
  if (kind == 4) {
    c.left = TANDEM_UNBOUNDED;
    c.add_blocks(r, 512, 512, 0.2);
  }
}

TEST(BalancedLayout, HasLargestOverMeanOf105) {
  for (const int32_t ranks : {2, 3, 4, 8, 15, 64}) {
    for (int kind = 0; kind < 5; ++kind) {
      for (uint64_t seed = 1; seed <= 6; ++seed) {
        Random r(seed);
        ContextCase c;
        c.ranks = ranks;
        c.layout = LayoutKind::balanced;
        // One sequence, or many documents of skewed lengths with empty ones and ones of one token.
        const int64_t tokens = int64_t{4096} * ranks + 77;
        for (int64_t left = tokens; left > 0;) {
          const int64_t length =
              seed <= 2 ? left : std::min(left, r.chance(0.2) ? r.between(0, 1) : r.between(1, 9000));
          c.documents.push_back({length, length, 0});
          left -= length;
        }
        set_mask(r, kind, c);
        EXPECT_LE(largest_over_mean(c.plan()), 1.05) << "mask " << kind << ", seed " << seed << ", ranks " << ranks;
      }
    }
  }
}

// Each window at the end has slightly less than the mean of the rest, which would raise the mean of the last ranks.
TEST(BalancedLayout, DoesNotDrift) {
  ContextCase c;
  c.ranks = 64;
  c.layout = LayoutKind::balanced;
  int64_t keys = 100'000'000;
  for (int64_t rest = 64; rest > 0; --rest) {
    const int64_t k_len = rest == 1 ? keys : keys / rest - keys / rest / 65;
    c.documents.insert(c.documents.begin(), {1000, k_len, 0});
    keys -= k_len;
  }
  EXPECT_LE(largest_over_mean(c.plan()), 1.05);
}

TEST(BalancedLayout, HasFewCuts) {
  for (const int32_t ranks : {2, 7, 64}) {
    for (const int64_t left : {TANDEM_UNBOUNDED, int64_t{1000}}) {
      ContextCase c = causal(100003, ranks);
      c.left = left;
      const ContextPlan plan = c.plan();
      size_t shards = 0;
      for (int32_t rank = 0; rank < ranks; ++rank) shards += plan.queries().shards(rank).size();
      EXPECT_LE(shards, static_cast<size_t>(2 * ranks));
    }
  }
}

TEST(BalancedLayout, AssignsWholeChunks) {
  for (const int32_t ranks : {2, 3, 4, 8}) {
    ContextCase c = causal(65536, ranks);
    c.chunk = 512;
    EXPECT_LE(largest_over_mean(c.plan()), 1.05) << ranks;
  }
}

TEST(ZigzagLayout, BalancesOneCausalDocument) {
  EXPECT_LE(largest_over_mean(causal(16384, 8, LayoutKind::zigzag).plan()), 1.001);
  EXPECT_GE(largest_over_mean(causal(16384, 8, LayoutKind::contiguous).plan()), 1.8);
}

}  // namespace
}  // namespace tandem::test
