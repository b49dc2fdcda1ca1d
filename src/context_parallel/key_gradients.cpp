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

Status add_gradients(KeyGradientRows& left, KeyGradientRows& right) {
  add_rows(right.dk.view(), left.dk.view(), left.dk.shape());
  add_rows(right.dv.view(), left.dv.view(), left.dv.shape());
  return {};
}

// The keys of `k_rank` that a rank returns gradients of.
PlacedRuns runs_from(const ContextPlan& plan, int32_t rank, int32_t k_rank) {
  return rank == k_rank ? PlacedRuns(plan.keys().shards(rank)) : PlacedRuns(plan.transfers_between(rank, k_rank));
}

}  // namespace

RoundGradients::RoundGradients(const ShardCall& call, const RoundKeys& keys) : call_(call), places_(keys.places) {
  if (call.plan->chunk() == 0) {
    sums_.resize(static_cast<size_t>(message_bytes(call, keys.places.rows())));
    return;
  }
  for (auto& [key, leaves] : query_leaves(*call.plan, keys.peer)) {
    if (leaves.by_rank.contains(call.rank)) trees_.emplace(key, std::move(leaves.all));
  }
}

void RoundGradients::bind(const ContextStep& step, Problem* p) {
  if (call_.plan->chunk() == 0) {
    const GradientViews views(call_, sums_.data(), places_.rows());
    const int64_t row = places_.row(step.k);
    p->dk = from_row(views.dk, row);
    p->dv = from_row(views.dv, row);
    p->accumulate = true;
    return;
  }
  leaf_ = KeyGradientRows(call_, chunk_rows(*call_.plan, step.k.document, step.key_order));
  const int64_t row = step.k.begin - step.key_order * call_.plan->chunk();
  p->dk = from_row(leaf_.dk.view(), row);
  p->dv = from_row(leaf_.dv.view(), row);
}

Status RoundGradients::add(const ContextStep& step) {
  if (call_.plan->chunk() == 0) return {};
  return trees_[{step.k.document, step.key_order}].add({0, step.query_order}, std::move(leaf_), add_gradients);
}

MessageBytes RoundGradients::message() {
  if (call_.plan->chunk() == 0) return std::move(sums_);
  MessageBytes bytes;
  for (auto& [key, tree] : trees_) {
    for (auto& [begin, entry] : tree.nodes()) {
      KeyGradientRows& rows = entry.value;
      const auto at = static_cast<int64_t>(bytes.size());
      bytes.resize(bytes.size() + static_cast<size_t>(message_bytes(call_, rows.dk.shape().rows)));
      const GradientViews views(call_, bytes.data() + at, rows.dk.shape().rows);
      copy_rows(rows.dk.view(), views.dk, rows.dk.shape());
      copy_rows(rows.dv.view(), views.dv, rows.dv.shape());
    }
  }
  return bytes;
}

OwnKeyGradients::OwnKeyGradients(const ShardCall& call) : call_(call), keys_(call.plan->keys().shards(call.rank)) {
  sums_ = KeyGradientRows(call, keys_.rows());
  if (call.plan->chunk() == 0) return;
  chunks_ = query_leaves(*call.plan, call.rank);
  for (const auto& [key, leaves] : chunks_) trees_.emplace(key, leaves.all);
}

MessageBytes OwnKeyGradients::message_from(int32_t rank) const {
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
  return MessageBytes(static_cast<size_t>(bytes));
}

Status OwnKeyGradients::add(int32_t rank, MessageBytes& message) {
  if (call_.plan->chunk() > 0) return add_nodes(rank, message);
  const PlacedRuns runs = runs_from(*call_.plan, rank, call_.rank);
  const GradientViews views(call_, message.data(), runs.rows());
  for (const Shard& run : runs.runs()) {
    const int64_t row = keys_.row(run.tokens), count = run.tokens.count;
    add_rows(from_row(views.dk, run.first), from_row(sums_.dk.view(), row), call_.k_shape(count));
    add_rows(from_row(views.dv, run.first), from_row(sums_.dv.view(), row), call_.v_shape(count));
  }
  return {};
}

Status OwnKeyGradients::add_nodes(int32_t rank, MessageBytes& message) {
  std::byte* at = message.data();
  for (const auto& [key, leaves] : chunks_) {
    const auto own = leaves.by_rank.find(rank);
    if (own == leaves.by_rank.end()) continue;
    const int64_t rows = chunk_rows(*call_.plan, key.first, key.second);
    for (const MergeNode& node : nodes_left(leaves.all, own->second)) {
      const GradientViews views(call_, at, rows);
      at += message_bytes(call_, rows);
      KeyGradientRows part(call_, rows);
      copy_rows(views.dk, part.dk.view(), part.dk.shape());
      copy_rows(views.dv, part.dv.view(), part.dv.shape());
      TANDEM_TRY(trees_[key].add(node, std::move(part), add_gradients));
    }
  }
  return {};
}

Status OwnKeyGradients::finish(StepRunner& runner) {
  for (auto& [key, tree] : trees_) {
    const int64_t begin = key.second * call_.plan->chunk();
    KeyGradientRows& rows = tree.nodes().begin()->second.value;
    const int64_t row = keys_.row({key.first, 1, begin, rows.dk.shape().rows});
    copy_rows(rows.dk.view(), from_row(sums_.dk.view(), row), rows.dk.shape());
    copy_rows(rows.dv.view(), from_row(sums_.dv.view(), row), rows.dv.shape());
  }
  TANDEM_TRY(runner.convert(sums_.dk.view(), call_.problem.dk, sums_.dk.shape()));
  return runner.convert(sums_.dv.view(), call_.problem.dv, sums_.dv.shape());
}

}  // namespace tandem::context_parallel
