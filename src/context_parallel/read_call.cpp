#include "context_parallel/read_call.h"

#include <algorithm>
#include <array>

#include "base/text.h"
#include "problem/bound_expression.h"
#include "problem/operands.h"

namespace tandem::context_parallel {
namespace {

using Args = tandem_attention_args;

struct TensorField {
  const char* name;
  const tandem_tensor* Args::*field;
};

constexpr TensorField kRowTensors[] = {{"q", &Args::q},       {"k", &Args::k},   {"v", &Args::v},   {"out", &Args::out},
                                       {"dout", &Args::dout}, {"dq", &Args::dq}, {"dk", &Args::dk}, {"dv", &Args::dv}};
constexpr TensorField kLseTensors[] = {{"lse", &Args::lse}, {"dlse", &Args::dlse}};
constexpr TensorField kPlanTensors[] = {{"cu_seqlens_q", &Args::cu_seqlens_q},
                                        {"cu_seqlens_k", &Args::cu_seqlens_k},
                                        {"diagonal_offsets", &Args::diagonal_offsets},
                                        {"kv_num_blocks", &Args::kv_num_blocks},
                                        {"kv_indices", &Args::kv_indices},
                                        {"full_kv_num_blocks", &Args::full_kv_num_blocks},
                                        {"full_kv_indices", &Args::full_kv_indices},
                                        {"places", &Args::places}};
constexpr TensorField kBiasTensors[] = {{"bias", &Args::bias}, {"dbias", &Args::dbias}};
constexpr TensorField kUnserved[] = {{"seqused_q", &Args::seqused_q},
                                     {"seqused_k", &Args::seqused_k},
                                     {"page_table", &Args::page_table},
                                     {"max_scores", &Args::max_scores}};

Status refuse_option(const char* name, const char* remedy) {
  return Status::unsupported(str_cat("attention.", name, " must be absent in context parallelism: ", remedy));
}

Status refuse_options(const Args& a) {
  constexpr const char* kNotServed = "this version does not serve it, so leave it out";
  constexpr const char* kOfPlan = "pass it to the plan";
  for (const auto& [name, field] : kUnserved) {
    if (a.*field != nullptr) return refuse_option(name, kNotServed);
  }
  if (a.accumulate != 0) return refuse_option("accumulate", kNotServed);
  for (const auto& [name, field] : kPlanTensors) {
    if (a.*field != nullptr) return refuse_option(name, kOfPlan);
  }
  if (a.causal != 0) return refuse_option("causal", kOfPlan);
  if (a.window != 0) return refuse_option("window", kOfPlan);
  if (a.alignment != TANDEM_BOTTOM_RIGHT) return refuse_option("alignment", kOfPlan);
  if (a.diagonal_offset != 0) return refuse_option("diagonal_offset", kOfPlan);
  return {};
}

// Returns true if steps read positions. The mask of a step has ALiBi's distances unless neighbouring rows have others.
bool reads_places(const Args& a, const ContextPlan& plan) {
  const bool strides = plan.layout() == LayoutKind::striped && plan.chunk() == 0 && plan.ranks() > 1;
  return a.score_mod != nullptr || a.mask_mod != nullptr || a.dropout_p != 0 || (a.alibi_slopes != nullptr && strides);
}

// The place of the one sequence of a step.
class PlaceTensor {
 public:
  PlaceTensor(const ShardCall& call, tandem_device device)
      : tensor_{call.places, device, 2, {TANDEM_INT, 32, 1}, shape_, nullptr, 0} {}
  PlaceTensor(const PlaceTensor&) = delete;

  const tandem_tensor* get() const { return &tensor_; }

 private:
  int64_t shape_[2] = {1, sizeof(tandem_place) / sizeof(int32_t)};
  tandem_tensor tensor_;
};

// Tensors of one sequence in the form of a dense call, which make_problem() checks.
class DenseArgs {
 public:
  // form: the names of the dimensions.
  Status add(const TensorField& field, int32_t ndim, const char* form) {
    const tandem_tensor* tensor = args.*field.field;
    if (tensor == nullptr) return {};
    if (tensor->ndim != ndim || tensor->shape == nullptr) {
      return Status::invalid(str_cat("attention.", field.name, " (", tensor->ndim, " dimensions) must have ", ndim,
                                     ": pass (", form, ")"));
    }
    std::array<int64_t, 8>& sizes = sizes_[count_];
    tandem_tensor& dense = tensors_[count_++];
    dense = *tensor;
    sizes[0] = 1;
    sizes[4] = 0;
    int64_t compact = 1;
    for (auto n = static_cast<size_t>(ndim); n > 0; --n) {
      sizes[n] = tensor->shape[n - 1];
      sizes[n + 4] = tensor->strides != nullptr ? tensor->strides[n - 1] : compact;
      compact *= tensor->shape[n - 1];
    }
    dense.ndim = ndim + 1;
    dense.shape = sizes.data();
    dense.strides = sizes.data() + 4;
    args.*field.field = &dense;
    return {};
  }

  // Slopes (documents, heads) become the slopes of the first document.
  Status add_slopes(const ContextPlan& plan, int64_t* document_stride) {
    const tandem_tensor* tensor = args.alibi_slopes;
    *document_stride = 0;
    if (tensor == nullptr) return {};
    if (tensor->ndim != 2 || tensor->shape == nullptr) return {};
    const auto documents = static_cast<int64_t>(plan.documents().size());
    if (tensor->shape[0] != documents) {
      return Status::invalid(str_cat("attention.alibi_slopes.shape[0] (", tensor->shape[0], ") must be the ", documents,
                                     " documents of the plan: pass slopes for each document"));
    }
    if (documents == 0) {
      args.alibi_slopes = nullptr;
      return {};
    }
    *document_stride = tensor->strides != nullptr ? tensor->strides[0] : tensor->shape[1];
    tandem_tensor& first = tensors_[count_];
    first = *tensor;
    first.ndim = 1;
    first.shape = tensor->shape + 1;
    first.strides = tensor->strides != nullptr ? tensor->strides + 1 : nullptr;
    args.alibi_slopes = &first;
    ++count_;
    return {};
  }

  Args args{};

 private:
  static constexpr size_t kMost = std::size(kRowTensors) + std::size(kLseTensors) + std::size(kBiasTensors) + 1;
  size_t count_ = 0;
  std::array<tandem_tensor, kMost> tensors_{};
  std::array<std::array<int64_t, 8>, kMost> sizes_{};  // shape and strides
};

}  // namespace

Status read_shard(tandem_pass pass, const tandem_attention_args* args, tandem_device device, ShardCall* call) {
  DenseArgs dense;
  TANDEM_TRY(read_args(args, &dense.args));
  TANDEM_TRY(refuse_options(dense.args));
  for (const TensorField& field : kRowTensors) TANDEM_TRY(dense.add(field, 3, "rows, heads, head_dim"));
  for (const TensorField& field : kLseTensors) TANDEM_TRY(dense.add(field, 2, "heads, rows"));
  for (const TensorField& field : kBiasTensors) TANDEM_TRY(dense.add(field, 3, "heads, rows, keys"));
  int64_t document_stride = 0;
  TANDEM_TRY(dense.add_slopes(*call->plan, &document_stride));
  dense.args.max_seqlen_q = dense.args.max_seqlen_k = 0;
  PlaceTensor place(*call, device);
  if (reads_places(dense.args, *call->plan)) dense.args.places = place.get();
  int64_t keys = 0;
  for (const PackedDocument& d : call->plan->documents()) keys = std::max(keys, d.k_len);
  TANDEM_TRY(make_shard_problem(pass, dense.args, device, keys, &call->problem));
  call->heads_q = call->problem.heads_q;
  if (call->problem.dtype == DType::f64) {
    return Status::unsupported(
        "q.dtype (float64) must be float32, bfloat16 or float16 in context parallelism: convert the tensors");
  }
  call->problem.alibi_slopes.batch = document_stride;
  return call->plan->check_shard(call->rank, call->problem.total_q, call->problem.total_k);
}

Status check_for_gpu(ShardCall* call) {
  constexpr int64_t kMaxTile = 128;  // rows of a kernel's tile: a step's shape chooses the kernel
  if (const BlockMask& m = call->plan->block_mask(); m && (m.block_q % kMaxTile != 0 || m.block_k % kMaxTile != 0)) {
    return Status::unsupported(str_cat("the plan's block_q (", m.block_q, ") and block_k (", m.block_k,
                                       ") must be multiples of 128 on a GPU: pass larger blocks, or mask_mod alone"));
  }
  Problem& p = call->problem;
  for (size_t n = 0; p.score_mod && n < p.score_mod->gradients.size(); ++n) {
    if (const BiasView& to = p.score_mod->gradients[n].to; !to || to.dtype != DType::f64) continue;
    return Status::unsupported(str_cat("score_mod.", p.score_mod->program->mod.signature.tensors[n].name,
                                       ".gradient.dtype (float64) must be float32 on a GPU in context parallelism: "
                                       "allocate a float32 gradient"));
  }
  p.batch_invariant = call->plan->chunk() > 0;
  // A step has float32 results, of which the backward adds to earlier ones.
  Problem step = p;
  for (View* v : p.pass == TANDEM_FORWARD ? std::array{&step.out} : std::array{&step.dq}) v->dtype = kSumType;
  step.dk.dtype = step.dv.dtype = kSumType;
  if (const BlockMask& mask = call->plan->block_mask()) step.block_mask = unlisted_blocks(mask, p.seqlen_q, p.seqlen_k);
  step.accumulate = p.pass == TANDEM_BACKWARD && call->plan->chunk() == 0;
  return call->engine.engine->check(step);
}

}  // namespace tandem::context_parallel
