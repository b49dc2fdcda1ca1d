#include "context_parallel/agreement.h"

#include "base/text.h"
#include "context_parallel/transport.h"
#include "context_parallel/word_hash.h"
#include "problem/bound_expression.h"

namespace tandem::context_parallel {
namespace {

// Everything that must be equal on all ranks, except the values of tensors. The numbers of rows follow from the plan.
uint64_t hash_of(const ShardCall& call, int32_t execution) {
  const Problem& p = call.problem;
  WordHash hash;
  hash.add(static_cast<int64_t>(call.plan->hash()));
  for (const int64_t word : {int64_t{execution}, int64_t{p.pass}, static_cast<int64_t>(p.dtype), p.heads_q, p.heads_k,
                             p.head_dim, p.head_dim_v}) {
    hash.add(word);
  }
  hash.add(p.softmax_scale);
  hash.add(p.softcap);
  for (const View* v : {&p.out, &p.lse, &p.dout, &p.dlse, &p.dq, &p.dk, &p.dv}) {
    hash.add(v->present ? 1 + static_cast<int64_t>(v->dtype) : int64_t{0});
  }
  for (const HeadView* v : {&p.sink, &p.dsink, &p.alibi_slopes}) {
    hash.add(v->present ? 1 + static_cast<int64_t>(v->dtype) : int64_t{0});
  }
  for (const BiasView* v : {&p.bias, &p.dbias}) {
    hash.add(v->present ? 1 + static_cast<int64_t>(v->dtype) : int64_t{0});
    if (*v) hash.add(v->shape[1] << 32 | v->shape[3]);
  }
  hash.add(p.dropout.p);
  hash.add(static_cast<int64_t>(p.dropout.seed));
  hash.add(static_cast<int64_t>(p.dropout.offset));
  for (const ModView* mod : {&p.score_mod, &p.mask_mod}) {
    hash.add(*mod ? static_cast<int64_t>((*mod)->program->cuda_hash) : int64_t{0});
    if (!*mod) continue;
    for (const double value : (*mod)->values.scalars) hash.add(value);
    for (const score_mod::TensorView& tensor : (*mod)->values.tensors) {
      hash.add(static_cast<int64_t>(tensor.element));
      for (const int32_t size : tensor.size) hash.add(int64_t{size});
    }
    for (const CapturedGradient& gradient : (*mod)->gradients) {
      hash.add(gradient.to ? 1 + static_cast<int64_t>(gradient.to.dtype) : int64_t{0});
    }
  }
  return hash.value();
}

Status compare(const std::vector<uint64_t>& words, int32_t ranks) {
  for (int32_t r = 0; r < ranks; ++r) {
    if (words[2 * static_cast<size_t>(r)] == 0) continue;
    return Status::invalid(str_cat("rank ", r, " refused the call: read the error message of this rank"));
  }
  for (int32_t r = 1; r < ranks; ++r) {
    if (words[2 * static_cast<size_t>(r) + 1] == words[1]) continue;
    return Status::invalid(str_cat("plan, shapes or options of rank ", r,
                                   " must equal the ones of rank 0: create the plan from equal arguments on all ranks, "
                                   "and call with equal options"));
  }
  return {};
}

}  // namespace

Status Agreement::agree(const ShardCall& call, int32_t execution, const Status& own) {
  const uint64_t hash = own.ok() ? hash_of(call, execution) : 0;
  WordHash local;  // one plan may serve several transports
  local.add(static_cast<int64_t>(hash));
  local.add(static_cast<int64_t>(reinterpret_cast<uintptr_t>(call.transport->user_data)));
  {
    const std::lock_guard lock(mutex_);
    if (own.ok() ? agreed_.contains(local.value()) : !agreed_.empty()) return own;
  }
  const uint64_t words[] = {own.ok() ? uint64_t{0} : uint64_t{1}, hash};
  std::vector<uint64_t> all;
  const Status gathered = all_gather(*call.transport, std::span<const uint64_t>(words), &all);
  if (!own.ok()) return own;
  TANDEM_TRY(gathered);
  TANDEM_TRY(compare(all, call.plan->ranks()));
  const std::lock_guard lock(mutex_);
  agreed_.insert(local.value());
  return {};
}

}  // namespace tandem::context_parallel
