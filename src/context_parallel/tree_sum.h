// A sum over the leaves of merge_tree.h that arrive in any order and from any rank.
//
// The leaves are the chunks with visible pairs. Two nodes merge as soon as both are complete, so that few nodes are
// stored. The result does not depend on the order of arrival. A rank sends the nodes that remain of its leaves.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/text.h"
#include "context_parallel/merge_tree.h"

namespace tandem::context_parallel {

template <class Value>
class TreeSum {
 public:
  struct Entry {
    MergeNode node;
    Value value;
  };

  TreeSum() = default;
  // leaves: the numbers of all chunks of the sum, ascending, on all ranks.
  explicit TreeSum(std::vector<int64_t> leaves) : leaves_(std::move(leaves)) {}

  // merge(left, right) adds the right value to the left value and returns a Status.
  template <class Merge>
  Status add(MergeNode node, Value value, Merge&& merge) {
    while (!is_whole(node)) {
      const MergeNode sibling{node.level, node.index ^ 1};
      if (count(sibling) > 0) {
        const auto found = nodes_.find(sibling.begin());
        if (found == nodes_.end() || !(found->second.node == sibling)) break;
        Value other = std::move(found->second.value);
        nodes_.erase(found);
        if (!node.is_left()) std::swap(value, other);
        TANDEM_TRY(merge(value, other));
      }
      node = node.parent();
    }
    nodes_.insert_or_assign(node.begin(), Entry{node, std::move(value)});
    return {};
  }

  // The stored nodes by ascending chunk number. A complete sum has one node.
  std::map<int64_t, Entry>& nodes() { return nodes_; }
  bool has_leaves() const { return !leaves_.empty(); }
  bool is_complete() const { return nodes_.size() == 1 && is_whole(nodes_.begin()->second.node); }
  const std::vector<int64_t>& leaves() const { return leaves_; }

 private:
  int64_t count(const MergeNode& n) const {
    return std::distance(std::lower_bound(leaves_.begin(), leaves_.end(), n.begin()),
                         std::lower_bound(leaves_.begin(), leaves_.end(), n.end()));
  }
  bool is_whole(const MergeNode& n) const { return count(n) == std::ssize(leaves_); }

  std::vector<int64_t> leaves_;
  std::map<int64_t, Entry> nodes_;
};

// The nodes that remain after a rank has added its leaves to a sum over all leaves.
inline std::vector<MergeNode> nodes_left(const std::vector<int64_t>& leaves, const std::vector<int64_t>& own) {
  struct Nothing {};
  TreeSum<Nothing> sum(leaves);
  for (const int64_t leaf : own) (void)sum.add({0, leaf}, {}, [](Nothing&, Nothing&) { return Status{}; });
  std::vector<MergeNode> nodes;
  for (const auto& [begin, entry] : sum.nodes()) nodes.push_back(entry.node);
  return nodes;
}

}  // namespace tandem::context_parallel
