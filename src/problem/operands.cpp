#include "problem/operands.h"

#include <optional>
#include <string>

#include "base/text.h"

namespace tandem {
namespace {

// No machine has memory beyond this address. Below this limit sums of addresses and extents fit int64.
constexpr uintptr_t kAddressSpace = uintptr_t{1} << 61;

std::optional<DType> dtype_of(tandem_dtype t) {
  switch (t.code << 8 | t.bits) {
    case TANDEM_FLOAT << 8 | 64: return DType::f64;
    case TANDEM_FLOAT << 8 | 32: return DType::f32;
    case TANDEM_FLOAT << 8 | 16: return DType::f16;
    case TANDEM_BFLOAT << 8 | 16: return DType::bf16;
    case TANDEM_BOOL << 8 | 8: return DType::boolean;
    case TANDEM_INT << 8 | 32: return DType::i32;
    case TANDEM_INT << 8 | 64: return DType::i64;
    default: return std::nullopt;
  }
}

std::string describe(tandem_dtype t) {
  if (const std::optional<DType> known = dtype_of(t)) return name_of(*known);
  switch (t.code) {
    case TANDEM_INT: return str_cat("int", t.bits);
    case TANDEM_UINT: return str_cat("uint", t.bits);
    case TANDEM_FLOAT: return str_cat("float", t.bits);
    default: return str_cat("code ", t.code, ", ", t.bits, " bits");
  }
}

std::string describe(DTypes set) {
  std::string text;
  for (const DType t : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::boolean, DType::i32, DType::i64}) {
    if ((set & only(t)) == 0) continue;
    set &= ~only(t);
    if (!text.empty()) text += set == 0 ? " or " : ", ";
    text += name_of(t);
  }
  return text;
}

std::string describe_list(const int64_t* values, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += str_cat(i == 0 ? "" : ", ", values[i]);
  return text;
}

Status check_rank(const tandem_tensor& tensor, const OperandRule& rule) {
  const int rank = static_cast<int>(rule.dims.size());
  if (tensor.ndim != rank) {
    std::string dims;
    for (const Dim& dim : rule.dims) dims += str_cat(dims.empty() ? "" : ", ", dim.name);
    return Status::invalid(str_cat(rule.info.name, ".ndim (", tensor.ndim, ") must be ", rank, ": pass ",
                                   rule.info.name, " as (", dims, ")", rule.dims_why));
  }
  if (tensor.shape == nullptr && rank > 0) {
    return Status::invalid(
        str_cat(rule.info.name, ".shape (NULL) must point to ndim (", rank, ") sizes: pass their address"));
  }
  return {};
}

Status check_dtype(const tandem_tensor& tensor, const OperandRule& rule) {
  const std::optional<DType> dtype = dtype_of(tensor.dtype);
  if (!dtype || (rule.dtypes & only(*dtype)) == 0) {
    return Status::invalid(str_cat(rule.info.name, ".dtype (", describe(tensor.dtype), ") must be ",
                                   describe(rule.dtypes), ": ", rule.dtype_why));
  }
  if (tensor.dtype.lanes != 1) {
    return Status::invalid(str_cat(rule.info.name, ".dtype.lanes (", tensor.dtype.lanes,
                                   ") must be 1: add the lanes as a dimension of the shape"));
  }
  return {};
}

// A CPU device may have any index.
Status check_device(const tandem_tensor& tensor, const OperandRule& rule, tandem_device device) {
  if (tensor.device.type == device.type && (device.type == TANDEM_CPU || tensor.device.index == device.index))
    return {};
  return Status::invalid(str_cat(rule.info.name, ".device (type ", tensor.device.type, ", index ", tensor.device.index,
                                 ") must be the context's (type ", device.type, ", index ", device.index,
                                 "): copy the tensor to this device, or use a context of the tensor's device"));
}

Status check_dims(const tandem_tensor& tensor, const OperandRule& rule) {
  int i = 0;
  for (const Dim& dim : rule.dims) {
    const int64_t size = tensor.shape[i++];
    if (size < 0 || size > INT32_MAX) {
      return Status::invalid(
          str_cat(rule.info.name, ".", dim.name, " (", size, ") must be 0 to ", INT32_MAX, ": split the tensor"));
    }
    if (dim.size < 0 || size == dim.size) continue;
    std::string must = dim.owner ? str_cat("must equal ", dim.owner, ".", dim.name, " (", dim.size, ")")
                                 : str_cat("must be ", dim.size);
    return Status::invalid(str_cat(rule.info.name, ".", dim.name, " (", size, ") ", must, ": ", dim.why));
  }
  return {};
}

// Fills shape, stride, empty and bytes. The caller has set dtype, rank and name. Sizes are 0 to 2^31 - 1.
Status read_layout(const tandem_tensor& tensor, Operand* o) {
  int64_t bytes = size_of(o->dtype);
  bool too_big = false;
  o->empty = false;
  for (int i = 0; i < o->rank; ++i) {
    o->shape[i] = tensor.shape[i];
    o->empty |= tensor.shape[i] == 0;
  }
  if (o->empty) return {};
  for (int i = o->rank - 1; i >= 0; --i) {
    const int64_t compact = bytes / size_of(o->dtype);
    o->stride[i] = o->shape[i] == 1 ? 0 : tensor.strides ? tensor.strides[i] : compact;
    too_big |= __builtin_mul_overflow(bytes, o->shape[i], &bytes);
    if (too_big) {
      return Status::invalid(str_cat(o->name, ".shape (", describe_list(o->shape, o->rank),
                                     ") must be below 2^63 bytes: ", "split the call over batch or heads"));
    }
  }
  int64_t last = 0, first = 0;  // offsets in elements from the element at index 0
  for (int i = 0; i < o->rank; ++i) {
    int64_t step;
    int64_t& end = o->stride[i] < 0 ? first : last;
    too_big |= __builtin_mul_overflow(o->shape[i] - 1, o->stride[i], &step);
    too_big |= !too_big && __builtin_add_overflow(end, step, &end);
  }
  too_big |= !too_big && __builtin_mul_overflow(first, -size_of(o->dtype), &o->below);
  too_big |= !too_big && __builtin_sub_overflow(last, first, &last);
  too_big |= !too_big && __builtin_add_overflow(last, int64_t{1}, &last);
  too_big |= !too_big && __builtin_mul_overflow(last, size_of(o->dtype), &o->bytes);
  if (!too_big) return {};
  return Status::invalid(str_cat(o->name, ".strides (", describe_list(tensor.strides, o->rank), ") with shape (",
                                 describe_list(o->shape, o->rank),
                                 ") must be below 2^63 bytes: pass strides in elements"));
}

Status check_strides(const tandem_tensor& tensor, const OperandRule& rule, const ReadMode& mode, const Operand& o) {
  if (o.empty) return {};
  const int last = o.rank - 1;
  if (rule.contiguous_last && o.shape[last] > 1 && o.stride[last] != 1) {
    return Status::invalid(str_cat(o.name, ".strides[", last, "] (", o.stride[last],
                                   ") must be 1: copy the tensor so that ", o.dim_name[last], " is contiguous"));
  }
  for (int i = 0; mode.device.type != TANDEM_CPU && i < o.rank; ++i) {
    if (o.stride[i] >= 0) continue;
    return Status::invalid(
        str_cat(o.name, ".strides[", i, "] (", o.stride[i], ") must not be negative on a GPU: copy the tensor"));
  }
  if (rule.info.in(mode.pass) != Use::write) return {};
  // In order of growing stride, each dimension must step over all bytes of the smaller dimensions.
  OperandStep steps[kMaxRank];
  int64_t extent = 1;
  for (int i = steps_of(o, steps) - 1; i >= 0; --i) {
    if (steps[i].stride < extent) {
      return Status::invalid(str_cat(o.name, ".strides (", describe_list(tensor.strides, o.rank), ") with shape (",
                                     describe_list(o.shape, o.rank), ") make its elements overlap: allocate ", o.name,
                                     " without broadcast dimensions"));
    }
    extent += (steps[i].count - 1) * steps[i].stride;
  }
  return {};
}

Status check_data(const tandem_tensor& tensor, Operand* o) {
  const uintptr_t base = reinterpret_cast<uintptr_t>(tensor.data);
  if (o->empty) {
    o->data = static_cast<std::byte*>(tensor.data);
    return {};
  }
  if (base == 0) {
    return Status::invalid(str_cat(o->name, ".data (NULL) must point to the elements of shape (",
                                   describe_list(o->shape, o->rank), "): pass their address"));
  }
  uintptr_t begin, end;
  if (__builtin_add_overflow(base, tensor.byte_offset, &begin) ||
      __builtin_sub_overflow(begin, static_cast<uintptr_t>(o->below), &begin) ||
      __builtin_add_overflow(begin, static_cast<uintptr_t>(o->bytes), &end) || end > kAddressSpace) {
    return Status::invalid(str_cat(o->name, ".byte_offset (", tensor.byte_offset, ") plus the tensor's ", o->bytes,
                                   " bytes must be within the address space: pass the offset in bytes from data"));
  }
  const auto align = static_cast<uintptr_t>(size_of(o->dtype));
  begin += static_cast<uintptr_t>(o->below);
  if (begin % align != 0) {
    return Status::invalid(str_cat(o->name, ".data + byte_offset (address ", begin % 64,
                                   " modulo 64) must be a multiple of ", align, ", the size of ", name_of(o->dtype),
                                   ": copy the tensor"));
  }
  o->data = reinterpret_cast<std::byte*>(begin);
  return {};
}

}  // namespace

int steps_of(const Operand& operand, OperandStep (&steps)[kMaxRank]) {
  int count = 0;
  for (int i = 0; i < operand.rank; ++i) {
    if (operand.shape[i] <= 1) continue;
    const int64_t stride = operand.stride[i] < 0 ? -operand.stride[i] : operand.stride[i];
    int at = count++;
    for (; at > 0 && steps[at - 1].stride < stride; --at) steps[at] = steps[at - 1];
    steps[at] = {stride, operand.shape[i]};
  }
  return count;
}

Status read_operand(const tandem_tensor& tensor, const OperandRule& rule, const ReadMode& mode, Operand* operand) {
  TANDEM_TRY(check_rank(tensor, rule));
  TANDEM_TRY(check_dtype(tensor, rule));
  TANDEM_TRY(check_device(tensor, rule, mode.device));
  TANDEM_TRY(check_dims(tensor, rule));
  operand->name = rule.info.name;
  operand->present = true;
  operand->dtype = *dtype_of(tensor.dtype);
  operand->rank = tensor.ndim;
  int i = 0;
  for (const Dim& dim : rule.dims) operand->dim_name[i++] = dim.name;
  TANDEM_TRY(read_layout(tensor, operand));
  TANDEM_TRY(check_strides(tensor, rule, mode, *operand));
  return mode.with_data ? check_data(tensor, operand) : Status{};
}

Status read_operand(const char* name, Use use, const tandem_tensor& tensor, const OperandFormat& format,
                    tandem_device device, Operand* operand) {
  const OperandInfo info{name, nullptr, use, Use::none};
  const OperandRule rule{info, format.dtypes, format.dtype_why, format.dims, format.dims_why, format.contiguous_last};
  return read_operand(tensor, rule, {.pass = TANDEM_FORWARD, .device = device, .with_data = true}, operand);
}

Operand operand_of(const tandem_tensor& tensor) {
  Operand o;
  o.present = true;
  o.dtype = *dtype_of(tensor.dtype);
  o.rank = tensor.ndim;
  (void)read_layout(tensor, &o);  // the layout has been checked before
  o.data = reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset);
  return o;
}

View view_of(const Operand& o) {
  const int row = o.rank == 4 ? 1 : 0;
  return {.data = o.data,
          .dtype = o.dtype,
          .batch = row == 1 ? o.stride[0] : 0,
          .row = o.stride[row],
          .head = o.stride[row + 1],
          .present = o.present};
}

View lse_view_of(const Operand& o) {
  return {.data = o.data,
          .dtype = o.dtype,
          .batch = o.rank == 3 ? o.stride[0] : 0,
          .row = o.stride[o.rank - 1],
          .head = o.stride[o.rank - 2],
          .present = o.present};
}

namespace {

bool in_range(const tandem_tensor& tensor, uintptr_t first, size_t bytes) {
  const Operand o = operand_of(tensor);
  if (o.empty) return false;
  const auto data = reinterpret_cast<uintptr_t>(o.first());
  const bool apart = first >= data ? first - data >= static_cast<uintptr_t>(o.bytes) : data - first >= bytes;
  return !apart;
}

}  // namespace

const char* operand_in_range(tandem_pass pass, const tandem_attention_args& args, const void* begin, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  for (const OperandInfo& info : kOperands) {
    const tandem_tensor* tensor = args.*info.field;
    if (tensor == nullptr || info.in(pass) == Use::none) continue;
    if (in_range(*tensor, first, bytes)) return info.name;
  }
  for (const tandem_mod* mod : {args.score_mod, args.mask_mod}) {
    for (int64_t i = 0; mod != nullptr && i < mod->tensor_count; ++i) {
      const tandem_mod_tensor& captured = mod->tensors[i];
      const bool writes = pass == TANDEM_BACKWARD && captured.gradient != nullptr;
      if (in_range(*captured.tensor, first, bytes) || (writes && in_range(*captured.gradient, first, bytes))) {
        return captured.name;
      }
    }
  }
  return nullptr;
}

}  // namespace tandem
