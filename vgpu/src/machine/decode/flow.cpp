#include "vgpu/src/machine/decode/flow.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace tandem::vgpu::machine {
namespace {

bool is_conditional(const Op& op, int32_t always) { return op.guard != always || op.flip != 0; }

bool ends_block(const Op& op) {
  return op.action.shape == Shape::branch || (op.detail != nullptr && (op.detail->ends || !op.detail->targets.empty()));
}

bool ends_threads(const Op& op) { return op.detail != nullptr && op.detail->ends && op.detail->targets.empty(); }

// Replaces jumps to the end of a thread by an end, so that lanes do not wait there for other lanes.
void end_at_jumps(std::vector<Op>* ops, int32_t always) {
  for (bool changed = true; changed;) {
    changed = false;
    for (Op& op : *ops) {
      if (op.action.shape != Shape::branch) continue;
      const Op& target = (*ops)[static_cast<size_t>(op.d)];
      if (!ends_threads(target) || is_conditional(target, always)) continue;
      op.action = target.action;
      op.detail = target.detail;
      op.d = -1;
      changed = true;
    }
  }
}

// Paths of lanes that continue. Successors that only lead to an early end (a trap, a return in the middle) are left
// out, because no lane rejoins from there. If a block leads only to such ends, all its successors with the same end
// count. The number of blocks represents the end.
class PathsThatGoOn {
 public:
  PathsThatGoOn(const std::vector<Op>& ops, const std::vector<BasicBlock>& blocks, int32_t always)
      : ops_(ops), blocks_(blocks), level_(blocks.size(), -1) {
    std::vector<bool> reachable(blocks.size(), false);
    if (!blocks.empty()) walk({0}, &reachable, [&](int32_t n) -> const auto& { return at(n).next; });
    struct End {
      int32_t block, kind;
      int64_t ops;  // ops of all blocks that lead to the end
    };
    std::vector<End> ends;
    for (int32_t n = 0; n < count(); ++n) {
      if (!reachable[static_cast<size_t>(n)] || !ends_threads(last(n))) continue;
      std::vector<bool> leads(blocks.size(), false);
      walk({n}, &leads, [&](int32_t b) -> const auto& { return at(b).previous; });
      int64_t sum = 0;
      for (int32_t b = 0; b < count(); ++b)
        if (leads[static_cast<size_t>(b)] && reachable[static_cast<size_t>(b)]) sum += at(b).end - at(b).begin;
      ends.push_back({n, last(n).detail->traps ? 2 : is_conditional(last(n), always) ? 1 : 0, sum});
    }
    std::sort(ends.begin(), ends.end(), [](const End& a, const End& b) {
      return std::tuple(a.kind, -a.ops, -a.block) < std::tuple(b.kind, -b.ops, -b.block);
    });
    leaves_.assign(blocks.size(), false);
    for (size_t i = 0; i < ends.size(); ++i) {
      const auto end = static_cast<size_t>(ends[i].block);
      if (level_[end] >= 0) continue;  // lanes continue from this block
      leaves_[end] = true;
      mark(ends[i].block, static_cast<int32_t>(i));
    }
  }

  std::vector<std::vector<int32_t>> next() const {
    std::vector<std::vector<int32_t>> all(blocks_.size());
    for (int32_t n = 0; n < count(); ++n) {
      auto& list = all[static_cast<size_t>(n)];
      for (const int32_t to : at(n).next)
        if (level_[static_cast<size_t>(to)] == level_[static_cast<size_t>(n)]) list.push_back(to);
      if (leaves_[static_cast<size_t>(n)] || at(n).next.empty()) list.push_back(count());
    }
    return all;
  }

 private:
  int32_t count() const { return static_cast<int32_t>(blocks_.size()); }
  const BasicBlock& at(int32_t n) const { return blocks_[static_cast<size_t>(n)]; }
  const Op& last(int32_t n) const { return ops_[static_cast<size_t>(at(n).end) - 1]; }

  template <class Neighbours>
  static void walk(std::vector<int32_t> from, std::vector<bool>* seen, Neighbours neighbours) {
    for (const int32_t n : from) (*seen)[static_cast<size_t>(n)] = true;
    while (!from.empty()) {
      const int32_t n = from.back();
      from.pop_back();
      for (const int32_t to : neighbours(n)) {
        if ((*seen)[static_cast<size_t>(to)]) continue;
        (*seen)[static_cast<size_t>(to)] = true;
        from.push_back(to);
      }
    }
  }

  // Marks the blocks that reach this end before any other end.
  void mark(int32_t end, int32_t level) {
    std::vector<int32_t> from = {end};
    level_[static_cast<size_t>(end)] = level;
    while (!from.empty()) {
      const int32_t n = from.back();
      from.pop_back();
      for (const int32_t before : at(n).previous) {
        if (level_[static_cast<size_t>(before)] >= 0) continue;
        level_[static_cast<size_t>(before)] = level;
        from.push_back(before);
      }
    }
  }

  const std::vector<Op>& ops_;
  const std::vector<BasicBlock>& blocks_;
  std::vector<int32_t> level_;  // by block: the number of the end that it leads to
  std::vector<bool> leaves_;
};

// Immediate post-dominators by the method of Cooper, Harvey and Kennedy, on the reversed graph; -1: the exit.
class PostDominators {
 public:
  // next: successors by block. The number of blocks represents the exit.
  explicit PostDominators(const std::vector<std::vector<int32_t>>& next)
      : next_(next), exit_(static_cast<int32_t>(next.size())) {
    number_.assign(next.size() + 1, -1);
    parent_.assign(next.size() + 1, -1);
    order();
    parent_[static_cast<size_t>(exit_)] = exit_;
    for (bool changed = true; changed;) {
      changed = false;
      for (auto at = order_.rbegin(); at != order_.rend(); ++at) {
        if (*at == exit_) continue;
        const int32_t best = meet_of_successors(*at);
        if (best < 0 || parent_[static_cast<size_t>(*at)] == best) continue;
        parent_[static_cast<size_t>(*at)] = best;
        changed = true;
      }
    }
  }

  int32_t of(int32_t block) const {
    const int32_t p = parent_[static_cast<size_t>(block)];
    return p == exit_ ? -1 : p;
  }

 private:
  int32_t meet_of_successors(int32_t block) const {
    int32_t best = -1;
    for (const int32_t n : next_[static_cast<size_t>(block)]) {
      if (parent_[static_cast<size_t>(n)] < 0) continue;
      best = best < 0 ? n : meet(best, n);
    }
    return best;
  }

  int32_t meet(int32_t a, int32_t b) const {
    while (a != b) {
      while (number_[static_cast<size_t>(a)] < number_[static_cast<size_t>(b)]) a = parent_[static_cast<size_t>(a)];
      while (number_[static_cast<size_t>(b)] < number_[static_cast<size_t>(a)]) b = parent_[static_cast<size_t>(b)];
    }
    return a;
  }

  // Postorder of the reversed graph from the exit. Blocks that never reach it (endless loops) are not in it.
  void order() {
    std::vector<std::vector<int32_t>> reverse(next_.size() + 1);
    for (size_t i = 0; i < next_.size(); ++i)
      for (const int32_t n : next_[i]) reverse[static_cast<size_t>(n)].push_back(static_cast<int32_t>(i));
    std::vector<std::pair<int32_t, size_t>> stack = {{exit_, 0}};
    std::vector<bool> seen(next_.size() + 1, false);
    seen[static_cast<size_t>(exit_)] = true;
    while (!stack.empty()) {
      auto& [block, child] = stack.back();
      const auto& children = reverse[static_cast<size_t>(block)];
      if (child == children.size()) {
        number_[static_cast<size_t>(block)] = static_cast<int32_t>(order_.size());
        order_.push_back(block);
        stack.pop_back();
        continue;
      }
      const int32_t to = children[child++];
      if (seen[static_cast<size_t>(to)]) continue;
      seen[static_cast<size_t>(to)] = true;
      stack.push_back({to, 0});
    }
  }

  const std::vector<std::vector<int32_t>>& next_;
  int32_t exit_;
  std::vector<int32_t> number_, parent_, order_;
};

}  // namespace

std::vector<BasicBlock> blocks_of(const std::vector<Op>& ops, int32_t always) {
  const auto count = static_cast<int32_t>(ops.size());
  std::vector<bool> begins(ops.size() + 1, false);
  begins[0] = true;
  const auto target = [&](int32_t t) { begins[static_cast<size_t>(t)] = true; };
  for (size_t i = 0; i < ops.size(); ++i) {
    if (!ends_block(ops[i])) continue;
    begins[i + 1] = true;
    if (ops[i].action.shape == Shape::branch)
      target(ops[i].d);
    else
      for (const int32_t t : ops[i].detail->targets) target(t);
  }
  std::vector<BasicBlock> blocks;
  std::vector<int32_t> block_at(ops.size() + 1, -1);
  for (int32_t i = 0; i < count; ++i) {
    if (begins[static_cast<size_t>(i)]) {
      if (!blocks.empty()) blocks.back().end = i;
      blocks.push_back({i, count, {}, {}});
    }
    block_at[static_cast<size_t>(i)] = static_cast<int32_t>(blocks.size()) - 1;
  }
  for (size_t n = 0; n < blocks.size(); ++n) {
    const Op& last = ops[static_cast<size_t>(blocks[n].end) - 1];
    const auto link = [&](int32_t to_op) {
      if (to_op >= count) return;
      const int32_t to = block_at[static_cast<size_t>(to_op)];
      if (std::find(blocks[n].next.begin(), blocks[n].next.end(), to) != blocks[n].next.end()) return;
      blocks[n].next.push_back(to);
      blocks[static_cast<size_t>(to)].previous.push_back(static_cast<int32_t>(n));
    };
    bool falls = true;
    if (ends_block(last)) {
      const bool branch = last.action.shape == Shape::branch;
      if (branch)
        link(last.d);
      else
        for (const int32_t t : last.detail->targets) link(t);
      falls = is_conditional(last, always) || !(branch || last.detail->ends);
    }
    if (falls) link(blocks[n].end);
  }
  return blocks;
}

void insert_joins(std::vector<Op>* ops, int32_t always) {
  end_at_jumps(ops, always);
  const std::vector<BasicBlock> blocks = blocks_of(*ops, always);
  const std::vector<std::vector<int32_t>> going_on = PathsThatGoOn(*ops, blocks, always).next();
  const PostDominators post(going_on);
  std::vector<bool> joined(ops->size() + 1, false);
  std::vector<int32_t> join_of(blocks.size(), -1);  // an op, by block whose last op branches
  for (size_t n = 0; n < blocks.size(); ++n) {
    const auto& next = blocks[n].next;
    const Op& last = (*ops)[static_cast<size_t>(blocks[n].end) - 1];
    // A guarded branch to the next op divides lanes too.
    const bool divides = next.size() > 1 || (next.size() == 1 && ends_block(last) && is_conditional(last, always));
    const int32_t meeting = !divides ? -1 : next.size() == 1 ? next[0] : post.of(static_cast<int32_t>(n));
    if (meeting < 0) continue;
    join_of[n] = blocks[static_cast<size_t>(meeting)].begin;
    joined[static_cast<size_t>(join_of[n])] = true;
  }
  std::vector<int32_t> moved(ops->size() + 1, 0);  // new target of a jump to that op: its join
  std::vector<Op> made;
  for (size_t i = 0; i < ops->size(); ++i) {
    moved[i] = static_cast<int32_t>(made.size());
    if (joined[i]) {
      Op join;
      join.action = Action(Shape::join);
      join.guard = always;
      join.first = false;
      join.source = (*ops)[i].source;
      made.push_back(join);
    }
    made.push_back((*ops)[i]);
  }
  moved[ops->size()] = static_cast<int32_t>(made.size());
  for (size_t n = 0; n < blocks.size(); ++n) {
    const auto last = static_cast<size_t>(blocks[n].end) - 1;
    Op& op = made[static_cast<size_t>(moved[last]) + (joined[last] ? 1 : 0)];
    if (!ends_block(op)) continue;
    const int32_t join = join_of[n] < 0 ? -1 : moved[static_cast<size_t>(join_of[n])];
    if (op.action.shape == Shape::branch) {
      op.d = moved[static_cast<size_t>(op.d)];
    } else {
      for (int32_t& t : const_cast<Detail*>(op.detail)->targets) t = moved[static_cast<size_t>(t)];
    }
    op.a = join;
  }
  *ops = std::move(made);
}

}  // namespace tandem::vgpu::machine
