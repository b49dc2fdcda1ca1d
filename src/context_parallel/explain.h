// Plans as text of at most 80 columns.
#pragma once

#include <string>

#include "context_parallel/plan.h"

namespace tandem::context_parallel {

// Each rank's tokens, work and received keys, and the peer of each round.
std::string explain(const ContextPlan& plan);

// Each step of one rank.
std::string explain_rank(const ContextPlan& plan, int32_t rank);

}  // namespace tandem::context_parallel
