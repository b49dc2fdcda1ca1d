// Checks that layouts are permutations of the tokens.
#include "context_parallel/layout.h"

#include "unit/context_parallel/problems.h"

namespace tandem::test {
namespace {

using namespace context_parallel;

void expect_permutation(const ShardLayout& layout, const std::vector<int64_t>& lengths) {
  std::set<std::pair<int32_t, int64_t>> places;
  int64_t total = 0;
  for (size_t d = 0; d < lengths.size(); ++d) {
    for (int64_t at = 0; at < lengths[d]; ++at, ++total) {
      const TokenPlace place = layout.place(static_cast<int32_t>(d), at);
      ASSERT_TRUE(place.rank >= 0 && place.rank < layout.ranks());
      ASSERT_TRUE(place.local >= 0 && place.local < layout.tokens(place.rank));
      ASSERT_TRUE(places.emplace(place.rank, place.local).second) << "document " << d << ", position " << at;
      const TokenPosition back = layout.token(place.rank, place.local);
      ASSERT_EQ(back.document, static_cast<int32_t>(d));
      ASSERT_EQ(back.position, at);
    }
  }
  int64_t owned = 0;
  for (int32_t rank = 0; rank < layout.ranks(); ++rank) {
    int64_t local = 0;
    std::pair<int32_t, int64_t> last{-1, 0};
    for (const Shard& s : layout.shards(rank)) {
      ASSERT_EQ(s.rank, rank);
      ASSERT_EQ(s.first, local);
      ASSERT_GT(s.tokens.count, 0);
      ASSERT_LT(last, std::pair(s.tokens.document, s.tokens.begin)) << "the shards of rank " << rank << " must ascend";
      last = {s.tokens.document, s.tokens.begin};
      for (int64_t i = 0; i < s.tokens.count; ++i, ++local) {
        const TokenPlace place = layout.place(s.tokens.document, s.tokens.position(i));
        ASSERT_EQ(place.rank, rank);
        ASSERT_EQ(place.local, local);
      }
    }
    ASSERT_EQ(local, layout.tokens(rank));
    owned += local;
  }
  ASSERT_EQ(owned, total);
}

TEST(Layouts, ArePermutations) {
  for_random_contexts(2000, [](const ContextCase& c, Random&) {
    const ContextPlan plan = c.plan();
    std::vector<int64_t> q_lens, k_lens;
    for (const PackedDocument& d : c.documents) {
      q_lens.push_back(d.q_len);
      k_lens.push_back(d.k_len);
    }
    expect_permutation(plan.queries(), q_lens);
    expect_permutation(plan.keys(), k_lens);
  });
}

std::string owners(const ContextCase& c) {
  const ContextPlan plan = c.plan();
  std::string text;
  for (size_t d = 0; d < c.documents.size(); ++d) {
    if (d > 0) text += " ";
    for (int64_t at = 0; at < c.documents[d].q_len; ++at) {
      text += static_cast<char>('0' + plan.queries().place(static_cast<int32_t>(d), at).rank);
    }
  }
  return text;
}

TEST(Layouts, AssignTheseTokens) {
  ContextCase c;
  c.documents = {{8, 8, 0}, {0, 0, 0}, {1, 1, 0}, {7, 7, 0}};
  c.ranks = 2;
  const auto with = [&](LayoutKind layout, int64_t chunk) {
    c.layout = layout;
    c.chunk = chunk;
    return owners(c);
  };
  EXPECT_EQ(with(LayoutKind::contiguous, 0), "00000000  1 1111111");
  EXPECT_EQ(with(LayoutKind::zigzag, 0), "00001111  1 1110000");
  EXPECT_EQ(with(LayoutKind::per_document, 0), "00111100  0 0111100");
  EXPECT_EQ(with(LayoutKind::striped, 0), "01010101  0 0101010");
  EXPECT_EQ(with(LayoutKind::striped, 3), "00011100  0 0001110");
  EXPECT_EQ(with(LayoutKind::contiguous, 3), "00000000  1 1111111");
  EXPECT_EQ(with(LayoutKind::zigzag, 3), "00011111  1 1110000");
  // The balanced layout of one causal document is a zigzag.
  EXPECT_EQ(owners(causal(12, 3)), "001122221100");
}

TEST(Layouts, SharesDifferByOneToken) {
  for_random_contexts(2000, [](ContextCase& c, Random&) {
    c.chunk = 0;
    if (c.layout == LayoutKind::per_document || c.layout == LayoutKind::striped) return;
    const ContextPlan plan = c.plan();
    int64_t fewest = kMaxTokens, most = 0;
    for (int32_t rank = 0; rank < c.ranks; ++rank) {
      fewest = std::min(fewest, plan.queries().tokens(rank));
      most = std::max(most, plan.queries().tokens(rank));
    }
    ASSERT_LE(most - fewest, c.layout == LayoutKind::zigzag ? 2 : 1);
  });
}

}  // namespace
}  // namespace tandem::test
