#include "sass/src/graph.h"

#include <algorithm>
#include <map>

namespace tandem::machine_code {
namespace {

bool ends_thread(const Instruction& i) { return i.base() == "EXIT" || i.base() == "RET" || i.base() == "KILL"; }

// Returns true for a predicate that may be false: "P0", "!UP3".
bool is_condition(std::string_view operand) {
  if (operand.starts_with('!')) operand.remove_prefix(1);
  if (operand.starts_with('U')) operand.remove_prefix(1);
  return operand.size() == 2 && operand[0] == 'P' && operand[1] >= '0' && operand[1] <= '9';
}

// Returns the continuation of each BSYNC: the target of the preceding BSSY that names the same barrier.
std::vector<int32_t> meeting_points(const std::vector<Instruction>& code) {
  std::vector<int32_t> points(code.size(), -1);
  std::map<std::string, int32_t> named;
  for (size_t i = 0; i < code.size(); ++i) {
    if (code[i].operands.empty()) continue;
    if (code[i].base() == "BSSY" && !code[i].targets.empty()) named[code[i].operands[0]] = code[i].targets[0];
    if (code[i].base() == "BSYNC" && named.contains(code[i].operands[0])) points[i] = named[code[i].operands[0]];
  }
  return points;
}

std::vector<Block> blocks_of(const std::vector<Instruction>& code) {
  const auto count = static_cast<int32_t>(code.size());
  const std::vector<int32_t> meets = meeting_points(code);
  std::vector<bool> leads(code.size() + 1);
  leads[0] = leads[code.size()] = true;
  for (size_t i = 0; i < code.size(); ++i) {
    if (meets[i] >= 0) leads[static_cast<size_t>(meets[i])] = true;
    if (meets[i] >= 0 || branches(code[i]) || ends_thread(code[i])) leads[i + 1] = true;
    if (!branches(code[i])) continue;
    for (const int32_t target : code[i].targets) leads[static_cast<size_t>(target)] = true;
  }
  std::vector<Block> blocks;
  std::vector<int32_t> block_at(code.size());
  for (int32_t i = 0; i < count; ++i) {
    if (leads[static_cast<size_t>(i)]) blocks.push_back({i, i, {}});
    block_at[static_cast<size_t>(i)] = static_cast<int32_t>(blocks.size()) - 1;
    blocks.back().end = i + 1;
  }
  for (Block& block : blocks) {
    const Instruction& last = code[static_cast<size_t>(block.end) - 1];
    const int32_t meeting = meets[static_cast<size_t>(block.end) - 1];
    const auto lead_to = [&](int32_t instruction) {
      if (instruction >= count) return;
      const int32_t to = block_at[static_cast<size_t>(instruction)];
      if (std::ranges::find(block.next, to) == block.next.end()) block.next.push_back(to);
    };
    if (meeting >= 0) {
      lead_to(meeting);
      continue;
    }
    if (falls_through(last)) lead_to(block.end);
    if (branches(last)) std::ranges::for_each(last.targets, lead_to);
  }
  return blocks;
}

std::vector<std::vector<int32_t>> reversed(const std::vector<std::vector<int32_t>>& next) {
  std::vector<std::vector<int32_t>> previous(next.size());
  for (size_t b = 0; b < next.size(); ++b) {
    for (const int32_t to : next[b]) previous[static_cast<size_t>(to)].push_back(static_cast<int32_t>(b));
  }
  return previous;
}

// Walks backwards from the end of the loop to its head.
void grow(const std::vector<std::vector<int32_t>>& previous, int32_t from, Loop* loop) {
  std::vector<int32_t> open{from};
  while (!open.empty()) {
    const int32_t block = open.back();
    open.pop_back();
    if (std::ranges::find(loop->blocks, block) != loop->blocks.end()) continue;
    loop->blocks.push_back(block);
    open.insert(open.end(), previous[static_cast<size_t>(block)].begin(), previous[static_cast<size_t>(block)].end());
  }
}

}  // namespace

bool Graph::dominates(int32_t a, int32_t b) const {
  if (dominators[static_cast<size_t>(b)] < 0) return false;
  while (b != a && dominators[static_cast<size_t>(b)] != b) b = dominators[static_cast<size_t>(b)];
  return a == b;
}

bool Loop::contains(int32_t block) const { return std::ranges::binary_search(blocks, block); }
bool Loop::contains(const Loop& other) const {
  return blocks.size() > other.blocks.size() && std::ranges::includes(blocks, other.blocks);
}

bool branches(const Instruction& i) {
  return (i.base() == "BRA" || i.base() == "BRX" || i.base() == "JMP" || i.base() == "JMX") && !i.targets.empty();
}

bool falls_through(const Instruction& i) {
  if (!branches(i) && !ends_thread(i)) return true;
  return i.has("DIV") || !conditions_of(i).empty();
}

std::vector<std::string> conditions_of(const Instruction& branch) {
  std::vector<std::string> conditions;
  const auto add = [&](const std::string& predicate) {
    if (is_condition(predicate)) conditions.push_back(predicate[0] == '!' ? predicate.substr(1) : predicate);
  };
  add(branch.guard);
  std::ranges::for_each(branch.operands, add);
  return conditions;
}

std::vector<int32_t> dominators_of(const std::vector<std::vector<int32_t>>& next, int32_t root) {
  // Algorithm: Cooper, Harvey, Kennedy, "A Simple, Fast Dominance Algorithm".
  std::vector<int32_t> order, rank(next.size(), -1), dominators(next.size(), -1);
  std::vector<std::pair<int32_t, size_t>> stack{{root, 0}};
  rank[static_cast<size_t>(root)] = 0;
  while (!stack.empty()) {
    const int32_t block = stack.back().first;
    const std::vector<int32_t>& to = next[static_cast<size_t>(block)];
    if (stack.back().second == to.size()) {
      rank[static_cast<size_t>(block)] = static_cast<int32_t>(order.size());
      order.push_back(block);
      stack.pop_back();
    } else if (const int32_t child = to[stack.back().second++]; rank[static_cast<size_t>(child)] < 0) {
      rank[static_cast<size_t>(child)] = 0;
      stack.emplace_back(child, 0);
    }
  }
  const auto above = [&](int32_t& block) { block = dominators[static_cast<size_t>(block)]; };
  const auto rank_of = [&](int32_t block) { return rank[static_cast<size_t>(block)]; };
  const std::vector<std::vector<int32_t>> previous = reversed(next);
  dominators[static_cast<size_t>(root)] = root;
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = order.size(); i-- > 0;) {
      const auto block = static_cast<size_t>(order[i]);
      if (order[i] == root) continue;
      int32_t common = -1;
      for (int32_t p : previous[block]) {
        if (dominators[static_cast<size_t>(p)] < 0) continue;
        if (common < 0) common = p;
        while (p != common) rank_of(p) < rank_of(common) ? above(p) : above(common);
      }
      if (dominators[block] == common) continue;
      dominators[block] = common;
      changed = true;
    }
  }
  return dominators;
}

Graph graph_of(const std::vector<Instruction>& code) {
  Graph graph;
  if (code.empty()) return graph;
  graph.blocks = blocks_of(code);
  std::vector<std::vector<int32_t>> next;
  for (const Block& block : graph.blocks) next.push_back(block.next);
  graph.dominators = dominators_of(next, 0);
  // Unreachable code is part of no loop.
  for (size_t b = 0; b < next.size(); ++b) {
    if (graph.dominators[b] < 0) next[b].clear();
  }
  const std::vector<std::vector<int32_t>> previous = reversed(next);
  std::map<int32_t, Loop> by_head;
  for (size_t b = 0; b < next.size(); ++b) {
    for (const int32_t head : next[b]) {
      if (!graph.dominates(head, static_cast<int32_t>(b))) continue;
      Loop& loop = by_head.try_emplace(head, Loop{head, {head}}).first->second;
      grow(previous, static_cast<int32_t>(b), &loop);
    }
  }
  for (auto& [head, loop] : by_head) {
    std::ranges::sort(loop.blocks);
    graph.loops.push_back(std::move(loop));
  }
  return graph;
}

}  // namespace tandem::machine_code
