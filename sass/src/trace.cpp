#include "sass/src/trace.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "sass/src/graph.h"
#include "sass/src/likely_path.h"
#include "sass/src/units.h"
#include "sass/src/value_analysis.h"

namespace tandem::machine_code {
namespace {

constexpr int kFar = std::numeric_limits<int>::max();
constexpr uint32_t kBytes = 16;  // per instruction

// Decides if a branch is taken, from the known values of its predicates.
Truth taken(const Instruction& branch, const ValueAnalysis& values) {
  if (branch.has("DIV")) return false;  // lanes stay together
  Truth all = values.guard(branch);
  for (const std::string& operand : branch.operands) {
    const Truth one = values.truth(operand);
    const bool predicate = one || operand.starts_with("P") || operand.starts_with("UP") || operand.starts_with("!");
    if (!predicate || all == false) continue;
    all = one == false ? Truth(false) : one ? all : Truth();
  }
  return all;
}

Event event_of(int32_t number, const Instruction& i, const ValueAnalysis& values) {
  Event event{.instruction = number};
  const auto known = [](Value value) { return value.value_or(Event::kUnknown); };
  const auto operand = [&](size_t k) { return k < i.operands.size() ? std::string_view(i.operands[k]) : ""; };
  const std::string_view base = i.base();
  if (base == "SYNCS") {
    event.barrier = known(values.address(operand(1)));
    if (!i.has("EXCH")) event.amount = known(values.value(operand(2)));
  } else if (is_bulk_store(i)) {
    constexpr uint32_t unit = 16;
    if (const Value amount = values.value(operand(2))) event.amount = *amount * unit;
  } else if (base == "UTMALDG" || base == "UBLKCP") {
    event.barrier = known(values.behind(operand(0), 1));
    if (base == "UBLKCP") event.amount = known(values.value(operand(2)));
  } else if (base == "UTCBAR" || base == "ARRIVES") {
    event.barrier = known(values.address(operand(0)));
  } else if (base == "BAR") {
    event.barrier = known(values.value(operand(0)));
    event.amount = known(values.value(operand(1)));
  } else if (in_tensor_memory(i) && is_product(i)) {
    for (const std::string& o : i.operands) {
      if (o.starts_with("idesc")) event.amount = known(values.behind(o, 0));
    }
  }
  return event;
}

// The path of one warp to a loop and around it.
class Walk {
 public:
  Walk(const Kernel& kernel, const Graph& graph, const Loop& loop)
      : kernel_(kernel), code_(kernel.code), graph_(graph), loop_(loop), distances_(graph.blocks.size(), kFar) {
    measure();
    for (const Loop& around : graph_.loops) {
      if (around.contains(loop_)) heads_around_.insert(around.head);
    }
    const std::vector<int32_t> path = likely_path(code_, graph_, loop_, false);
    std::map<int32_t, int32_t> block_of;
    for (const int32_t b : loop_.blocks) block_of[graph_.blocks[static_cast<size_t>(b)].begin] = b;
    int32_t before = -1;
    for (const int32_t i : path) {
      const auto found = block_of.find(i);
      if (found == block_of.end()) continue;
      if (before >= 0) likely_[before] = found->second;
      before = found->second;
    }
  }

  // Returns nothing if this warp does not reach the loop. At an unknown branch, the shorter side is tried first.
  std::optional<WarpTrace> go(const Place& place, int turns) {
    if (std::optional<WarpTrace> found = attempt_to_go(place, turns)) return found;  // the path of the preceding warp
    constexpr int most_attempts = 40;
    for (passes_ = 1; passes_ <= 2; ++passes_) {
      choices_.clear();
      for (int attempt = 0; attempt < most_attempts; ++attempt) {
        if (std::optional<WarpTrace> found = attempt_to_go(place, turns)) return found;
        while (!choices_.empty() && choices_.back().taken + 1 >= choices_.back().sides) choices_.pop_back();
        if (choices_.empty()) break;
        ++choices_.back().taken;
      }
    }
    return std::nullopt;
  }

 private:
  struct Choice {
    int taken = 0, sides = 0;
  };

  std::optional<WarpTrace> attempt_to_go(const Place& place, int turns) {
    constexpr size_t most = 400000, most_before = 8000;
    ValueAnalysis values(kernel_, place);
    WarpTrace trace;
    std::map<int32_t, int> passes;  // per head of an outer loop
    asked_ = 0;
    int32_t block = 0;
    for (bool within = false; trace.events.size() < most;) {
      if (block == loop_.head) {
        within = true;
        trace.turns.push_back(trace.events.size());
        if (static_cast<int>(trace.turns.size()) > turns) return trace;
      }
      // A warp that works ahead reaches its loop in the second turn of the outer loop.
      if (!within && heads_around_.contains(block) && ++passes[block] > passes_) return std::nullopt;
      if (!within && trace.events.size() > most_before) return std::nullopt;
      block = after(block, within, &values, &trace);
      if (block < 0) return std::nullopt;
    }
    return std::nullopt;
  }

  const Block& at(int32_t block) const { return graph_.blocks[static_cast<size_t>(block)]; }

  // Counts the instructions from each block to the loop's head.
  void measure() {
    std::vector<std::vector<int32_t>> previous(graph_.blocks.size());
    for (size_t b = 0; b < graph_.blocks.size(); ++b) {
      for (const int32_t to : graph_.blocks[b].next)
        previous[static_cast<size_t>(to)].push_back(static_cast<int32_t>(b));
    }
    std::deque<int32_t> open{loop_.head};
    distances_[static_cast<size_t>(loop_.head)] = 0;
    while (!open.empty()) {
      const int32_t block = open.front();
      open.pop_front();
      for (const int32_t from : previous[static_cast<size_t>(block)]) {
        const int distance = distances_[static_cast<size_t>(block)] + at(from).end - at(from).begin;
        if (distance >= distances_[static_cast<size_t>(from)]) continue;
        distances_[static_cast<size_t>(from)] = distance;
        open.push_back(from);
      }
    }
  }

  // Executes a block. Returns the next block, or -1 if the warp ends or leaves the path to its loop.
  int32_t after(int32_t block, bool within, ValueAnalysis* values, WarpTrace* trace) {
    Truth branch;
    Value aim;  // target address of an indirect branch
    bool ends = false;
    for (int32_t n = at(block).begin; n < at(block).end; ++n) {
      const Instruction& i = code_[static_cast<size_t>(n)];
      const Truth guard = values->guard(i);
      if (branches(i)) branch = taken(i, *values);
      if (i.base() == "BRX") aim = values->value(i.operands[0].substr(0, i.operands[0].find(' ')));
      ends = i.base() == "EXIT" && (guard == true);
      const bool waits = i.base() == "SYNCS" && i.has("PHASECHK");
      if (guard == false && !branches(i)) continue;
      if (guard || !waits) trace->events.push_back(event_of(n, i, *values));
      values->execute(i);
    }
    if (ends) return -1;
    const Instruction& last = code_[static_cast<size_t>(at(block).end) - 1];
    if (branches(last) && branch && last.targets.size() == 1)
      aim = *branch ? code_[static_cast<size_t>(last.targets[0])].address : last.address + kBytes;
    return next_of(block, aim, within);
  }

  // aim: the known address of the next block, or nothing.
  int32_t next_of(int32_t block, Value aim, bool within) {
    const std::vector<int32_t>& next = at(block).next;
    const auto usable = [&](int32_t to) {
      return within ? to == loop_.head || loop_.contains(to) : distances_[static_cast<size_t>(to)] != kFar;
    };
    if (aim) {
      for (const int32_t to : next) {
        if (code_[static_cast<size_t>(at(to).begin)].address == *aim && usable(to)) return to;
      }
      if (!within) return -1;
    }
    if (const auto found = likely_.find(block); within && found != likely_.end()) return found->second;
    std::vector<int32_t> sides;
    std::ranges::copy_if(next, std::back_inserter(sides), usable);
    std::ranges::stable_sort(sides, {}, [&](int32_t to) { return distances_[static_cast<size_t>(to)]; });
    if (sides.empty()) return -1;
    if (within || sides.size() == 1) return sides.front();
    if (asked_ == choices_.size()) choices_.push_back({.taken = 0, .sides = static_cast<int>(sides.size())});
    const auto taken = static_cast<size_t>(choices_[asked_++].taken);
    return sides[std::min(taken, sides.size() - 1)];
  }

  const Kernel& kernel_;
  const std::vector<Instruction>& code_;
  const Graph& graph_;
  const Loop& loop_;
  std::vector<int> distances_;
  std::map<int32_t, int32_t> likely_;  // blocks of the likely path, and the block after each
  std::set<int32_t> heads_around_;     // heads of the loops around this loop
  std::vector<Choice> choices_;        // at unknown branches on the path to the loop
  int passes_ = 1;                     // allowed turns of the outer loops
  size_t asked_ = 0;                   // choices used in this attempt
};

// Returns the loops whose turns are counted, with the steady loop of each role first.
std::vector<const LoopCost*> steady_loops(const CostModel& cost_model) {
  std::vector<const LoopCost*> found;
  const auto add = [&](const LoopCost* loop) {
    const auto same = [&](const LoopCost* other) { return other->address == loop->address; };
    if (loop != nullptr && std::ranges::none_of(found, same)) found.push_back(loop);
  };
  for (const bool masked : {false, true}) {
    for (const Role role : {Role::computing, Role::softmax}) {
      if (const LoopCost* loop = cost_model.steady(role, masked); loop != nullptr && (!masked || found.empty()))
        add(loop);
    }
  }
  for (const Role role : {Role::mma, Role::load, Role::correction, Role::staging, Role::reduction}) {
    if (const LoopCost* loop = cost_model.steady(role, false)) add(loop);
  }
  for (const LoopCost& loop : cost_model.loops) {
    if (!loop.once && loop.role != Role::epilogue) add(&loop);
  }
  return found;
}

// Returns the loops of the second pass: the other loops of roles that have one in the first pass.
std::vector<const LoopCost*> loops_of_second_pass(const CostModel& cost_model) {
  std::vector<const LoopCost*> found;
  for (const LoopCost& loop : cost_model.loops) {
    const bool scores = loop.role == Role::softmax;
    if (loop.once || (!scores && loop.role != Role::mma && loop.role != Role::load)) continue;
    const LoopCost* first = cost_model.steady(loop.role, false);
    if (first != nullptr && first->address != loop.address && !(scores && loop.masked)) found.push_back(&loop);
  }
  return found;
}

struct Way {
  Role role;
  Walk walk;
};

// Returns true for a loop that waits for barriers and arrives at others: a relay, if no other role fits.
bool passes_signals_on(const Kernel& kernel, const Graph& graph, const Loop& loop) {
  bool waits = false, arrives = false;
  for (const int32_t n : whole_loop(graph, loop)) {
    const Instruction& i = kernel.code[static_cast<size_t>(n)];
    waits |= i.base() == "SYNCS" && i.has("PHASECHK");
    arrives |= i.base() == "SYNCS" && i.has("ARRIVE");
  }
  return waits && arrives;
}

std::vector<Way> ways_of(const Kernel& kernel, const Graph& graph, const CostModel& cost_model, Pass pass) {
  std::vector<Way> ways;
  std::vector<const Loop*> taken;
  for (const LoopCost* cost : pass == Pass::first ? steady_loops(cost_model) : loops_of_second_pass(cost_model)) {
    for (const Loop& loop : graph.loops) {
      const Block& head = graph.blocks[static_cast<size_t>(loop.head)];
      if (kernel.code[static_cast<size_t>(head.begin)].address != cost->address) continue;
      ways.push_back({cost->role, Walk(kernel, graph, loop)});
      taken.push_back(&loop);
    }
  }
  if (pass == Pass::second) return ways;
  std::vector<const Loop*> relays;
  for (const Loop& loop : graph.loops) {
    const auto overlaps = [&](const Loop* other) {
      return other == &loop || loop.contains(*other) || other->contains(loop);
    };
    if (std::ranges::none_of(taken, overlaps) && passes_signals_on(kernel, graph, loop)) relays.push_back(&loop);
  }
  for (const Loop* loop : relays) {
    if (std::ranges::none_of(relays, [&](const Loop* inner) { return loop->contains(*inner); }))
      ways.push_back({Role::relay, Walk(kernel, graph, *loop)});
  }
  return ways;
}

}  // namespace

bool has_second_pass(const CostModel& cost_model) {
  const std::vector<const LoopCost*> loops = loops_of_second_pass(cost_model);
  const auto has = [&](Role role) { return std::ranges::find(loops, role, &LoopCost::role) != loops.end(); };
  return cost_model.backward && has(Role::softmax) && has(Role::mma) && has(Role::load);
}

std::vector<WarpTrace> trace(const Kernel& kernel, const CostModel& cost_model, int turns, Pass pass) {
  constexpr int lanes = 32;
  const Graph graph = graph_of(kernel.code);
  std::vector<Way> ways = ways_of(kernel, graph, cost_model, pass);
  std::vector<WarpTrace> traces;
  for (int block = 0; block < (cost_model.pair ? 2 : 1); ++block) {
    for (int warp = 0; warp < std::max(1, kernel.threads / lanes); ++warp) {
      for (Way& way : ways) {
        std::optional<WarpTrace> found = way.walk.go({.thread = warp * lanes, .block = block}, turns);
        if (!found) continue;
        found->role = way.role;
        found->block = block;
        found->warp = warp;
        traces.push_back(std::move(*found));
        break;
      }
    }
  }
  return traces;
}

}  // namespace tandem::machine_code
