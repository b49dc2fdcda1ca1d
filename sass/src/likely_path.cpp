#include "sass/src/likely_path.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>

#include "sass/src/units.h"
#include "sass/src/work.h"

namespace tandem::machine_code {
namespace {

constexpr int kSelectsOfMask = 8, kProductsOfRescale = 16, kExponentialsOfStep = 8, kPairsCleared = 4;

bool is_select(const Instruction& i) { return (i.base() == "SEL" || i.base() == "FSEL") && i.last() != "PT"; }

bool starts_with_register(const std::string& operand) {
  return operand.size() > 1 && (operand[0] == 'R' || operand.starts_with("UR")) && !operand.starts_with("RZ");
}

// Returns "R4", "UR4" for "R4.reuse", "-R4", "|UR4|".
std::string register_in(std::string operand) {
  std::erase_if(operand, [](char c) { return c == '-' || c == '|' || c == '!' || c == '~'; });
  return operand.substr(0, operand.find_first_of(".["));
}

bool sets_predicates(const Instruction& i) {
  const std::string_view base = i.base();
  return base.ends_with("SETP") || base.ends_with("PLOP3") || base == "VOTE";
}

// Returns true if the instruction writes this register or predicate: its first operand, or its second one if both may
// be predicates.
bool sets(const Instruction& i, const std::string& name) {
  if (i.operands.empty()) return false;
  if (i.operands[0] == name) return true;
  return i.operands.size() > 1 && i.operands[1] == name && sets_predicates(i);
}

// Returns true if P2R copies this predicate into a register, as a bit.
bool puts_into_register(const Instruction& i, const std::string& predicate) {
  if (i.base() != "P2R" || predicate.size() != 2 || predicate[0] != 'P') return false;
  return std::stoul(i.last(), nullptr, 16) >> (predicate[1] - '0') & 1;
}

// Returns true if a value depends on a vote or on the test of a barrier. path: the instructions executed before, newest
// last.
bool decides_exceptions(const std::vector<Instruction>& code, const std::vector<int32_t>& path, size_t length,
                        const std::string& name, int depth) {
  constexpr int deepest = 4;
  if (depth > deepest) return false;
  for (size_t at = length; at-- > 0;) {
    const Instruction& i = code[static_cast<size_t>(path[at])];
    if (!sets(i, name)) continue;
    if (i.base() == "VOTE" || i.base() == "SYNCS") return true;
    if (i.base() == "P2R") {
      constexpr std::array kPredicates = {"P0", "P1", "P2", "P3", "P4", "P5", "P6"};
      return std::ranges::any_of(kPredicates, [&](const char* from) {
        return puts_into_register(i, from) && decides_exceptions(code, path, at, from, depth + 1);
      });
    }
    const bool carries = sets_predicates(i) || i.base() == "R2UR" || i.base() == "MOV" || i.base() == "UMOV";
    if (!carries) return false;
    return std::any_of(i.operands.begin() + 1, i.operands.end(), [&](const std::string& operand) {
      const std::string from = register_in(operand);
      const bool is_predicate = from.starts_with("P") || from.starts_with("UP");
      if (from == name || from == "PT" || from == "UPT") return false;
      return (is_predicate || starts_with_register(from)) && decides_exceptions(code, path, at, from, depth + 1);
    });
  }
  return false;
}

// The condition of a branch: a predicate that an instruction sets, or its inverse.
struct Question {
  std::pair<int32_t, std::string> of = {-1, ""};
  bool contrary = false;
};

// path: see decides_exceptions(). The search passes through copies of a predicate, which are PLOP3s with two constants.
Question question_of(const std::vector<Instruction>& code, const std::vector<int32_t>& path,
                     const Instruction& branch) {
  if (branch.guard.empty() || conditions_of(branch).size() != 1) return {};
  const auto without_not = [](const std::string& predicate) { return predicate.substr(predicate[0] == '!'); };
  Question question{.of = {-1, without_not(branch.guard)}, .contrary = branch.guard[0] == '!'};
  for (size_t at = path.size(); at-- > 0;) {
    const Instruction& i = code[static_cast<size_t>(path[at])];
    const std::vector<std::string>& o = i.operands;
    if (!sets(i, question.of.second)) continue;
    const bool copies = i.base().ends_with("PLOP3") && o.size() == 7 && o[2] == o[3] && o[2].ends_with("PT") &&
                        (o[5] == "0x80" || o[5] == "0x40");
    if (!copies) {
      question.of.first = path[at];
      break;
    }
    question.contrary ^= (o[5] == "0x40") != (o[4][0] == '!');
    question.of.second = without_not(o[4]);
  }
  return question;
}

struct Answer {
  static constexpr int kKnown = std::numeric_limits<int>::max();
  int weight = 0;  // branches with one predicate share the largest difference
  bool yes = false;
};

// One side of a branch: the code that would be executed before both sides join again.
struct Side {
  int32_t first = 0;
  int instructions = 0, selects = 0, products = 0, exponentials = 0;
  bool waits = false, multiplies_matrices = false;
  bool may_mask = false;  // a path of this side masks scores

  bool masks() const { return selects >= kSelectsOfMask; }
  bool is_step() const { return exponentials >= kExponentialsOfStep; }
  bool rescales() const {
    return products >= kProductsOfRescale && 2 * products >= instructions && !multiplies_matrices;
  }
};

void add(const Instruction& i, Side* side) {
  const std::string_view base = i.base();
  ++side->instructions;
  side->selects += is_select(i);
  side->products += base == "FMUL" || base == "FMUL2";
  side->exponentials += base == "MUFU" && i.has("EX2");
  side->waits |= base == "NANOSLEEP" || base == "CALL" || base == "BPT";
  side->multiplies_matrices |= is_product(i);
}

class Walk {
 public:
  Walk(const std::vector<Instruction>& code, const Graph& graph, const Loop& loop, bool through_masks)
      : code_(code),
        graph_(graph),
        loop_(loop),
        has_scores_(work_of(code, whole_loop(graph, loop)).scores() > 0),
        through_masks_(through_masks),
        numbers_(graph.blocks.size()),
        chosen_{std::vector<int32_t>(graph.blocks.size(), kOpen), std::vector<int32_t>(graph.blocks.size(), kOpen)} {
    number_blocks();
    find_meetings();
    for (const Loop& other : graph.loops) {
      if (loop.contains(other) && waits(other)) waiting_heads_.push_back(other.head);
    }
  }

  // Walks twice, because a branch may depend on a mask decision that a later branch reveals.
  std::vector<int32_t> path() {
    walk();
    for (std::vector<int32_t>& of_ways : chosen_) std::ranges::fill(of_ways, kOpen);
    path_.clear();
    walk();
    return std::move(path_);
  }

 private:
  static constexpr int32_t kOpen = -2;

  void walk() {
    for (int32_t block = loop_.head; block >= 0; block = choose(block, through_masks_)) append(block);
  }

  // Returns true for a loop that polls a barrier or a semaphore. Other loops are work that was not unrolled, and one
  // turn of them counts.
  bool waits(const Loop& inner) const {
    const std::vector<int32_t> all = whole_loop(graph_, inner), around = whole_loop(graph_, loop_);
    const auto loads = [&](int32_t i) {
      return code_[static_cast<size_t>(i)].base() == "LDG" && code_[static_cast<size_t>(i)].has("STRONG");
    };
    // The loop polls only if the semaphore was loaded before.
    const bool loaded = std::ranges::count_if(around, loads) > std::ranges::count_if(all, loads);
    const bool polls = std::ranges::any_of(all, [&](int32_t i) {
      const Instruction& instruction = code_[static_cast<size_t>(i)];
      return (loaded && loads(i)) || instruction.base() == "SYNCS" || instruction.base() == "NANOSLEEP";
    });
    return polls && !work_of(code_, all).role();
  }

  void append(int32_t block) {
    const Block& b = graph_.blocks[static_cast<size_t>(block)];
    for (int32_t i = b.begin; i < b.end; ++i) path_.push_back(i);
  }

  // Numbers the blocks of the loop so that forward edges lead to smaller numbers: the postorder of a depth-first
  // search.
  void number_blocks() {
    std::vector<std::pair<int32_t, size_t>> open{{loop_.head, 0}};
    std::vector<bool> seen(graph_.blocks.size());
    seen[static_cast<size_t>(loop_.head)] = true;
    for (int32_t left = 0; !open.empty();) {
      const int32_t block = open.back().first;
      const std::vector<int32_t>& next = graph_.blocks[static_cast<size_t>(block)].next;
      if (open.back().second == next.size()) {
        numbers_[static_cast<size_t>(block)] = left++;
        open.pop_back();
      } else if (const int32_t to = next[open.back().second++]; loop_.contains(to) && !seen[static_cast<size_t>(to)]) {
        seen[static_cast<size_t>(to)] = true;
        open.emplace_back(to, 0);
      }
    }
  }

  // Forward edges within the loop. An edge to the loop's head ends the turn, and edges to other heads are not taken.
  std::vector<int32_t> next_of(int32_t block) const {
    std::vector<int32_t> next;
    for (const int32_t to : graph_.blocks[static_cast<size_t>(block)].next) {
      if (loop_.contains(to) && numbers_[static_cast<size_t>(to)] < numbers_[static_cast<size_t>(block)])
        next.push_back(to);
    }
    return next;
  }

  // For each block the first later block on every path to the end of the turn: dominators of the reversed graph.
  void find_meetings() {
    const auto end = static_cast<int32_t>(graph_.blocks.size());
    std::vector<std::vector<int32_t>> previous(graph_.blocks.size() + 1);
    for (const int32_t block : loop_.blocks) {
      for (const int32_t to : graph_.blocks[static_cast<size_t>(block)].next) {
        if (to == loop_.head) previous[static_cast<size_t>(end)].push_back(block);
      }
      for (const int32_t to : next_of(block)) previous[static_cast<size_t>(to)].push_back(block);
    }
    meetings_ = dominators_of(previous, end);
  }

  Side side_of(int32_t first, int32_t meeting, bool through_masks) {
    Side side{.first = first};
    const size_t before = path_.size();
    for (int32_t block = first; block >= 0 && block != meeting; block = choose(block, through_masks)) {
      side.waits |= std::ranges::find(waiting_heads_, block) != waiting_heads_.end();
      append(block);
    }
    for (size_t i = before; i < path_.size(); ++i) add(code_[static_cast<size_t>(path_[i])], &side);
    path_.resize(before);
    side.may_mask = side.masks() || (!through_masks && has_scores_ && side_of(first, meeting, true).masks());
    return side;
  }

  // Returns true if the block clears eight registers or more, like the code of masked scores.
  bool clears(const Block& block) const {
    const auto begin = code_.begin() + block.begin, end = code_.begin() + block.end;
    return has_scores_ &&
           std::count_if(begin, end, [](const Instruction& i) { return i.base() == "CS2R"; }) >= kPairsCleared;
  }

  bool leads_to(const Instruction& branch, int32_t block) const {
    return std::ranges::find(branch.targets, graph_.blocks[static_cast<size_t>(block)].begin) != branch.targets.end();
  }

  bool decides_exception(const Instruction& branch) const {
    return std::ranges::any_of(conditions_of(branch), [&](const std::string& condition) {
      return decides_exceptions(code_, path_, path_.size(), condition, 0);
    });
  }

  // Returns the block that follows this block on the path; -1 at the end of the turn.
  int32_t choose(int32_t block, bool through_masks) {
    int32_t& chosen = chosen_[through_masks ? 1 : 0][static_cast<size_t>(block)];
    if (chosen != kOpen) return chosen;
    const std::vector<int32_t> next = next_of(block);
    const Instruction& last = code_[static_cast<size_t>(graph_.blocks[static_cast<size_t>(block)].end) - 1];
    if (next.size() < 2) return chosen = next.empty() ? -1 : next.front();
    if (last.has("DIV")) return chosen = next.front();  // diverged lanes
    std::vector<Side> sides;
    for (const int32_t to : next) sides.push_back(side_of(to, meetings_[static_cast<size_t>(block)], through_masks));
    const bool exception = decides_exception(last);
    const bool cleared = clears(graph_.blocks[static_cast<size_t>(block)]);
    const auto first = [&](const Side& a, const Side& b) {
      if (cleared && a.waits == b.waits && a.is_step() != b.is_step()) return a.is_step();
      return better(a, b, exception, through_masks);
    };
    // A decision about a mask holds for the whole turn. A decision about an exception applies where the sides differ
    // most.
    const Question question = question_of(code_, path_, last);
    std::map<std::pair<int32_t, std::string>, Answer>& answers = answers_[through_masks ? 1 : 0];
    const auto answer_of = [&](const Side& side) { return leads_to(last, side.first) != question.contrary; };
    const bool of_masks = has_scores_ && sides[0].masks() != sides[1].masks();
    const int weight = of_masks ? Answer::kKnown : std::abs(sides[0].instructions - sides[1].instructions);
    const auto known = answers.find(question.of);
    const bool answered =
        known != answers.end() && (known->second.weight == Answer::kKnown || known->second.weight > weight);
    if (answered && sides[0].waits == sides[1].waits)
      return chosen = std::ranges::find(sides, known->second.yes, answer_of)->first;
    const Side& best = std::ranges::min(sides, first);
    if ((of_masks || exception) && !answered && question.of.first >= 0)
      answers.insert_or_assign(question.of, Answer{.weight = weight, .yes = answer_of(best)});
    return chosen = best.first;
  }

  bool better(const Side& a, const Side& b, bool exception, bool through_masks) const {
    if (a.waits != b.waits) return b.waits;
    if (a.waits) return a.instructions < b.instructions;
    if (has_scores_ && a.masks() != b.masks()) return a.masks() == through_masks;
    if (!through_masks && a.is_step() && b.is_step() && a.may_mask != b.may_mask) return b.may_mask;
    if (exception && a.is_step() != b.is_step()) return b.is_step();
    if (exception) return a.instructions < b.instructions;
    if (a.rescales() != b.rescales()) return b.rescales();
    return a.instructions > b.instructions;
  }

  const std::vector<Instruction>& code_;
  const Graph& graph_;
  const Loop& loop_;
  const bool has_scores_, through_masks_;
  std::vector<int32_t> numbers_, meetings_, waiting_heads_;
  std::vector<int32_t> chosen_[2];  // next block, once decided; [1]: for masked paths
  // Decisions already taken; [1]: for masked paths.
  std::map<std::pair<int32_t, std::string>, Answer> answers_[2];
  std::vector<int32_t> path_;
};

}  // namespace

std::vector<int32_t> likely_path(const std::vector<Instruction>& code, const Graph& graph, const Loop& loop,
                                 bool through_masks) {
  return Walk(code, graph, loop, through_masks).path();
}

std::vector<int32_t> whole_loop(const Graph& graph, const Loop& loop) {
  std::vector<int32_t> all;
  for (const int32_t block : loop.blocks) {
    const Block& b = graph.blocks[static_cast<size_t>(block)];
    for (int32_t i = b.begin; i < b.end; ++i) all.push_back(i);
  }
  return all;
}

int selects_in(const std::vector<Instruction>& code, const std::vector<int32_t>& path) {
  return static_cast<int>(
      std::ranges::count_if(path, [&](int32_t i) { return is_select(code[static_cast<size_t>(i)]); }));
}

}  // namespace tandem::machine_code
