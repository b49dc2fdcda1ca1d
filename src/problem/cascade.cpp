#include "problem/cascade.h"

#include <cstring>
#include <string>
#include <utility>

#include "base/text.h"
#include "problem/operands.h"
#include "problem/struct_size.h"

namespace tandem {
namespace {

Status refuse_option(const char* name, const char* value, const char* why) {
  return Status::unsupported(str_cat(name, " (", value, ") must be ", why));
}

// Options whose meaning depends on the positions of keys, or whose tensors belong to one of the two parts.
Status refuse_options(const tandem_attention_args& own) {
  const std::pair<const char*, bool> pointers[] = {
      {"bias", own.bias != nullptr},
      {"alibi_slopes", own.alibi_slopes != nullptr},
      {"seqused_q", own.seqused_q != nullptr},
      {"score_mod", own.score_mod != nullptr},
      {"mask_mod", own.mask_mod != nullptr},
      {"diagonal_offsets", own.diagonal_offsets != nullptr},
      {"kv_indices", own.kv_indices != nullptr},
      {"max_scores", own.max_scores != nullptr},
      {"places", own.places != nullptr},
  };
  for (const auto& [name, present] : pointers)
    if (present) return refuse_option(name, "not NULL", "NULL with shared keys: merge two calls by tandem_merge");
  const std::pair<const char*, double> numbers[] = {
      {"window", own.window}, {"alignment", own.alignment}, {"dropout_p", own.dropout_p}};
  for (const auto& [name, value] : numbers)
    if (value != 0) return refuse_option(name, "not 0", "0 with shared keys: merge two calls by tandem_merge");
  return {};
}

Status require(const char* name, const tandem_tensor* tensor) {
  if (tensor != nullptr) return {};
  return Status::invalid(
      str_cat(name, " (NULL) must be a tensor with shared keys: pass packed queries and paged keys"));
}

// Groups consist of whole requests, in order. The index tensors are in host memory.
Status check_groups(const Problem& shared, const Problem& own) {
  int64_t request = 0;
  for (int64_t g = 0; g <= shared.batch; ++g) {
    const int64_t row = shared.cu_seqlens_q[g];
    while (request < own.batch && own.cu_seqlens_q[request] < row) ++request;
    if (own.cu_seqlens_q[request] == row) continue;
    return Status::invalid(str_cat("cu_seqlens_group[", g, "] (", row,
                                   ") must be an entry of cu_seqlens_q: put whole requests into a group"));
  }
  const int64_t last = shared.cu_seqlens_q[shared.batch], rows = own.cu_seqlens_q[own.batch];
  if (last == rows) return {};
  return Status::invalid(str_cat("cu_seqlens_group[", shared.batch, "] (", last,
                                 ") must equal the last entry of cu_seqlens_q (", rows,
                                 "): give every request a group, whose shared length may be 0"));
}

// The member of a tandem_cascade_args that is a member of the shared part's arguments.
constexpr std::pair<const char*, const char*> kGroupNames[] = {
    {"cu_seqlens_q", "cu_seqlens_group"},
    {"page_table", "group_page_table"},
    {"seqused_k", "group_seqused_k"},
    {"max_seqlen_q", "max_rows_group"},
    {"tandem_prepare with these arguments", "tandem_prepare_cascade"},
    {"tandem_prepare_merge", "tandem_prepare_cascade"},
};

}  // namespace

Status with_group_names(Status status) {
  for (const auto& [from, to] : kGroupNames) {
    const std::string name = from;
    for (size_t at = 0; (at = status.message.find(name, at)) != std::string::npos; at += std::string(to).size())
      status.message.replace(at, name.size(), to);
  }
  return status;
}

Status CascadeCall::read(const tandem_cascade_args* from, tandem_device device, bool with_data) {
  tandem_cascade_args args;
  TANDEM_TRY(read_struct("args", "tandem_cascade_args", from, sizeof(tandem_cascade_args), &args));
  TANDEM_TRY(read_own(args, device, with_data));
  TANDEM_TRY(read_shared(args, device, with_data));
  return with_data && device.type == TANDEM_CPU && own.problem.batch > 0 ? check_groups(shared.problem, own.problem)
                                                                         : Status{};
}

Status CascadeCall::read_own(const tandem_cascade_args& args, tandem_device device, bool with_data) {
  if (args.own == nullptr) {
    return Status::invalid(
        "own (NULL) must point to a tandem_attention_args: pass the forward of each request's own keys");
  }
  TANDEM_TRY(read_args(args.own, &call_));
  TANDEM_TRY(require("cu_seqlens_q", call_.cu_seqlens_q));
  TANDEM_TRY(require("page_table", call_.page_table));
  TANDEM_TRY(require("seqused_k", call_.seqused_k));
  TANDEM_TRY(refuse_options(call_));
  TANDEM_TRY(make_problem(TANDEM_FORWARD, &call_, device, with_data, &own.problem));
  own.args = call_;
  describe_part(&own);
  return {};
}

Status CascadeCall::read_shared(const tandem_cascade_args& args, tandem_device device, bool with_data) {
  TANDEM_TRY(require("cu_seqlens_group", args.cu_seqlens_group));
  TANDEM_TRY(require("group_page_table", args.group_page_table));
  TANDEM_TRY(require("group_seqused_k", args.group_seqused_k));
  group_call_ = call_;
  group_call_.cu_seqlens_q = args.cu_seqlens_group;
  group_call_.page_table = args.group_page_table;
  group_call_.seqused_k = args.group_seqused_k;
  group_call_.max_seqlen_q = args.max_rows_group > 0 ? args.max_rows_group : own.problem.total_q;
  group_call_.max_seqlen_k = 0;
  group_call_.causal = 0;
  group_call_.sink = nullptr;
  if (args.max_rows_group < 0) {
    return Status::invalid(
        str_cat("max_rows_group (", args.max_rows_group, ") must be at least 0: pass 0 for no bound"));
  }
  TANDEM_TRY(with_group_names(make_problem(TANDEM_FORWARD, &group_call_, device, with_data, &shared.problem)));
  shared.args = group_call_;
  describe_part(&shared);
  return {};
}

// A part is packed and contiguous, and float32 (float64 if q is).
void CascadeCall::describe_part(CascadePart* part) const {
  const Problem& p = own.problem;
  const auto contiguous = [&](auto& shape, auto& strides, std::initializer_list<int64_t> sizes, tandem_tensor* tensor) {
    int n = 0;
    for (const int64_t size : sizes) shape[n++] = size;
    for (int64_t stride = 1; n > 0; stride *= shape[n]) strides[--n] = stride;
    *tensor = *call_.q;
    tensor->data = nullptr;
    tensor->byte_offset = 0;
    tensor->ndim = static_cast<int32_t>(sizes.size());
    tensor->dtype.code = TANDEM_FLOAT;
    tensor->dtype.bits = p.dtype == DType::f64 ? 64 : 32;
    tensor->shape = shape;
    tensor->strides = strides;
  };
  contiguous(part->out_shape, part->out_strides, {p.total_q, p.heads_q, p.head_dim_v}, &part->out);
  contiguous(part->lse_shape, part->lse_strides, {p.heads_q, p.total_q}, &part->lse);
  part->args.out = &part->out;
  part->args.lse = &part->lse;
}

size_t CascadeCall::bytes_of(int64_t columns) const {
  const Problem& p = own.problem;
  const auto bytes = static_cast<size_t>(p.total_q * p.heads_q * columns * (p.dtype == DType::f64 ? 8 : 4));
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}
size_t CascadeCall::part_bytes() const { return 2 * (bytes_of(own.problem.head_dim_v) + bytes_of(1)); }

Status CascadeCall::place(void* memory, tandem_device device, MergeProblem* merge) {
  auto* at = static_cast<std::byte*>(memory);
  int n = 0;
  for (CascadePart* part : {&shared, &own}) {
    if (memory != nullptr) {
      part->out.data = at;
      part->lse.data = at + bytes_of(own.problem.head_dim_v);
      at += part_bytes() / 2;
    }
    TANDEM_TRY(make_problem(TANDEM_FORWARD, &part->args, device, memory != nullptr, &part->problem));
    part_outs_[n] = &part->out;
    part_lses_[n++] = &part->lse;
  }
  const tandem_merge_args args{sizeof args, 2, part_outs_, part_lses_, call_.out, call_.lse};
  return memory != nullptr ? make_merge_problem(&args, device, merge) : Status{};
}

const char* CascadeCall::operand_in_range(const void* begin, size_t bytes) const {
  const char* own_name = tandem::operand_in_range(TANDEM_FORWARD, call_, begin, bytes);
  if (own_name != nullptr) return own_name;
  const char* name = tandem::operand_in_range(TANDEM_FORWARD, group_call_, begin, bytes);
  for (const auto& [from, to] : kGroupNames)
    if (name != nullptr && std::strcmp(name, from) == 0) return to;
  return name;
}

}  // namespace tandem
