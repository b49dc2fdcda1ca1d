#include "score_mod/tile.h"

#include <algorithm>
#include <cstring>

#include "base/instruction_set.h"

namespace tandem::score_mod {
namespace {

// The register of an input. The first registers are the caller's arrays.
int register_of(Input input) {
  switch (input) {
    case Input::score: return 0;
    case Input::head: return 1;
    case Input::q: return 2;
    case Input::k: return 3;
    default: return -1;  // constant within a sequence
  }
}

// The number of times that a step must be computed: once per sequence, per query, or per element.
enum class Rate : uint8_t { sequence, query, element };

Rate rate_of(Input input) {
  switch (input) {
    case Input::score:
    case Input::k: return Rate::element;
    case Input::head:
    case Input::q: return Rate::query;
    default: return Rate::sequence;
  }
}

}  // namespace

extern const TileLoops tile_loops_generic;
#if defined(__x86_64__)
extern const TileLoops tile_loops_avx2, tile_loops_avx512;
#endif

const TileLoops& tile_loops() {
#if defined(__x86_64__)
  static const TileLoops& chosen = instruction_set() == "avx2"               ? tile_loops_avx2
                                   : instruction_set().starts_with("avx512") ? tile_loops_avx512
                                                                             : tile_loops_generic;
  return chosen;
#else
  return tile_loops_generic;
#endif
}

TileProgram::TileProgram(const Graph& graph, std::vector<NodeId> outputs) {
  const std::vector<NodeId> order = graph.needed_by(outputs);
  const auto size = static_cast<size_t>(graph.size());
  std::vector<int> place(size, -1), last_use(size, -1);
  std::vector<Rate> rate(size, Rate::sequence);
  for (size_t i = 0; i < order.size(); ++i) {
    for (const NodeId operand : graph[order[i]].operands) {
      if (operand != kNoNode) last_use[static_cast<size_t>(operand)] = static_cast<int>(i);
    }
  }
  for (const NodeId output : outputs) last_use[static_cast<size_t>(output)] = static_cast<int>(order.size());

  std::vector<int> unused;
  for (size_t i = 0; i < order.size(); ++i) {
    const auto id = static_cast<size_t>(order[i]);
    const Node& node = graph[order[i]];
    if (node.op == Op::input && register_of(static_cast<Input>(node.index)) >= 0) {
      rate[id] = rate_of(static_cast<Input>(node.index));
      place[id] = register_of(static_cast<Input>(node.index));
      continue;
    }
    TileStep step{.op = node.op, .type = node.type, .index = node.index, .value = node.value};
    const int count = node.operand_count();
    for (int n = 0; n < count; ++n) {
      const NodeId operand = node.operands[static_cast<size_t>(n)];
      step.from[n] = place[static_cast<size_t>(operand)];
      rate[id] = std::max(rate[id], rate[static_cast<size_t>(operand)]);
      if (node.op != Op::gather) step.type = graph[operand].type;
    }
    // A result needs a register that no operand uses. Values per sequence or query keep their registers.
    if (rate[id] != Rate::element || unused.empty()) {
      step.to = registers_++;
    } else {
      step.to = unused.back();
      unused.pop_back();
    }
    place[id] = step.to;
    std::vector<TileStep>* const steps[] = {&uniform_, &of_queries_, &varying_};
    steps[static_cast<int>(rate[id])]->push_back(step);
    for (int n = 0; n < count; ++n) {
      const auto operand = static_cast<size_t>(node.operands[static_cast<size_t>(n)]);
      const bool kept = rate[operand] != Rate::element || place[operand] < kTileInputs;
      if (last_use[operand] != static_cast<int>(i) || kept) continue;
      last_use[operand] = -1;  // released once, even if an operand appears twice
      unused.push_back(place[operand]);
    }
  }
  for (const NodeId output : outputs) outputs_.push_back(place[static_cast<size_t>(output)]);
}

TileRun::TileRun(const TileProgram& program, const Values& values, float* memory, const TileLoops& loops)
    : program_(program), values_(values), loops_(loops), memory_(memory) {}

void TileRun::fill(const TileProgram::TileStep& step, const Position& sequence) {
  double value = step.value;
  if (step.op == Op::input) value = sequence.of(static_cast<Input>(step.index));
  if (step.op == Op::scalar) value = values_.scalars[static_cast<size_t>(step.index)];
  void* to = at(step.to);
  if (step.type == Type::real) {
    std::fill_n(static_cast<float*>(to), kTile, static_cast<float>(value));
  } else {
    std::fill_n(static_cast<int32_t*>(to), kTile, static_cast<int32_t>(value));
  }
}

void TileRun::execute(const TileProgram::TileStep& step, int count) {
  LoopArguments arguments{count, at(step.to), {}, nullptr};
  for (int i = 0; i < kMaxRank; ++i) arguments.from[i] = at(step.from[i]);
  if (step.op == Op::gather) {
    arguments.tensor = &values_.tensors[static_cast<size_t>(step.index)];
    return loops_.gathers[static_cast<int>(arguments.tensor->element)](arguments);
  }
  loops_.loops[static_cast<int>(step.op)][static_cast<int>(step.type)](arguments);
}

void TileRun::begin(const Position& sequence) {
  for (const TileProgram::TileStep& step : program_.uniform_) {
    if (operands_of(step.op) == 0 && step.op != Op::gather) {
      fill(step, sequence);
    } else {
      execute(step, kTile);
    }
  }
}

void TileRun::run(const TileInputs& inputs) {
  count_ = inputs.count;
  // The cast is safe, because steps only read inputs.
  inputs_[0] = const_cast<float*>(inputs.score);
  inputs_[1] = const_cast<int32_t*>(inputs.head);
  inputs_[2] = const_cast<int32_t*>(inputs.q);
  inputs_[3] = const_cast<int32_t*>(inputs.k);
  if (!inputs.same_queries) {
    for (const TileProgram::TileStep& step : program_.of_queries_) execute(step, inputs.count);
  }
  for (const TileProgram::TileStep& step : program_.varying_) execute(step, inputs.count);
}

}  // namespace tandem::score_mod
