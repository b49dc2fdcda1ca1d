#include "context_parallel/key_gradients.h"

#include "base/text.h"

namespace tandem::context_parallel {
namespace {

int64_t message_bytes(const ShardCall& call, int64_t rows) {
  return call.k_shape(rows).bytes(kSumType) + call.v_shape(rows).bytes(kSumType);
}

// Rows of dk, and then rows of dv, at a place in a message.
struct GradientViews {
  View dk, dv;

  GradientViews(const ShardCall& call, std::byte* data, int64_t rows) {
    dk = compact_view(data, kSumType, call.k_shape(rows));
    dv = compact_view(data + call.k_shape(rows).bytes(kSumType), kSumType, call.v_shape(rows));
  }
};

// The rows of a chunk of keys.
int64_t chunk_rows(const ContextPlan& plan, int32_t document, int64_t number) {
  const int64_t k_len = plan.documents()[static_cast<size_t>(document)].k_len;
  return std::min(plan.chunk(), k_len - number * plan.chunk());
}

// The keys of `k_rank` that a rank returns gradients of.
PlacedRuns runs_from(const ContextPlan& plan, int32_t rank, int32_t k_rank) {
  return rank == k_rank ? PlacedRuns(plan.keys().shards(rank)) : PlacedRuns(plan.transfers_between(rank, k_rank));
}

}  // namespace

Status KeyGradientRows::clear() {
  TANDEM_TRY(dk.clear());
  return dv.clear();
}

Status KeyGradientRows::copy(const ShardCall& call, const View& to_dk, const View& to_dv) {
  TANDEM_TRY(call.engine.copy(dk.view(), to_dk, dk.shape()));
  return call.engine.copy(dv.view(), to_dv, dv.shape());
}

Status KeyGradientRows::add(const ShardCall& call, const View& from_dk, const View& from_dv) {
  TANDEM_TRY(call.engine.add(from_dk, dk.view(), dk.shape()));
  return call.engine.add(from_dv, dv.view(), dv.shape());
}

RoundGradients::RoundGradients(const ShardCall& call, const RoundKeys& keys) : call_(call), places_(keys.places) {
  if (call.plan->chunk() == 0) {
    sums_ = RowMemory(call.engine, message_bytes(call, keys.places.rows()));
    return;
  }
  for (auto& [key, leaves] : query_leaves(*call.plan, keys.peer)) {
    if (leaves.by_rank.contains(call.rank)) trees_.emplace(key, std::move(leaves.all));
  }
}

Status RoundGradients::bind(const ContextStep& step, Problem* p) {
  if (call_.plan->chunk() == 0) {
    const GradientViews views(call_, sums_.data(), places_.rows());
    const int64_t row = places_.row(step.k);
    p->dk = from_row(views.dk, row);
    p->dv = from_row(views.dv, row);
    p->accumulate = true;
    return {};
  }
  leaf_ = KeyGradientRows(call_, chunk_rows(*call_.plan, step.k.document, step.key_order));
  TANDEM_TRY(leaf_.clear());
  const int64_t row = step.k.begin - step.key_order * call_.plan->chunk();
  p->dk = from_row(leaf_.dk.view(), row);
  p->dv = from_row(leaf_.dv.view(), row);
  return {};
}

Status RoundGradients::add(const ContextStep& step) {
  if (call_.plan->chunk() == 0) return {};
  return trees_[{step.k.document, step.key_order}].add({0, step.query_order}, std::move(leaf_),
                                                       [this](KeyGradientRows& left, KeyGradientRows& right) {
                                                         return left.add(call_, right.dk.view(), right.dv.view());
                                                       });
}

Status RoundGradients::message(RowMemory* bytes) {
  if (call_.plan->chunk() == 0) {
    *bytes = std::move(sums_);
    return {};
  }
  int64_t size = 0;
  for (auto& [key, tree] : trees_) {
    for (auto& [begin, entry] : tree.nodes()) size += message_bytes(call_, entry.value.dk.shape().rows);
  }
  *bytes = RowMemory(call_.engine, size);
  std::byte* at = bytes->data();
  for (auto& [key, tree] : trees_) {
    for (auto& [begin, entry] : tree.nodes()) {
      const int64_t rows = entry.value.dk.shape().rows;
      const GradientViews views(call_, at, rows);
      at += message_bytes(call_, rows);
      TANDEM_TRY(entry.value.copy(call_, views.dk, views.dv));
    }
  }
  return {};
}

OwnKeyGradients::OwnKeyGradients(const ShardCall& call) : call_(call), keys_(call.plan->keys().shards(call.rank)) {
  sums_ = KeyGradientRows(call, keys_.rows());
  if (call.plan->chunk() == 0) return;
  chunks_ = query_leaves(*call.plan, call.rank);
  for (const auto& [key, leaves] : chunks_) trees_.emplace(key, leaves.all);
}

RowMemory OwnKeyGradients::message_from(int32_t rank) const {
  int64_t bytes = 0;
  if (call_.plan->chunk() == 0) {
    bytes = message_bytes(call_, runs_from(*call_.plan, rank, call_.rank).rows());
  } else {
    for (const auto& [key, leaves] : chunks_) {
      const auto own = leaves.by_rank.find(rank);
      if (own == leaves.by_rank.end()) continue;
      const int64_t rows = chunk_rows(*call_.plan, key.first, key.second);
      bytes += std::ssize(nodes_left(leaves.all, own->second)) * message_bytes(call_, rows);
    }
  }
  return {call_.engine, bytes};
}

Status OwnKeyGradients::add(int32_t rank, RowMemory& message) {
  if (call_.plan->chunk() > 0) return add_nodes(rank, message);
  const PlacedRuns runs = runs_from(*call_.plan, rank, call_.rank);
  const GradientViews views(call_, message.data(), runs.rows());
  for (const Shard& run : runs.runs()) {
    const int64_t row = keys_.row(run.tokens), count = run.tokens.count;
    const RowEngine& engine = call_.engine;
    TANDEM_TRY(engine.add(from_row(views.dk, run.first), from_row(sums_.dk.view(), row), call_.k_shape(count)));
    TANDEM_TRY(engine.add(from_row(views.dv, run.first), from_row(sums_.dv.view(), row), call_.v_shape(count)));
  }
  return {};
}

Status OwnKeyGradients::add_nodes(int32_t rank, RowMemory& message) {
  std::byte* at = message.data();
  for (const auto& [key, leaves] : chunks_) {
    const auto own = leaves.by_rank.find(rank);
    if (own == leaves.by_rank.end()) continue;
    const int64_t rows = chunk_rows(*call_.plan, key.first, key.second);
    for (const MergeNode& node : nodes_left(leaves.all, own->second)) {
      const GradientViews views(call_, at, rows);
      at += message_bytes(call_, rows);
      KeyGradientRows part(call_, rows);
      TANDEM_TRY(call_.engine.copy(views.dk, part.dk.view(), part.dk.shape()));
      TANDEM_TRY(call_.engine.copy(views.dv, part.dv.view(), part.dv.shape()));
      TANDEM_TRY(trees_[key].add(node, std::move(part), [this](KeyGradientRows& left, KeyGradientRows& right) {
        return left.add(call_, right.dk.view(), right.dv.view());
      }));
    }
  }
  return {};
}

Status OwnKeyGradients::finish() {
  for (auto& [key, tree] : trees_) {
    const int64_t begin = key.second * call_.plan->chunk();
    KeyGradientRows& rows = tree.nodes().begin()->second.value;
    const int64_t row = keys_.row({key.first, 1, begin, rows.dk.shape().rows});
    TANDEM_TRY(rows.copy(call_, from_row(sums_.dk.view(), row), from_row(sums_.dv.view(), row)));
  }
  return sums_.copy(call_, call_.problem.dk, call_.problem.dv);
}

}  // namespace tandem::context_parallel
