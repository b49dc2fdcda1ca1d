// The executions of a plan. Every rank of the plan runs the same execution at the same time.
//
// Gather and ring keep the queries of a rank and exchange keys by rounds (key_exchange.h). The steps of a rank are
// calls of the engine with an explicit diagonal. Parts merge in the order of the rounds, or by the tree of chunks.
//
// The execution by heads exchanges tokens for heads, computes these heads as one rank would, and exchanges the results.
#pragma once

#include "context_parallel/shard_call.h"

namespace tandem::context_parallel {

// rounds_at_once: 1 is a ring; as many as ranks is a gather.
Status forward_by_rounds(const ShardCall& call, int32_t rounds_at_once);
// Computes dq, dk and dv, but not dsink.
Status backward_by_rounds(const ShardCall& call, int32_t rounds_at_once);

// Both passes. Computes neither dsink.
Status run_by_heads(const ShardCall& call);

// The gradient of the sink, which enters each row once: dsink = sum over rows of p_sink * (dlse - dout * out). The sum
// is float64, and all ranks receive the same result.
Status sum_dsink(const ShardCall& call);

}  // namespace tandem::context_parallel
