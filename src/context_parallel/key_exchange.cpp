#include "context_parallel/key_exchange.h"

#include "base/text.h"

namespace tandem::context_parallel {
namespace {

// A message holds all rows of k, and then all rows of v.
View k_in(RowMemory& bytes, const ShardCall& call, int64_t rows) {
  return compact_view(bytes.data(), call.problem.k.dtype, call.k_shape(rows));
}
View v_in(RowMemory& bytes, const ShardCall& call, int64_t rows) {
  const DType dtype = call.problem.v.dtype;
  return compact_view(bytes.data() + call.k_shape(rows).bytes(dtype), dtype, call.v_shape(rows));
}
RowMemory message_for(const ShardCall& call, int64_t rows) {
  const DType dtype = call.problem.k.dtype;
  return {call.engine, call.k_shape(rows).bytes(dtype) + call.v_shape(rows).bytes(dtype)};
}

// Copies the rows of some of the rank's keys into a message.
Status pack(const ShardCall& call, const PlacedRuns& own, const PlacedRuns& needed, RowMemory* bytes) {
  *bytes = message_for(call, needed.rows());
  const View k = k_in(*bytes, call, needed.rows()), v = v_in(*bytes, call, needed.rows());
  for (const Shard& run : needed.runs()) {
    const int64_t row = own.row(run.tokens);
    const int64_t count = run.tokens.count;
    TANDEM_TRY(call.engine.copy(from_row(call.problem.k, row), from_row(k, run.first), call.k_shape(count)));
    TANDEM_TRY(call.engine.copy(from_row(call.problem.v, row), from_row(v, run.first), call.v_shape(count)));
  }
  return {};
}

}  // namespace

Status KeyExchange::start(int32_t batch) {
  if (batch >= batches_.count()) return {};
  const ContextPlan& plan = *call_.plan;
  const PlacedRuns own(plan.keys().shards(call_.rank));
  Messages messages;
  for (int32_t round = batches_.begin(batch); round < batches_.end(batch); ++round) {
    const int32_t reader = plan.reader(call_.rank, round), peer = plan.peer(call_.rank, round);
    RowMemory bytes;
    TANDEM_TRY(pack(call_, own, PlacedRuns(plan.transfers_between(reader, call_.rank)), &bytes));
    messages.sends.emplace_back(reader, std::move(bytes));
    const PlacedRuns needed(plan.transfers_between(call_.rank, peer));
    messages.receives.emplace_back(peer, message_for(call_, needed.rows()));
  }
  return exchange_.start(*call_.transport, std::move(messages));
}

Status KeyExchange::next(int32_t batch, std::vector<RoundKeys>* keys) {
  keys->clear();
  if (batch == 0) {
    keys->push_back(
        {call_.rank, PlacedRuns(call_.plan->keys().shards(call_.rank)), call_.problem.k, call_.problem.v, {}});
    return start(1);
  }
  TANDEM_TRY(exchange_.wait());
  Exchange done = std::move(exchange_);
  exchange_ = {};
  TANDEM_TRY(start(batch + 1));
  for (auto& [peer, bytes] : done.received()) {
    RoundKeys round{peer, PlacedRuns(call_.plan->transfers_between(call_.rank, peer)), {}, {}, std::move(bytes)};
    round.k = k_in(round.memory, call_, round.places.rows());
    round.v = v_in(round.memory, call_, round.places.rows());
    keys->push_back(std::move(round));
  }
  return {};
}

}  // namespace tandem::context_parallel
