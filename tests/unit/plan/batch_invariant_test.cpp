// The plans of batch_invariant forwards: kernels, splits of sequences with few queries, and their results' rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "config/coords.h"
#include "plan/arithmetic.h"
#include "plan/forward.h"
#include "support/random.h"
#include "unit/plan/problems.h"

namespace tandem::test {
namespace {

using plan::ForwardSchedule;

ForwardSchedule invariant_plan(const Problem& p, const gpu::Properties& device = hopper()) {
  return plan::make_plan(p, device).forward;
}

// With batch_invariant, a sequence's kernel does not depend on the lengths of other sequences.
TEST(BatchInvariantPlan, IgnoresLengths) {
  for (const int64_t dim : {64, 128, 192, 256}) {
    std::set<uint64_t> ids;
    std::set<int> pack_gqa;
    for (const int64_t longest : {50, 200, 3000, 9000, 50000}) {
      for (const int64_t batch : {1, 40}) {
        Problem p = causal(packed({.batch = batch,
                                   .seqlen_q = longest,
                                   .seqlen_k = longest,
                                   .heads_q = 16,
                                   .heads_k = 4,
                                   .head_dim = dim,
                                   .head_dim_v = dim},
                                  batch * longest, batch * longest));
        p.batch_invariant = true;
        ids.insert(plan::id_of(invariant_plan(p).tile));
        pack_gqa.insert(invariant_plan(p).pack_gqa);
      }
    }
    EXPECT_EQ(ids.size(), 1u);
    EXPECT_EQ(pack_gqa.size(), 1u);
  }
}

// With batch_invariant, sequences of few queries are split at fixed keys, whatever the batch and the longest length.
TEST(BatchInvariantPlan, Splits) {
  for (const gpu::Properties& device : {hopper(), blackwell()}) {
    std::set<uint64_t> ids;
    std::set<std::tuple<int, int>> sizes;
    for (const int64_t longest_q : {1, 200}) {
      for (const int64_t longest_k : {2000, 131072}) {
        for (const int64_t batch : {1, 40}) {
          Problem p =
              packed({.batch = batch, .seqlen_q = longest_q, .seqlen_k = longest_k, .heads_q = 32, .heads_k = 4},
                     batch * longest_q, batch * longest_k);
          p = causal(p);
          p.batch_invariant = true;
          const ForwardSchedule t = invariant_plan(p, device);
          ids.insert(plan::id_of(t.tile));
          sizes.emplace(t.split_n_blocks * t.tile.tile_n, t.split_max_queries);
          EXPECT_EQ(t.splits, 1);
          EXPECT_EQ(t.max_splits, 32);  // 4 packed heads
          const int64_t most = std::min<int64_t>(longest_q, t.split_max_queries);
          const int64_t splits = std::min<int64_t>(longest_k / 512, 32);
          EXPECT_GE(t.split_rows, batch * most * splits);
          EXPECT_LE(t.split_rows, batch * most * (splits + 1));
        }
      }
    }
    EXPECT_EQ(ids.size(), 1u);
    EXPECT_EQ(sizes, (std::set<std::tuple<int, int>>{{512, 8}}));
  }
}

// The splits that a call makes of a sequence: their n_blocks, and their number.
std::tuple<int, int> splits_of_sequence(const ForwardSchedule& t, int64_t keys) {
  const Sm90ForwardConfig& config = t.tile.for_hopper();
  if (t.split_count == 1) return {0, 1};
  SplitParams split{};
  split.n_blocks = t.split_n_blocks;
  split.max_count = t.max_splits;
  const int n_blocks = split_n_blocks(&config, split, static_cast<int>(keys));
  const auto count = static_cast<int>(plan::ceil_div(keys, int64_t{n_blocks} * config.tile_n));
  EXPECT_LE(count, t.split_count);
  return count == 1 ? std::tuple(0, 1) : std::tuple(n_blocks, count);
}

// A request alone and in a batch of longer requests has the same splits.
TEST(BatchInvariantPlan, SplitsOfASequenceAlone) {
  Random r(7);
  for (int n = 0; n < 3000; ++n) {
    const int64_t heads_k = int64_t{1} << r.between(0, 6), group = int64_t{1} << r.between(0, 7);
    const int64_t dim = 64 * r.between(1, 4), keys = r.between(1, int64_t{1} << r.between(4, 20));
    Problem alone = dense({.seqlen_q = 1,
                           .seqlen_k = keys,
                           .heads_q = heads_k * group,
                           .heads_k = heads_k,
                           .head_dim = dim,
                           .head_dim_v = dim});
    Problem batch = dense({.batch = r.between(1, 200),
                           .seqlen_q = 1,
                           .seqlen_k = keys + r.between(0, 1 << 20),
                           .heads_q = heads_k * group,
                           .heads_k = heads_k,
                           .head_dim = dim,
                           .head_dim_v = dim});
    alone.batch_invariant = batch.batch_invariant = true;
    EXPECT_EQ(splits_of_sequence(invariant_plan(alone), keys), splits_of_sequence(invariant_plan(batch), keys))
        << keys << " keys, " << heads_k << " key heads of " << group << ", head_dim " << dim;
  }
}

// Few sequences with few queries need no list: each split of a sequence has a block of each head.
TEST(BatchInvariantPlan, WithoutAList) {
  const auto plan_for = [](int64_t batch, const gpu::Properties& device) {
    Problem p = dense({.batch = batch, .seqlen_q = 1, .seqlen_k = 8192, .heads_q = 32, .heads_k = 8});
    p.batch_invariant = true;
    return plan::make_plan(p, device);
  };
  const plan::Plan one = plan_for(1, hopper());
  EXPECT_FALSE(one.forward.lists_tiles);
  EXPECT_EQ(one.launches.size(), 2u);
  EXPECT_EQ(one.launches[0].grid, 8u * 16);
  EXPECT_EQ(plan_for(2, hopper()).launches.size(), 3u);
  EXPECT_EQ(plan_for(1, blackwell()).launches.size(), 3u);
}

// The workspace has results of splits only for queries that may be split, and only for keys that a window shows.
TEST(BatchInvariantPlan, SplitRows) {
  const auto rows = [](Problem p) {
    p.batch_invariant = true;
    return invariant_plan(p).split_rows;
  };
  const Sizes few{.batch = 3, .seqlen_q = 2, .seqlen_k = 10000, .heads_q = 8, .heads_k = 1};
  EXPECT_EQ(rows(dense(few)), 3 * 2 * 20);
  Problem window = causal(dense(few));
  window.window_left = 500;
  EXPECT_EQ(rows(window), 3 * 2 * 2);  // 502 keys
  Problem one = dense(few);
  one.num_splits = 1;
  EXPECT_EQ(rows(one), 0);
  EXPECT_EQ(rows(dense({.batch = 3, .seqlen_q = 9, .seqlen_k = 10000})), 0);     // many queries
  EXPECT_EQ(rows(dense({.batch = 3, .seqlen_q = 1, .seqlen_k = 500})), 0);       // few keys
  EXPECT_EQ(rows(dense({.seqlen_q = 2, .seqlen_k = 10000, .heads_q = 64})), 0);  // 128 rows of a packed head
  EXPECT_EQ(rows(with_blocks(dense({.seqlen_q = 1, .seqlen_k = 10240}), 128, 128)), 0);
  // 8 packed heads have at most 16 splits, and 32 have 4.
  EXPECT_EQ(rows(packed({.batch = 100, .seqlen_q = 1, .seqlen_k = 131072, .heads_q = 8, .heads_k = 8}, 100, 200000)),
            100 * 16);
  EXPECT_EQ(rows(dense({.batch = 3, .seqlen_q = 1, .seqlen_k = 131072, .heads_q = 64, .heads_k = 32})), 3 * 4);
}

}  // namespace
}  // namespace tandem::test
