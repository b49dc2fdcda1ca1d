// Runs a problem as ranks would: shards its tensors, calls the C interface on each rank, and collects the results.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "problem/problem.h"
#include "support/check_accuracy.h"
#include "tandem/context_parallel.h"

namespace tandem::test {

// A division of a problem, printed by each failure.
struct Division {
  int32_t ranks = 2;
  int32_t layout = TANDEM_CP_BALANCED;
  int32_t execution = TANDEM_CP_GATHER;
  int64_t chunk = 0;

  std::string text() const;
};

using CpPlan = std::unique_ptr<tandem_cp_plan, void (*)(tandem_cp_plan*)>;

// The plan of a problem's sequences and mask. Throws std::runtime_error with the message of a refusal.
CpPlan plan_of(const Problem& p, const Division& division);

// One rank of a call.
struct RankRun {
  tandem_cp_plan* plan;
  const tandem_cp_transport* transport;
  int32_t execution = TANDEM_CP_GATHER;
  tandem_context* context = nullptr;  // null: a context of the CPU
};

// Runs the part of a rank, and copies its results to the problem. Returns the error message; empty: success. adjust:
// changes the arguments before the call.
using AdjustArgs = std::function<void(tandem_attention_args&)>;
std::string run_rank(const Problem& p, const RankRun& run, const AdjustArgs& adjust = nullptr);

// Sets the results of the rows beyond the used lengths, which no document has.
void fill_unused(const Problem& p);

// Runs the problem on the ranks of a division. adjust: adds options that a Problem does not have as arguments. Throws
// std::runtime_error with the message of the first rank that fails.
void run_on_ranks(const Problem& p, const Division& division, const AdjustArgs& adjust = nullptr);

// Copies expressions and dropout from the arguments of a case.
AdjustArgs options_of(const tandem_attention_args& args);

// The engine of the check of accuracy.
Engine engine_on_ranks(const Division& division);

}  // namespace tandem::test
