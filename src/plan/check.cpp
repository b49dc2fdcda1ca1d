#include "plan/check.h"

#include <tuple>
#include <utility>

#include "base/text.h"
#include "config/mods.h"
#include "plan/plan.h"
#include "problem/bound_expression.h"
#include "problem/refusals.h"

namespace tandem::plan {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int kMaxStrideLog2 = 40;  // tensor maps: stride in bytes below 2^40

// Returns true for Blackwell in data centres: B200, B300.
bool is_blackwell(const gpu::Properties& device) {
  return device.compute_major == 10 && (device.compute_minor == 0 || device.compute_minor == 3);
}

// TMA boxes have a multiple of 16 keys of one page.
Status check_pages(const PageTable& table) {
  if (!table) return {};
  if (table.page_size % 16 != 0) {
    return Status::unsupported(
        str_cat("k.page_size (", table.page_size, ") must be a multiple of 16 on a GPU: allocate longer pages"));
  }
  for (const int64_t stride : {table.batch, table.column}) {
    if (stride <= INT32_MAX) continue;
    return Status::unsupported(str_cat("page_table.strides[", stride == table.batch ? 0 : 1, "] (", stride,
                                       ") must be below 2^31 on a GPU: copy the elements into a compact tensor"));
  }
  return {};
}

Status check_head_dim(const char* tensor, int64_t head_dim) {
  if (head_dim % 8 == 0 && head_dim <= kMaxHeadDim) return {};
  return Status::unsupported(
      str_cat(tensor, ".head_dim (", head_dim, ") must be a multiple of 8 up to ", kMaxHeadDim,
              " on a GPU: ", head_dim > kMaxHeadDim ? "choose device \"cpu\"" : "pad head_dim with zeros"));
}

// empty: the kernel accesses no element.
Status check_tensor(const char* name, const View& view, bool packed, bool empty) {
  const int64_t strides[] = {view.batch, view.row, view.head}, step = 16 / size_of(view.dtype);
  const int most_log2 = kMaxStrideLog2 - (view.dtype == DType::f32 ? 2 : 1);
  for (int i = packed ? 1 : 0; i < 3; ++i) {
    const int64_t stride = strides[i];
    if (stride >= 0 && stride % step == 0 && stride < int64_t{1} << most_log2) continue;
    return Status::unsupported(str_cat(name, ".strides[", packed ? i - 1 : i, "] (", stride, ") must be a multiple of ",
                                       step, " elements (16 bytes) from 0 to 2^", most_log2,
                                       " on a GPU: copy the tensor or pad its rows"));
  }
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  if (empty || address % 16 == 0) return {};
  return Status::unsupported(str_cat(name, ".data + byte_offset (address ", address % 64,
                                     " modulo 64) must be a multiple of 16 on a GPU: copy the tensor"));
}

Status check_index(const char* name, const IndexView& view) {
  if (!view || view.stride <= INT32_MAX) return {};
  return Status::unsupported(str_cat(name, ".strides[0] (", view.stride,
                                     ") must be below 2^31 on a GPU: copy the elements into a compact tensor"));
}

}  // namespace

Status check_mod(const char* name, const ModView& mod) {
  if (!mod) return {};
  const score_mod::Signature& names = mod->program->mod.signature;
  for (const auto& [kind, count, most] :
       {std::tuple{"scalar", names.scalars.size(), kModScalars}, {"tensor", names.tensors.size(), kModTensors}}) {
    if (count <= static_cast<size_t>(most)) continue;
    return Status::unsupported(str_cat(name, ".", kind, "_count (", count, ") must be at most ", most,
                                       " on a GPU: combine several inputs in one tensor"));
  }
  return {};
}

Status check_device(const gpu::Properties& device) {
  if ((device.compute_major == 9 && device.compute_minor == 0) || is_blackwell(device)) return {};
  return Status::unsupported(str_cat(
      "device (", device.name, ", compute capability ", device.compute_major, ".", device.compute_minor,
      ") must have compute capability 9.0 (H100, H200), 10.0 or 10.3 (B200, B300) in this version: choose device "
      "\"cpu\""));
}

Status check(const Problem& p, const gpu::Properties& device, const Tuning& tuning) {
  TANDEM_TRY(check_device(device));
  return pass_of(p.pass)->check(p, device, tuning);
}

Status check_options(const Problem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) {
    return Status::unsupported(
        str_cat("q.dtype (", name_of(p.dtype), ") must be bfloat16 or float16 on a GPU: convert q, k and v"));
  }
  for (const auto& [name, pointer] : {std::pair<const char*, const uint64_t*>{"dropout_seed_ptr", p.dropout.seed_ptr},
                                      {"dropout_offset_ptr", p.dropout.offset_ptr}}) {
    if (reinterpret_cast<uintptr_t>(pointer) % alignof(uint64_t) == 0) continue;
    return Status::unsupported(str_cat(name, " (address ", reinterpret_cast<uintptr_t>(pointer) % 64,
                                       " modulo 64) must be a multiple of 8 on a GPU: align the value"));
  }
  TANDEM_TRY(refuse_paged_backward(p));
  TANDEM_TRY(check_pages(p.page_table));
  TANDEM_TRY(check_mod("score_mod", p.score_mod));
  TANDEM_TRY(check_mod("mask_mod", p.mask_mod));
  return {};
}

Status check_tensors(const Problem& p) {
  TANDEM_TRY(check_head_dim("q", p.head_dim));
  TANDEM_TRY(check_head_dim("v", p.head_dim_v));
  const bool no_queries = p.total_q == 0, no_keys = p.total_k == 0;
  const struct {
    const char* name;
    const View& view;
    bool packed, empty;
  } tensors[] = {{"q", p.q, p.packed_q(), no_queries},       {"k", p.k, p.packed_k(), no_keys},
                 {"v", p.v, p.packed_k(), no_keys},          {"out", p.out, p.packed_q(), no_queries},
                 {"dout", p.dout, p.packed_q(), no_queries}, {"dq", p.dq, p.packed_q(), no_queries},
                 {"dk", p.dk, p.packed_k(), no_keys},        {"dv", p.dv, p.packed_k(), no_keys}};
  for (const auto& [name, view, packed, empty] : tensors) {
    if (view) TANDEM_TRY(check_tensor(name, view, packed, empty));
  }
  TANDEM_TRY(check_index("cu_seqlens_q", p.cu_seqlens_q));
  TANDEM_TRY(check_index("cu_seqlens_k", p.cu_seqlens_k));
  TANDEM_TRY(check_index("seqused_q", p.seqused_q));
  TANDEM_TRY(check_index("seqused_k", p.seqused_k));
  return check_index("diagonal_offsets", p.diagonal_offsets);
}

}  // namespace tandem::plan
