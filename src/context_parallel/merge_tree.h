// The one tree over chunk numbers that every sum over chunks follows, on any number of ranks.
//
// Node (level, index) covers the chunks [index << level, (index + 1) << level). A node is the merge of its left and its
// right child, in this order. A chunk without visible pairs is an empty leaf: a merge with an empty node returns the
// other node unchanged. Therefore a rank may send any whole node, and the bits do not depend on the sender.
//
//     level 2            0
//     level 1      0           1
//     level 0   0     1     2     3     chunk numbers of one document
#pragma once

#include <bit>
#include <cstdint>

namespace tandem::context_parallel {

struct MergeNode {
  int32_t level = 0;
  int64_t index = 0;

  constexpr int64_t begin() const { return index << level; }
  constexpr int64_t end() const { return (index + 1) << level; }
  constexpr MergeNode parent() const { return {level + 1, index / 2}; }
  constexpr bool is_left() const { return index % 2 == 0; }
  bool operator==(const MergeNode&) const = default;
};

// The root of a document of `chunks` chunks, for chunks > 0.
constexpr MergeNode merge_root(int64_t chunks) {
  return {static_cast<int32_t>(std::bit_width(static_cast<uint64_t>(chunks - 1))), 0};
}

// Calls visit(node) for the fewest nodes that cover the chunks [begin, end), in ascending order: at most two a level.
template <class Visit>
constexpr void for_each_node(int64_t begin, int64_t end, Visit&& visit) {
  while (begin < end) {
    int32_t level = begin == 0 ? 62 : std::countr_zero(static_cast<uint64_t>(begin));
    while (end - begin < int64_t{1} << level) --level;
    visit(MergeNode{level, begin >> level});
    begin += int64_t{1} << level;
  }
}

// Chunks may arrive in ascending order on a stack of nodes. Returns how many merges follow chunk number `chunk`. A
// merge replaces the two newest nodes by their parent. The last chunk of a document has further merges, up to the root.
constexpr int merges_after(int64_t chunk) { return std::countr_one(static_cast<uint64_t>(chunk)); }

}  // namespace tandem::context_parallel
