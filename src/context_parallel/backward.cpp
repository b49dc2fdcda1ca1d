#include "base/text.h"
#include "context_parallel/bias.h"
#include "context_parallel/captured.h"
#include "context_parallel/execution.h"
#include "context_parallel/key_gradients.h"

namespace tandem::context_parallel {
namespace {

// dq of the rank's queries, summed over the steps in their order, or by the tree of chunks.
class QueryGradients {
 public:
  explicit QueryGradients(const ShardCall& call) : call_(call), queries_(call.plan->queries().shards(call.rank)) {
    sums_ = RowBuffer(call.engine, kSumType, call.q_shape(queries_.rows()));
    if (call.plan->chunk() == 0) return;
    for (std::vector<int64_t>& leaves : key_leaves(*call.plan, call.rank)) trees_.emplace_back(std::move(leaves));
  }

  Status clear() { return sums_.clear(); }

  // Sets the output dq of a step's problem. After the call of the engine, add() adds it to the sums.
  Status bind(const ContextStep& step, Problem* p) {
    const int64_t row = queries_.row(step.q);
    if (call_.plan->chunk() == 0) {
      p->dq = from_row(sums_.view(), row);
      return {};
    }
    const Shard& shard = queries_.runs()[queries_.find(step.q)];
    leaf_ = RowBuffer(call_.engine, kSumType, call_.q_shape(shard.tokens.count));
    p->dq = from_row(leaf_.view(), row - shard.first);
    return shard.tokens.count > step.q.count ? leaf_.clear() : Status{};
  }
  Status add(const ContextStep& step) {
    if (call_.plan->chunk() == 0) return {};
    return trees_[queries_.find(step.q)].add({0, step.key_order}, std::move(leaf_),
                                             [this](RowBuffer& left, RowBuffer& right) {
                                               return call_.engine.add(right.view(), left.view(), left.shape());
                                             });
  }

  Status finish() {
    for (size_t n = 0; n < trees_.size(); ++n) {
      if (!trees_[n].has_leaves()) continue;
      RowBuffer& rows = trees_[n].nodes().begin()->second.value;
      TANDEM_TRY(call_.engine.copy(rows.view(), from_row(sums_.view(), queries_.runs()[n].first), rows.shape()));
    }
    return call_.engine.copy(sums_.view(), call_.problem.dq, sums_.shape());
  }

  int64_t row(const ContextStep& step) const { return queries_.row(step.q); }

 private:
  const ShardCall& call_;
  PlacedRuns queries_;
  RowBuffer sums_, leaf_;                  // leaf_: with chunks, of the present step
  std::vector<TreeSum<RowBuffer>> trees_;  // with chunks: of each run of queries
};

// The backward of one call. Gradients of a batch's keys return to their owners while the next batch is computed.
class BackwardRounds {
 public:
  BackwardRounds(const ShardCall& call, int32_t rounds_at_once)
      : call_(call),
        batches_{call.plan->ranks(), rounds_at_once},
        runner_(call),
        exchange_(call, batches_),
        dq_(call),
        dbias_(call),
        own_(call) {}

  Status run() {
    TANDEM_TRY(dq_.clear());
    TANDEM_TRY(dbias_.clear());
    TANDEM_TRY(own_.clear());
    if (call_.captured != nullptr) TANDEM_TRY(call_.captured->begin(call_));
    std::vector<RoundKeys> batch;
    for (int32_t n = 0; n < batches_.count(); ++n) {
      TANDEM_TRY(exchange_.next(n, &batch));
      std::vector<RowMemory> parts(batch.size());
      for (size_t i = 0; i < batch.size(); ++i) {
        RoundGradients gradients(call_, batch[i]);
        TANDEM_TRY(gradients.clear());
        TANDEM_TRY(compute(batch[i], gradients));
        TANDEM_TRY(gradients.message(&parts[i]));
      }
      TANDEM_TRY(add_returned());
      TANDEM_TRY(return_parts(n, batch, parts));
    }
    TANDEM_TRY(add_returned());
    TANDEM_TRY(own_.finish());
    return dq_.finish();
  }

 private:
  Status compute(const RoundKeys& keys, RoundGradients& gradients) {
    for (const ContextStep& step : call_.plan->steps_between(call_.rank, keys.peer)) {
      for (const ContextStep& part : block_parts(*call_.plan, step)) TANDEM_TRY(compute(part, keys, gradients));
    }
    return {};
  }

  Status compute(const ContextStep& s, const RoundKeys& keys, RoundGradients& gradients) {
    const int64_t q_row = dq_.row(s), k_row = keys.places.row(s.k);
    Problem p = runner_.problem_of(s, q_row, from_row(keys.k, k_row), from_row(keys.v, k_row));
    TANDEM_TRY(dq_.bind(s, &p));
    TANDEM_TRY(dbias_.bind(s, q_row, &p));
    TANDEM_TRY(gradients.bind(s, &p));
    TANDEM_TRY(call_.captured != nullptr ? call_.captured->run(runner_, s, p) : runner_.run(p));
    TANDEM_TRY(dq_.add(s));
    TANDEM_TRY(dbias_.add(s, q_row));
    return gradients.add(s);
  }

  // Sends the gradients of a batch to the owners of its keys, and starts to receive the parts of the readers.
  Status return_parts(int32_t n, const std::vector<RoundKeys>& batch, std::vector<RowMemory>& parts) {
    if (n == 0) return own_.add(call_.rank, parts[0]);
    Messages messages;
    for (size_t i = 0; i < batch.size(); ++i) messages.sends.emplace_back(batch[i].peer, std::move(parts[i]));
    for (int32_t round = batches_.begin(n); round < batches_.end(n); ++round) {
      const int32_t reader = call_.plan->reader(call_.rank, round);
      messages.receives.emplace_back(reader, own_.message_from(reader));
    }
    return returns_.start(*call_.transport, std::move(messages));
  }

  Status add_returned() {
    TANDEM_TRY(returns_.wait());
    for (auto& [reader, bytes] : returns_.received()) TANDEM_TRY(own_.add(reader, bytes));
    returns_ = {};
    return {};
  }

  const ShardCall& call_;
  RoundBatches batches_;
  StepRunner runner_;
  KeyExchange exchange_;
  QueryGradients dq_;
  BiasGradient dbias_;
  OwnKeyGradients own_;
  Exchange returns_;
};

}  // namespace

Status backward_by_rounds(const ShardCall& call, int32_t rounds_at_once) {
  return BackwardRounds(call, rounds_at_once).run();
}

}  // namespace tandem::context_parallel
