// One rank's part of a call: its shard as a Problem, and the engine's calls for the steps of the plan.
#pragma once

#include <cstddef>
#include <vector>

#include "base/status.h"
#include "context_parallel/plan.h"
#include "context_parallel/rows.h"
#include "context_parallel/step_blocks.h"
#include "problem/problem.h"
#include "tandem/context_parallel.h"

namespace tandem::context_parallel {

inline constexpr DType kSumType = DType::f32;  // parts and sums have this type

class CapturedSums;

// The views of `problem` hold all rows of the shard as one sequence.
struct ShardCall {
  const ContextPlan* plan = nullptr;
  int32_t rank = 0;
  Problem problem;
  RowEngine engine;
  const tandem_cp_transport* transport = nullptr;  // null: the plan has one rank
  tandem_place* places = nullptr;                  // in device memory: of one step
  int64_t first_head = 0, heads_q = 0;             // query heads before the problem's, and all query heads
  CapturedSums* captured = nullptr;                // null: score_mod's tensors need no gradients

  RowShape q_shape(int64_t rows) const { return {rows, problem.heads_q, problem.head_dim}; }
  RowShape k_shape(int64_t rows) const { return {rows, problem.heads_k, problem.head_dim}; }
  RowShape v_shape(int64_t rows) const { return {rows, problem.heads_k, problem.head_dim_v}; }
  RowShape out_shape(int64_t rows) const { return {rows, problem.heads_q, problem.head_dim_v}; }
  RowShape lse_shape(int64_t rows) const { return {rows, problem.heads_q, 1}; }
};

// The rows of a rank, or of the keys that it has received: runs of tokens by document and position.
class PlacedRuns {
 public:
  PlacedRuns() = default;
  explicit PlacedRuns(std::vector<Shard> runs) : runs_(std::move(runs)) {}
  explicit PlacedRuns(const std::vector<TokenRange>& ranges);

  // The index of the run that contains the first token of a range, and the row of this token.
  size_t find(const TokenRange& range) const;
  int64_t row(const TokenRange& range) const;

  const std::vector<Shard>& runs() const { return runs_; }
  int64_t rows() const { return runs_.empty() ? 0 : runs_.back().first + runs_.back().tokens.count; }

 private:
  std::vector<Shard> runs_;
};

// Runs the steps of one call on the engine, with one workspace.
class StepRunner {
 public:
  explicit StepRunner(const ShardCall& call) : call_(call) {}

  // The problem of a step, one of block_parts(), whose first query is row `q_row` of the shard. k and v begin at the
  // step's first key. Outputs are absent.
  Problem problem_of(const ContextStep& step, int64_t q_row, const View& k, const View& v);
  // Runs the problem of the last step, or of some of its heads. first_head: the step's heads before these.
  Status run(Problem problem, int64_t first_head = 0);

 private:
  tandem_place place_of(const ContextStep& step) const;

  const ShardCall& call_;
  tandem_place place_{};
  StepBlocks blocks_;
  RowMemory workspace_;
};

}  // namespace tandem::context_parallel
