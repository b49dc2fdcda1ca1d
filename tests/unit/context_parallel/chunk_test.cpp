// Checks that plans with chunks have the same parts and the same tree of merges on any number of ranks.
#include <map>

#include "context_parallel/merge_tree.h"
#include "context_parallel/tree_sum.h"
#include "unit/context_parallel/problems.h"

namespace tandem::test {
namespace {

using namespace context_parallel;

TEST(MergeTree, CoversRunsWithFewNodes) {
  for (int64_t begin = 0; begin < 70; ++begin) {
    for (int64_t end = begin; end < 140; ++end) {
      int64_t at = begin;
      int nodes = 0;
      for_each_node(begin, end, [&](const MergeNode& n) {
        ASSERT_EQ(n.begin(), at);
        ASSERT_GT(n.end(), at);
        at = n.end();
        ++nodes;
      });
      ASSERT_EQ(at, end);
      ASSERT_LE(nodes, 2 * std::bit_width(static_cast<uint64_t>(end - begin)));
    }
  }
}

TEST(MergeTree, RootCoversTheDocument) {
  for (int64_t chunks = 1; chunks < 200; ++chunks) {
    const MergeNode root = merge_root(chunks);
    EXPECT_EQ(root.begin(), 0);
    EXPECT_GE(root.end(), chunks);
    EXPECT_TRUE(chunks == 1 || root.end() < 2 * chunks);
  }
  EXPECT_EQ((MergeNode{1, 3}.parent()), (MergeNode{2, 1}));
  EXPECT_TRUE((MergeNode{1, 2}.is_left()));
}

TEST(MergeTree, AStackOfNodesMergesAdjacentNodes) {
  std::vector<MergeNode> stack;
  for (int64_t chunk = 0; chunk < 1000; ++chunk) {
    stack.push_back({0, chunk});
    for (int n = merges_after(chunk); n > 0; --n) {
      ASSERT_GE(stack.size(), 2u);
      const MergeNode right = stack.back(), left = stack[stack.size() - 2];
      ASSERT_TRUE(left.is_left());
      ASSERT_EQ(left.parent(), right.parent());
      ASSERT_EQ(left.end(), right.begin());
      stack.pop_back();
      stack.back() = left.parent();
    }
    int64_t at = 0;
    for (const MergeNode& n : stack) {
      ASSERT_EQ(n.begin(), at);
      at = n.end();
    }
    ASSERT_EQ(at, chunk + 1);
  }
}

// Sums floats of random leaves on random ranks, which send the nodes that remain.
TEST(TreeSums, DoNotDependOnTheOrderOfArrival) {
  const auto add = [](float& left, float& right) {
    left += right;
    return Status{};
  };
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Random r(seed);
    std::vector<int64_t> leaves;
    std::vector<float> values;
    for (int64_t n = 0; n < 40; ++n) {
      if (!r.chance(0.6) && !(n == 39 && leaves.empty())) continue;
      leaves.push_back(n);
      values.push_back(static_cast<float>(r.normal()));
    }
    TreeSum<float> one(leaves), owner(leaves);
    for (size_t n = 0; n < leaves.size(); ++n) ASSERT_TRUE(one.add({0, leaves[n]}, values[n], add).ok());
    std::vector<std::vector<size_t>> ranks(static_cast<size_t>(r.between(1, 5)));
    for (size_t n = 0; n < leaves.size(); ++n) {
      ranks[static_cast<size_t>(r.between(0, std::ssize(ranks) - 1))].push_back(n);
    }
    for (const std::vector<size_t>& rank : ranks) {
      TreeSum<float> sum(leaves);
      std::vector<int64_t> own;
      for (const size_t n : rank) own.push_back(leaves[n]);
      // A rank computes its leaves in descending order, and sends the nodes that remain in ascending order.
      for (size_t n = rank.size(); n > 0; --n) ASSERT_TRUE(sum.add({0, own[n - 1]}, values[rank[n - 1]], add).ok());
      std::vector<MergeNode> sent;
      for (const auto& [begin, entry] : sum.nodes()) {
        sent.push_back(entry.node);
        ASSERT_TRUE(owner.add(entry.node, entry.value, add).ok());
      }
      ASSERT_EQ(sent, nodes_left(leaves, own)) << "seed " << seed;
    }
    ASSERT_EQ(one.nodes().size(), 1u);
    ASSERT_EQ(owner.nodes().size(), 1u);
    ASSERT_EQ(owner.nodes().begin()->second.value, one.nodes().begin()->second.value) << "seed " << seed;
  }
}

// Everything about a step except its ranks.
using Leaf = std::tuple<int32_t, int64_t, int64_t, int64_t, int64_t, StepMask, int64_t, int64_t, int64_t, int64_t,
                        int64_t, int64_t>;

std::multiset<Leaf> leaves(const ContextCase& c) {
  std::multiset<Leaf> result;
  const ContextPlan plan = c.plan();
  for (int32_t rank = 0; rank < c.ranks; ++rank) {
    for (const ContextStep& s : plan.steps(rank)) {
      EXPECT_EQ(s.q.stride, 1);
      EXPECT_EQ(s.q.begin / c.chunk, s.query_order);
      EXPECT_EQ((s.q.end() - 1) / c.chunk, s.query_order);
      EXPECT_EQ(s.k.begin / c.chunk, s.key_order);
      EXPECT_EQ((s.k.end() - 1) / c.chunk, s.key_order);
      result.emplace(s.q.document, s.q.begin, s.q.count, s.k.begin, s.k.count, s.mask, s.diagonal, s.window_left,
                     s.window_right, s.key_order, s.query_order, s.pairs);
    }
  }
  return result;
}

TEST(ChunkPlans, HaveTheSamePartsOnAnyNumberOfRanks) {
  for_random_contexts(400, [](ContextCase& c, Random& r) {
    c.chunk = r.between(1, 12);
    c.ranks = 1;
    c.layout = LayoutKind::contiguous;
    const std::multiset<Leaf> one = leaves(c);
    for (const LayoutKind layout : kLayouts) {
      for (const int32_t ranks : {1, 2, 3, 4, 8}) {
        c.layout = layout;
        c.ranks = ranks;
        ASSERT_EQ(leaves(c), one) << c;
      }
    }
  });
}

// A sum whose bits depend on the order of additions.
float value_of(const ContextStep& s) {
  Random r(static_cast<uint64_t>(s.q.document * 10007 + s.query_order * 101 + s.key_order));
  return static_cast<float>(r.normal());
}

// Nodes of one tree: absent nodes are empty.
class NodeSums {
 public:
  void add(const MergeNode& node, float value) { sums_[{node.level, node.index}] = value; }

  const float* find(const MergeNode& node) {
    if (const auto found = sums_.find({node.level, node.index}); found != sums_.end()) return &found->second;
    if (node.level == 0) return nullptr;
    const float* left = find({node.level - 1, 2 * node.index});
    const float* right = find({node.level - 1, 2 * node.index + 1});
    if (left == nullptr || right == nullptr) return left ? left : right;
    return &sums_.emplace(std::pair(node.level, node.index), *left + *right).first->second;
  }

 private:
  std::map<std::pair<int32_t, int64_t>, float> sums_;
};

using KeyChunk = std::pair<int32_t, int64_t>;

// Sums each key chunk's values over query chunks as a dk would be: ranks send nodes of runs of their query chunks.
std::map<KeyChunk, float> sum_of_nodes(const ContextCase& c) {
  const ContextPlan plan = c.plan();
  std::map<KeyChunk, NodeSums> owner;
  std::map<KeyChunk, int64_t> chunks;
  for (int32_t rank = 0; rank < c.ranks; ++rank) {
    std::map<KeyChunk, std::map<int64_t, float>> own;
    for (const ContextStep& s : plan.steps(rank)) own[{s.k.document, s.key_order}][s.query_order] = value_of(s);
    for (const auto& [key, values] : own) {
      NodeSums local;
      for (const auto& [chunk, value] : values) local.add({0, chunk}, value);
      for (auto first = values.begin(); first != values.end();) {
        auto last = first;
        int64_t end = first->first;
        for (; last != values.end() && last->first == end; ++last) ++end;
        for_each_node(first->first, end, [&](const MergeNode& n) { owner[key].add(n, *local.find(n)); });
        chunks[key] = std::max(chunks[key], end);
        first = last;
      }
    }
  }
  std::map<KeyChunk, float> sums;
  for (auto& [key, nodes] : owner) sums[key] = *nodes.find(merge_root(chunks[key]));
  return sums;
}

TEST(ChunkPlans, SumsOfNodesHaveTheSameBitsOnAnyNumberOfRanks) {
  for_random_contexts(200, [](ContextCase& c, Random& r) {
    c.chunk = r.between(1, 12);
    c.ranks = 1;
    const std::map<KeyChunk, float> one = sum_of_nodes(c);
    for (const LayoutKind layout : kLayouts) {
      for (const int32_t ranks : {1, 2, 3, 4, 8}) {
        c.layout = layout;
        c.ranks = ranks;
        ASSERT_EQ(sum_of_nodes(c), one) << c;
      }
    }
  });
}

}  // namespace
}  // namespace tandem::test
