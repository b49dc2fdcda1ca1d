// Checks random plans pair by pair: steps, orders of merges, transfers, and refusals.
#include "context_parallel/plan.h"

#include <map>

#include "unit/context_parallel/problems.h"

namespace tandem::test {
namespace {

using namespace context_parallel;

TEST(RandomContextPlans, CoverEachVisiblePairOnce) {
  for_random_contexts(4000, [](const ContextCase& c, Random&) { expect_covered_once(c, c.plan()); });
}

void expect_step(const ContextCase& c, const ContextPlan& plan, const ContextStep& s) {
  int64_t pairs = 0;
  bool first_q = false, last_q = false, first_k = false, last_k = false;
  // With chunks of whole blocks the first block of queries and of keys is whole.
  const bool has_blocks = c.block_q > 0 && c.chunk > 0 && c.chunk % c.block_q == 0 && c.chunk % c.block_k == 0;
  const int64_t q_first = has_blocks ? c.block_q : 1, k_first = has_blocks ? c.block_k : 1;
  for (int64_t i = 0; i < s.q.count; ++i) {
    for (int64_t j = 0; j < s.k.count; ++j) {
      if (!shows(s, c, i, j)) continue;
      ++pairs;
      first_q = first_q || i < q_first;
      last_q = last_q || i == s.q.count - 1;
      first_k = first_k || j < k_first;
      last_k = last_k || j == s.k.count - 1;
    }
  }
  ASSERT_EQ(s.pairs, pairs);
  ASSERT_TRUE(!has_blocks || (s.q.begin % c.block_q == 0 && s.k.begin % c.block_k == 0));
  ASSERT_TRUE(first_q && last_q && first_k && last_k) << "rows or keys at the ends see nothing";
  ASSERT_EQ(s.mask == StepMask::full, pairs == s.q.count * s.k.count);
  // Distances are absolute, because ALiBi depends on them, and bounds are the problem's.
  if (s.q.stride == 1) {
    const int64_t diagonal = c.documents[static_cast<size_t>(s.q.document)].diagonal;
    ASSERT_EQ(s.diagonal, s.q.begin - s.k.begin + diagonal);
    ASSERT_TRUE(s.window_left == TANDEM_UNBOUNDED || s.window_left == c.left);
    ASSERT_TRUE(s.window_right == TANDEM_UNBOUNDED || s.window_right == c.right);
  }
  ASSERT_EQ(s.peer, plan.peer(s.rank, s.round));
  ASSERT_EQ(s.rank, plan.reader(s.peer, s.round));
  for (int64_t i = 0; i < s.q.count; ++i) {
    ASSERT_EQ(plan.queries().place(s.q.document, s.q.position(i)).rank, s.rank);
  }
  for (int64_t j = 0; j < s.k.count; ++j) {
    ASSERT_EQ(plan.keys().place(s.k.document, s.k.position(j)).rank, s.peer);
  }
}

TEST(RandomContextPlans, StepsDescribeThemselves) {
  for_random_contexts(1500, [](const ContextCase& c, Random&) {
    const ContextPlan plan = c.plan();
    for (int32_t rank = 0; rank < c.ranks; ++rank) {
      int64_t pairs = 0;
      int32_t round = 0;
      for (const ContextStep& s : plan.steps(rank)) {
        ASSERT_EQ(s.rank, rank);
        ASSERT_LE(round, s.round) << "steps must be sorted by round";
        round = s.round;
        pairs += s.pairs;
        expect_step(c, plan, s);
        if (HasFatalFailure()) return;
      }
      ASSERT_EQ(plan.pairs(rank), pairs);
    }
  });
}

using StepKey = std::tuple<int32_t, int64_t, int64_t, int64_t, int64_t, int32_t, int32_t, int64_t, int64_t>;

StepKey key_of(const ContextStep& s) {
  return {s.q.document, s.q.begin, s.q.count, s.k.begin, s.k.count, s.rank, s.peer, s.key_order, s.query_order};
}

TEST(RandomContextPlans, OwnersOfKeysSeeTheSameSteps) {
  for_random_contexts(1500, [](const ContextCase& c, Random&) {
    const ContextPlan plan = c.plan();
    std::multiset<StepKey> by_queries, by_keys;
    for (int32_t rank = 0; rank < c.ranks; ++rank) {
      for (const ContextStep& s : plan.steps(rank)) by_queries.insert(key_of(s));
      int32_t round = 0;
      for (const ContextStep& s : plan.key_steps(rank)) {
        ASSERT_EQ(s.peer, rank);
        ASSERT_LE(round, s.round) << "steps must be sorted by round";
        round = s.round;
        by_keys.insert(key_of(s));
      }
    }
    ASSERT_EQ(by_queries, by_keys);
  });
}

TEST(RandomContextPlans, PartsOfARowHaveOneOrder) {
  for_random_contexts(1500, [](const ContextCase& c, Random&) {
    const ContextPlan plan = c.plan();
    // (document, row, order) -> the first position of the part; each must be unique and ascend.
    std::map<std::tuple<int32_t, int64_t, int64_t>, int64_t> of_out, of_dk;
    for (int32_t rank = 0; rank < c.ranks; ++rank) {
      for (const ContextStep& s : plan.steps(rank)) {
        for (int64_t i = 0; i < s.q.count; ++i) {
          ASSERT_TRUE(of_out.emplace(std::tuple(s.q.document, s.q.position(i), s.key_order), s.k.begin).second);
        }
        for (int64_t j = 0; j < s.k.count; ++j) {
          ASSERT_TRUE(of_dk.emplace(std::tuple(s.k.document, s.k.position(j), s.query_order), s.q.begin).second);
        }
      }
    }
    if (c.layout == LayoutKind::striped) return;  // trimmed stripes overlap
    for (const auto* orders : {&of_out, &of_dk}) {
      const std::tuple<int32_t, int64_t, int64_t>* last = nullptr;
      int64_t position = 0;
      for (const auto& [key, begin] : *orders) {
        if (last && std::get<0>(*last) == std::get<0>(key) && std::get<1>(*last) == std::get<1>(key)) {
          ASSERT_LT(position, begin);
        }
        last = &key;
        position = begin;
      }
    }
  });
}

TEST(RandomContextPlans, NeededKeysTravelOnce) {
  for_random_contexts(1500, [](const ContextCase& c, Random&) {
    const ContextPlan plan = c.plan();
    for (int32_t rank = 0; rank < c.ranks; ++rank) {
      std::set<std::pair<int32_t, int64_t>> needed, received;
      for (const Shard& q : plan.queries().shards(rank)) {
        for (int64_t j = 0; j < c.documents[static_cast<size_t>(q.tokens.document)].k_len; ++j) {
          if (plan.keys().place(q.tokens.document, j).rank == rank) continue;
          for (int64_t i = 0; i < q.tokens.count; ++i) {
            if (c.visible(q.tokens.document, q.tokens.position(i), j)) needed.emplace(q.tokens.document, j);
          }
        }
      }
      for (const KeyTransfer& t : plan.transfers(rank)) {
        ASSERT_NE(t.peer, rank);
        for (int64_t j = 0; j < t.k.count; ++j) {
          ASSERT_EQ(plan.keys().place(t.k.document, t.k.position(j)).rank, t.peer);
          ASSERT_TRUE(received.emplace(t.k.document, t.k.position(j)).second) << "a key travels twice";
        }
      }
      ASSERT_TRUE(std::includes(received.begin(), received.end(), needed.begin(), needed.end()));
      // Blocks of keys between two needed blocks may travel.
      if (c.block_q == 0) {
        ASSERT_EQ(received, needed);
      }
    }
  });
}

TEST(ContextPlans, ReceiveOnlyNeighboursKeysUnderAWindow) {
  for (const LayoutKind layout : {LayoutKind::contiguous, LayoutKind::balanced}) {
    for (const int32_t ranks : {2, 3, 8, 16}) {
      ContextCase c = causal(65536, ranks, layout);
      c.left = 1024;
      const ContextPlan plan = c.plan();
      for (int32_t rank = 0; rank < ranks; ++rank) {
        int64_t received = 0;
        std::set<int32_t> peers;
        for (const KeyTransfer& t : plan.transfers(rank)) {
          received += t.k.count;
          peers.insert(t.peer);
        }
        EXPECT_EQ(peers, rank > 0 ? std::set<int32_t>{rank - 1} : std::set<int32_t>{});
        EXPECT_EQ(received, rank > 0 ? 1024 : 0) << "rank " << rank << " of " << ranks;
      }
    }
  }
}

TEST(ContextPlans, ReceiveAllOtherKeysUnderNoMask) {
  ContextCase c = causal(1000, 8);
  c.right = TANDEM_UNBOUNDED;
  for (const LayoutKind layout : kLayouts) {
    c.layout = layout;
    const ContextPlan plan = c.plan();
    for (int32_t rank = 0; rank < 8; ++rank) {
      int64_t received = 0;
      for (const KeyTransfer& t : plan.transfers(rank)) received += t.k.count;
      EXPECT_EQ(received, 1000 - plan.keys().tokens(rank)) << name_of(layout);
    }
  }
}

TEST(ContextPlans, CountTwoToThe31Tokens) {
  constexpr int64_t n = kMaxTokens;
  for (const LayoutKind layout : kLayouts) {
    for (const int32_t ranks : {1, 3, 16}) {
      for (const int64_t chunk : {int64_t{0}, int64_t{1} << 26}) {
        ContextCase c = causal(n, ranks, layout);
        c.chunk = chunk;
        SCOPED_TRACE(testing::Message() << c);
        const auto total = [&](const ContextPlan& plan) {
          int64_t sum = 0;
          for (int32_t rank = 0; rank < ranks; ++rank) {
            int64_t steps = 0;
            for (const ContextStep& s : plan.steps(rank)) steps += s.pairs;
            EXPECT_EQ(steps, plan.pairs(rank));
            sum += steps;
          }
          return sum;
        };
        EXPECT_EQ(total(c.plan()), n / 2 * (n + 1));
        c.right = TANDEM_UNBOUNDED;
        EXPECT_EQ(total(c.plan()), n * n);
        c.left = INT64_MAX - 1;
        c.right = INT64_MIN;
        EXPECT_EQ(total(c.plan()), 0);
        c.documents[0].diagonal = int64_t{1} << 33;
        c.right = INT64_MAX - 1;
        EXPECT_EQ(total(c.plan()), n * n);
        c.left = INT64_MAX - 1;
        c.documents[0].diagonal = -(int64_t{1} << 33);
        EXPECT_EQ(total(c.plan()), n * n);
      }
    }
  }
}

TEST(ContextPlans, HashesDifferInEachArgument) {
  const auto hash = [](auto change) {
    ContextCase c = causal(100, 4);
    c.documents.push_back({50, 50, 0});
    change(c);
    return c.plan().hash();
  };
  std::set<uint64_t> hashes{hash([](ContextCase&) {})};
  EXPECT_EQ(hash([](ContextCase&) {}), *hashes.begin());
  hashes.insert(hash([](ContextCase& c) { c.ranks = 5; }));
  hashes.insert(hash([](ContextCase& c) { c.layout = LayoutKind::zigzag; }));
  hashes.insert(hash([](ContextCase& c) { c.chunk = 16; }));
  hashes.insert(hash([](ContextCase& c) { c.left = 16; }));
  hashes.insert(hash([](ContextCase& c) { c.right = 16; }));
  hashes.insert(hash([](ContextCase& c) { std::swap(c.documents[0], c.documents[1]); }));
  hashes.insert(hash([](ContextCase& c) { c.documents[1].q_len = 51; }));
  hashes.insert(hash([](ContextCase& c) { c.documents[1].k_len = 51; }));
  hashes.insert(hash([](ContextCase& c) { c.documents[1].diagonal = 1; }));
  for (const uint64_t seed : {1, 2}) {
    hashes.insert(hash([&](ContextCase& c) {
      Random r(seed);
      c.add_blocks(r, 16, 16, 0.5);
    }));
  }
  EXPECT_EQ(hashes.size(), 12u);
}

std::string refusal(const ContextCase& c) {
  ContextPlan plan;
  return make_context_plan(c.problem(), &plan).message;
}

TEST(ContextPlans, RefuseArgumentsByASentence) {
  EXPECT_EQ(refusal(causal(10, 0)),
            "ranks (0) must be between 1 and 65536: pass the size of the group that shares the sequence");
  ContextCase c = causal(10, 2);
  c.chunk = -1;
  EXPECT_EQ(refusal(c), "chunk (-1) must not be negative: pass 0 for no chunks");
  EXPECT_EQ(refusal(causal(-1, 2)),
            "documents[0] (-1 queries, -1 keys) must have between 0 and 2^31 tokens: correct the lengths");
  c = causal(kMaxTokens, 2);
  c.documents.push_back({1, 1, 0});
  EXPECT_EQ(refusal(c),
            "documents (2147483649 tokens or more) must have at most 2^31 tokens: plan fewer documents at "
            "once");
  c = causal(10, 2);
  c.documents[0].diagonal = INT64_MIN;
  EXPECT_EQ(refusal(c), "documents[0].diagonal (-9223372036854775808) must be within 2^33: pass an offset in keys");
  c = causal(kMaxTokens, 2);
  c.chunk = 1;
  EXPECT_EQ(refusal(c),
            "chunk (1) and layout (balanced) must cut at most 4194304 shards, not 2147483653: pass larger "
            "chunks or the layout balanced");
}

TEST(ContextPlans, RefuseBlockMasksByASentence) {
  ContextCase c = causal(10, 2);
  c.block_q = 4;
  EXPECT_EQ(refusal(c), "block_mask.block_k (0) must be positive: pass the size of a block");
  c.block_k = 4;
  EXPECT_EQ(refusal(c),
            "block_mask.row_begin (0 offsets) must have 4: one for each row of blocks of each document, "
            "and the end");
  c.row_begin = {0, 1, 3, 4};
  c.key_blocks = {0, 1, 1, 2};
  EXPECT_EQ(refusal(c),
            "block_mask.key_blocks[2] (1) must ascend in row 1 and lie in document 0: sort the row's "
            "blocks");
  c.key_blocks = {0, 1, 3, 2};
  EXPECT_EQ(refusal(c),
            "block_mask.key_blocks[2] (3) must ascend in row 1 and lie in document 0: sort the row's "
            "blocks");
  c.row_begin[2] = 5;
  EXPECT_EQ(refusal(c), "block_mask.row_begin[1] (1) must ascend within 0 and 4: pass offsets into key_blocks");
}

}  // namespace
}  // namespace tandem::test
