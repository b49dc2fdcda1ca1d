#include "context_parallel/captured.h"

#include "base/text.h"
#include "context_parallel/chunk_leaves.h"
#include "context_parallel/heads.h"
#include "context_parallel/transport.h"
#include "problem/bound_expression.h"
#include "problem/convert.h"

namespace tandem::context_parallel {
namespace {

constexpr int64_t kRow = 128;  // cells of a row

// Returns the view of cells in a vector of all gradients.
BiasView compact_cells(const CapturedGradient& gradient, std::byte* cells) {
  BiasView view = gradient.to;
  view.data = cells + gradient.first * size_of(kSumType);
  view.dtype = kSumType;
  for (int64_t dim = 3, step = 1; dim >= 0; step *= view.shape[dim--]) view.stride[dim] = step;
  return view;
}

}  // namespace

CapturedSums::CapturedSums(ShardCall* call, bool by_heads) : call_(*call), by_heads_(by_heads) {
  ModView& mod = call->problem.score_mod;
  if (!mod || mod->cells == 0) return;
  gradients_ = mod.read;
  auto without = std::make_shared<BoundExpression>(*mod.read);
  for (CapturedGradient& gradient : without->gradients) gradient.to = {};
  without->cells = 0;
  mod.read = std::move(without);
  call->captured = this;
  rows_ = ceil_div(gradients_->cells, kRow);
  if (call->plan->chunk() == 0) return;
  int64_t chunks = 0;
  for (const PackedDocument& d : call->plan->documents()) {
    first_chunks_.push_back(chunks);
    chunks += ceil_div(d.q_len, call->plan->chunk());
  }
  std::vector<int64_t> leaves;
  for (int64_t n = 0; n < chunks; ++n) leaves.push_back(n);
  chunks_ = TreeSum<RowBuffer>(std::move(leaves));
}

RowBuffer CapturedSums::vectors(int64_t count) const { return {call_.engine, kSumType, {count * rows_, 1, kRow}}; }

// Sets the one sum to 0 before the first call.
Status CapturedSums::clear() {
  if (sum_.shape().rows > 0) return {};
  sum_ = vectors(1);
  return sum_.clear();
}

Status CapturedSums::begin(const ShardCall& call) {
  if (call.plan->chunk() == 0) return clear();
  queries_ = PlacedRuns(call.plan->queries().shards(call.rank));
  trees_.clear();
  for (std::vector<int64_t>& leaves : key_leaves(*call.plan, call.rank)) trees_.emplace_back(std::move(leaves));
  for (size_t n = 0; n < trees_.size(); ++n) {
    if (trees_[n].has_leaves()) continue;
    RowBuffer zeros = vectors(call.problem.heads_k);
    TANDEM_TRY(zeros.clear());
    const TokenRange& tokens = queries_.runs()[n].tokens;
    TANDEM_TRY(add_chunk(first_chunks_[static_cast<size_t>(tokens.document)] + tokens.begin / call.plan->chunk(),
                         std::move(zeros)));
  }
  return {};
}

// Lets a problem write its gradients to one of the vectors.
void CapturedSums::bind(RowBuffer& vectors, int64_t vector, Problem* p) const {
  auto bound = std::make_shared<BoundExpression>(*gradients_);
  std::byte* const cells = from_row(vectors.view(), vector * rows_).data;
  for (CapturedGradient& gradient : bound->gradients) {
    if (gradient.to) gradient.to = compact_cells(gradient, cells);
  }
  p->score_mod.read = std::move(bound);
}

Status CapturedSums::run(StepRunner& runner, const ContextStep& step, const Problem& p) {
  if (call_.plan->chunk() == 0) {
    Problem adding = p;
    adding.accumulate = true;
    bind(sum_, 0, &adding);
    return runner.run(adding);
  }
  RowBuffer leaf = vectors(p.heads_k);
  TANDEM_TRY(leaf.clear());
  const int64_t group = p.group();
  for (int64_t head = 0; head < p.heads_k; ++head) {
    Problem part = heads_of(p, {head * group, (head + 1) * group, head, head + 1});
    bind(leaf, head, &part);
    TANDEM_TRY(runner.run(part, head * group));
  }
  TreeSum<RowBuffer>& tree = trees_[queries_.find(step.q)];
  TANDEM_TRY(tree.add({0, step.key_order}, std::move(leaf), [this](RowBuffer& left, RowBuffer& right) {
    return call_.engine.add(right.view(), left.view(), left.shape());
  }));
  if (!tree.is_complete()) return {};
  RowBuffer value = std::move(tree.nodes().begin()->second.value);
  return add_chunk(first_chunks_[static_cast<size_t>(step.q.document)] + step.query_order, std::move(value));
}

Status CapturedSums::add_chunk(int64_t chunk, RowBuffer value) {
  return chunks_.add({0, chunk}, std::move(value), [this](RowBuffer& left, RowBuffer& right) {
    return call_.engine.add(right.view(), left.view(), left.shape());
  });
}

// The numbers of a rank's query chunks.
std::vector<int64_t> CapturedSums::chunks_of(int32_t rank) const {
  std::vector<int64_t> chunks;
  for (const Shard& s : call_.plan->queries().shards(rank)) {
    chunks.push_back(first_chunks_[static_cast<size_t>(s.tokens.document)] + s.tokens.begin / call_.plan->chunk());
  }
  std::sort(chunks.begin(), chunks.end());
  return chunks;
}

// The vectors of cells that a rank sends.
int64_t CapturedSums::vectors_of(int32_t rank) const {
  if (call_.plan->chunk() == 0) return 1;
  if (!chunks_.has_leaves()) return 0;
  if (by_heads_) return share_of(*call_.plan, call_.problem.heads_q, call_.problem.heads_k, rank).k_heads();
  return std::ssize(nodes_left(chunks_.leaves(), chunks_of(rank))) * call_.problem.heads_k;
}

// The rows of all vectors that a rank sums.
CapturedSums::Slice CapturedSums::slice_of(int32_t rank) const {
  const int64_t ranks = call_.plan->ranks(), begin = rows_ * rank / ranks;
  return {begin, rows_ * (rank + 1) / ranks - begin};
}

// Copies the cells that a rank sums, of all vectors of this rank.
Status CapturedSums::copy_part(int32_t rank, RowMemory* part) {
  const Slice slice = slice_of(rank);
  std::vector<RowBuffer*> values;
  if (call_.plan->chunk() == 0) {
    TANDEM_TRY(clear());
    values.push_back(&sum_);
  }
  for (auto& [first, entry] : chunks_.nodes()) values.push_back(&entry.value);
  *part = RowMemory(call_.engine, RowShape{vectors_of(call_.rank) * slice.rows, 1, kRow}.bytes(kSumType));
  std::byte* at = part->data();
  for (RowBuffer* value : values) {
    for (int64_t first = 0; first < value->shape().rows; first += rows_) {
      const RowShape shape{slice.rows, 1, kRow};
      TANDEM_TRY(
          call_.engine.copy(from_row(value->view(), first + slice.begin), compact_view(at, kSumType, shape), shape));
      at += shape.bytes(kSumType);
    }
  }
  return {};
}

// Each rank receives its cells of all ranks' vectors, sums them, and sends the sums to all ranks.
Status CapturedSums::exchange(RowBuffer* whole) {
  const int32_t ranks = call_.plan->ranks();
  const Slice own = slice_of(call_.rank);
  Messages messages;
  std::vector<RowMemory> parts(static_cast<size_t>(ranks));
  for (int32_t peer = 0; peer < ranks; ++peer) {
    RowMemory part;
    TANDEM_TRY(copy_part(peer, &part));
    if (peer == call_.rank) {
      parts[static_cast<size_t>(peer)] = std::move(part);
      continue;
    }
    const int64_t bytes = RowShape{vectors_of(peer) * own.rows, 1, kRow}.bytes(kSumType);
    messages.sends.emplace_back(peer, std::move(part));
    messages.receives.emplace_back(peer, RowMemory(call_.engine, bytes));
  }
  Exchange to_owners;
  TANDEM_TRY(to_owners.start(*call_.transport, std::move(messages)));
  TANDEM_TRY(to_owners.wait());
  for (auto& [peer, bytes] : to_owners.received()) parts[static_cast<size_t>(peer)] = std::move(bytes);
  RowBuffer sum(call_.engine, kSumType, {own.rows, 1, kRow});
  TANDEM_TRY(sum_parts(parts, &sum));

  messages = {};
  for (int32_t peer = 0; peer < ranks; ++peer) {
    if (peer == call_.rank) continue;
    RowMemory copy(call_.engine, sum.shape().bytes(kSumType));
    TANDEM_TRY(call_.engine.copy(sum.view(), compact_view(copy.data(), kSumType, sum.shape()), sum.shape()));
    messages.sends.emplace_back(peer, std::move(copy));
    const RowShape shape{slice_of(peer).rows, 1, kRow};
    messages.receives.emplace_back(peer, RowMemory(call_.engine, shape.bytes(kSumType)));
  }
  Exchange to_all;
  TANDEM_TRY(to_all.start(*call_.transport, std::move(messages)));
  TANDEM_TRY(to_all.wait());
  TANDEM_TRY(call_.engine.copy(sum.view(), from_row(whole->view(), own.begin), sum.shape()));
  for (auto& [peer, bytes] : to_all.received()) {
    const Slice slice = slice_of(peer);
    const RowShape shape{slice.rows, 1, kRow};
    TANDEM_TRY(
        call_.engine.copy(compact_view(bytes.data(), kSumType, shape), from_row(whole->view(), slice.begin), shape));
  }
  return {};
}

// Sums the cells of this rank in the order of the ranks, or of the key heads. Nodes of the tree are merged first.
Status CapturedSums::sum_parts(std::vector<RowMemory>& parts, RowBuffer* sum) {
  const int64_t rows = sum->shape().rows, heads = call_.problem.heads_k;
  TANDEM_TRY(sum->clear());
  const bool merges = call_.plan->chunk() > 0 && !by_heads_;
  TreeSum<RowBuffer> tree(chunks_.leaves());
  for (int32_t rank = 0; rank < call_.plan->ranks(); ++rank) {
    View from = compact_view(parts[static_cast<size_t>(rank)].data(), kSumType, {rows, 1, kRow});
    if (!merges) {
      TANDEM_TRY(add_vectors(from, vectors_of(rank), sum));
      continue;
    }
    for (const MergeNode& node : nodes_left(chunks_.leaves(), chunks_of(rank))) {
      RowBuffer value(call_.engine, kSumType, {heads * rows, 1, kRow});
      TANDEM_TRY(call_.engine.copy(from, value.view(), value.shape()));
      from = from_row(from, heads * rows);
      TANDEM_TRY(tree.add(node, std::move(value), [this](RowBuffer& left, RowBuffer& right) {
        return call_.engine.add(right.view(), left.view(), left.shape());
      }));
    }
  }
  if (!merges || !tree.has_leaves()) return {};
  return add_vectors(tree.nodes().begin()->second.value.view(), heads, sum);
}

// Adds vectors, which follow each other, to the sum in their order.
Status CapturedSums::add_vectors(const View& from, int64_t count, RowBuffer* sum) const {
  for (int64_t n = 0; n < count; ++n) {
    TANDEM_TRY(call_.engine.add(from_row(from, n * sum->shape().rows), sum->view(), sum->shape()));
  }
  return {};
}

Status CapturedSums::finish() {
  if (gradients_ == nullptr) return {};
  RowBuffer whole = vectors(1);
  TANDEM_TRY(exchange(&whole));
  return write(whole);
}

// Converts the sums to the types of the gradients.
Status CapturedSums::write(RowBuffer& whole) const {
  std::byte* const cells = whole.view().data;
  if (call_.engine.pool == nullptr) {
    each_captured(*gradients_, [&](const BiasView& to, std::byte* at, int64_t cell) {
      store(to.dtype, at, load(kSumType, cells + cell * size_of(kSumType)));
    });
    return {};
  }
  for (const CapturedGradient& gradient : gradients_->gradients) {
    if (gradient.to) TANDEM_TRY(write(gradient, cells));
  }
  return {};
}

// Copies one gradient on a GPU. Neighbouring dimensions are joined where one stride has both.
Status CapturedSums::write(const CapturedGradient& gradient, std::byte* cells) const {
  const BiasView& to = gradient.to;
  const BiasView from = compact_cells(gradient, cells);
  std::vector<int> dims;  // the last one of each joined dimension, from the end
  std::vector<int64_t> sizes;
  for (int dim = 3; dim >= 0; --dim) {
    if (to.shape[dim] == 1) continue;
    if (!dims.empty() && to.stride[dim] == to.stride[dims.back()] * sizes.back()) {
      sizes.back() *= to.shape[dim];
    } else {
      dims.push_back(dim);
      sizes.push_back(to.shape[dim]);
    }
  }
  const auto size = [&](size_t n) { return n < sizes.size() ? sizes[n] : 1; };
  const auto stride = [&](const BiasView& v, size_t n) { return n < dims.size() ? v.stride[dims[n]] : 0; };
  for (int64_t i = 0; i < size(3); ++i) {
    for (int64_t j = 0; j < size(2); ++j) {
      View views[2];
      for (const BiasView* v : {&from, &to}) {
        std::byte* const data = v->data + (i * stride(*v, 3) + j * stride(*v, 2)) * size_of(v->dtype);
        views[v == &to] = {
            .data = data, .dtype = v->dtype, .row = stride(*v, 0), .head = stride(*v, 1), .present = true};
      }
      TANDEM_TRY(call_.engine.copy(views[0], views[1], {size(0), size(1), 1}));
    }
  }
  return {};
}

}  // namespace tandem::context_parallel
