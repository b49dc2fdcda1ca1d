#include <limits>

#include "base/text.h"
#include "context_parallel/chunk_leaves.h"
#include "context_parallel/execution.h"
#include "context_parallel/key_exchange.h"
#include "context_parallel/tree_sum.h"

namespace tandem::context_parallel {
namespace {

struct OutRows {
  RowBuffer out, lse;

  OutRows() = default;
  OutRows(const ShardCall& call, int64_t rows)
      : out(call.engine, kSumType, call.out_shape(rows)), lse(call.engine, kSumType, call.lse_shape(rows)) {}
  // Sets the rows of attention over no keys.
  Status clear(const ShardCall& call) {
    TANDEM_TRY(out.clear());
    return call.engine.fill(lse.view(), lse.shape(), -std::numeric_limits<float>::infinity());
  }
  OutPart part(int64_t row = 0) { return {from_row(out.view(), row), from_row(lse.view(), row)}; }
};

// out and lse of the rank's queries, merged from the parts of its steps.
class OutSums {
 public:
  OutSums(const ShardCall& call, StepRunner& runner)
      : call_(call), runner_(runner), queries_(call.plan->queries().shards(call.rank)) {
    if (call.plan->chunk() == 0) {
      sums_ = OutRows(call, queries_.rows());
    } else {
      for (std::vector<int64_t>& leaves : key_leaves(*call.plan, call.rank)) trees_.emplace_back(std::move(leaves));
    }
  }

  Status start() { return call_.plan->chunk() == 0 ? sums_.clear(call_) : Status{}; }

  Status add(const ContextStep& step, const RoundKeys& keys) {
    const size_t run = queries_.find(step.q);
    const int64_t q_row = queries_.row(step.q), k_row = keys.places.row(step.k);
    Problem p = runner_.problem_of(step, q_row, from_row(keys.k, k_row), from_row(keys.v, k_row));
    const bool chunks = call_.plan->chunk() > 0;
    const Shard& shard = queries_.runs()[run];
    // A part of a chunk has all rows of the chunk, so that all parts of a node have the same rows.
    OutRows rows(call_, chunks ? shard.tokens.count : step.q.count);
    if (rows.out.shape().rows > step.q.count) TANDEM_TRY(rows.clear(call_));
    const OutPart part = rows.part(chunks ? q_row - shard.first : 0);
    p.out = part.out;
    p.lse = part.lse;
    TANDEM_TRY(runner_.run(p));
    if (!chunks) {
      const OutPart both[] = {sums_.part(q_row), part};
      return call_.engine.merge(both, both[0], call_.out_shape(step.q.count));
    }
    return trees_[run].add({0, step.key_order}, std::move(rows), [&](OutRows& left, OutRows& right) {
      const OutPart both[] = {left.part(), right.part()};
      return call_.engine.merge(both, both[0], left.out.shape());
    });
  }

  // Adds the sink and writes the results.
  Status finish() {
    if (call_.plan->chunk() == 0) return write(sums_.part(), 0, queries_.rows());
    for (size_t n = 0; n < trees_.size(); ++n) {
      const Shard& shard = queries_.runs()[n];
      OutRows none;
      if (!trees_[n].has_leaves()) {
        none = OutRows(call_, shard.tokens.count);
        TANDEM_TRY(none.clear(call_));
      }
      OutRows& rows = trees_[n].has_leaves() ? trees_[n].nodes().begin()->second.value : none;
      TANDEM_TRY(write(rows.part(), shard.first, shard.tokens.count));
    }
    return {};
  }

 private:
  Status write(const OutPart& sum, int64_t first, int64_t rows) {
    const Problem& p = call_.problem;
    std::vector<OutPart> parts{sum};
    // The sink is a key with the value 0, and enters the softmax of a row once.
    RowBuffer zeros, sink;
    if (p.sink) {
      zeros = RowBuffer(call_.engine, kSumType, {1, 1, p.head_dim_v});
      sink = RowBuffer(call_.engine, kSumType, {1, p.heads_q, 1});
      TANDEM_TRY(zeros.clear());
      const View values{.data = p.sink.data, .dtype = p.sink.dtype, .head = p.sink.head, .present = true};
      TANDEM_TRY(call_.engine.copy(values, sink.view(), sink.shape()));
      OutPart part{zeros.view(), sink.view()};
      part.out.row = part.out.head = part.lse.row = 0;
      parts.push_back(part);
    }
    return call_.engine.merge(parts, {from_row(p.out, first), from_row(p.lse, first)}, call_.out_shape(rows));
  }

  const ShardCall& call_;
  StepRunner& runner_;
  PlacedRuns queries_;
  OutRows sums_;                         // without chunks
  std::vector<TreeSum<OutRows>> trees_;  // with chunks: of each run of queries
};

}  // namespace

Status forward_by_rounds(const ShardCall& call, int32_t rounds_at_once) {
  const RoundBatches batches{call.plan->ranks(), rounds_at_once};
  StepRunner runner(call);
  KeyExchange exchange(call, batches);
  OutSums sums(call, runner);
  TANDEM_TRY(sums.start());
  std::vector<RoundKeys> batch;
  for (int32_t n = 0; n < batches.count(); ++n) {
    TANDEM_TRY(exchange.next(n, &batch));
    for (const RoundKeys& keys : batch) {
      for (const ContextStep& s : call.plan->steps_between(call.rank, keys.peer)) {
        for (const ContextStep& part : block_parts(*call.plan, s)) TANDEM_TRY(sums.add(part, keys));
      }
    }
  }
  return sums.finish();
}

}  // namespace tandem::context_parallel
