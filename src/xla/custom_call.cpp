#include "xla/custom_call.h"

#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>

#include "base/text.h"

namespace tandem::xla {
namespace {

std::string_view view_of(const void* text) {
  const auto& span = *static_cast<const XlaText*>(text);
  return {span.data, span.size};
}

// The part of a name after "score_mod." or another prefix, if it has the prefix.
std::optional<std::string_view> after(std::string_view prefix, std::string_view name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  return name.substr(prefix.size());
}

std::optional<tandem_dtype> dtype_of(int32_t type) {
  const auto made = [](int code, int bits) {
    return tandem_dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  switch (type) {
    case kXlaPred: return made(TANDEM_BOOL, 8);
    case kXlaS8: return made(TANDEM_INT, 8);
    case kXlaS16: return made(TANDEM_INT, 16);
    case kXlaS32: return made(TANDEM_INT, 32);
    case kXlaS64: return made(TANDEM_INT, 64);
    case kXlaU8: return made(TANDEM_UINT, 8);
    case kXlaU16: return made(TANDEM_UINT, 16);
    case kXlaU32: return made(TANDEM_UINT, 32);
    case kXlaU64: return made(TANDEM_UINT, 64);
    case kXlaF16: return made(TANDEM_FLOAT, 16);
    case kXlaF32: return made(TANDEM_FLOAT, 32);
    case kXlaF64: return made(TANDEM_FLOAT, 64);
    case kXlaBF16: return made(TANDEM_BFLOAT, 16);
    default: return std::nullopt;
  }
}

template <class T>
T value_of(const XlaScalar& scalar) {
  T value;
  std::memcpy(&value, scalar.value, sizeof value);
  return value;
}

// A number that must have one of XLA's types bool, int32, int64 and float64.
template <class T>
Status read_number(std::string_view name, const XlaScalar& scalar, T* number) {
  if constexpr (std::is_arithmetic_v<T>) {
    if (scalar.type == kXlaF64 && std::is_floating_point_v<T>) {
      *number = static_cast<T>(value_of<double>(scalar));
      return {};
    }
    int64_t integer = 0;
    if (scalar.type == kXlaS64) {
      integer = value_of<int64_t>(scalar);
    } else if (scalar.type == kXlaS32) {
      integer = value_of<int32_t>(scalar);
    } else if (scalar.type == kXlaPred) {
      integer = value_of<bool>(scalar) ? 1 : 0;
    } else {
      return Status::invalid(str_cat("attribute ", name, " (XLA type ", scalar.type,
                                     ") must be an int32, an int64, or a float64: convert the number"));
    }
    if (sizeof(T) == 4 && static_cast<int32_t>(integer) != integer) {
      return Status::invalid(
          str_cat("attribute ", name, " (", integer, ") must be an integer of at most 32 bits: pass a smaller number"));
    }
    *number = static_cast<T>(integer);
    return {};
  } else {
    return Status::invalid(
        str_cat("attribute ", name, " (a number) must be a buffer or an expression: pass one of them"));
  }
}

}  // namespace

Status CustomCall::read(const XlaFrame& frame) {
  args_.size = sizeof args_;
  std::string_view inputs, outputs;
  for (int64_t i = 0; i < frame.attributes.size; ++i) {
    const std::string_view name = view_of(frame.attributes.names[i]);
    if (name == "inputs" || name == "outputs") {
      if (frame.attributes.kinds[i] != kXlaTextAttribute) {
        return Status::invalid(str_cat("attribute ", name, " must be a string: pass the names of the buffers"));
      }
      (name == "inputs" ? inputs : outputs) = view_of(frame.attributes.values[i]);
    } else {
      TANDEM_TRY(read_attribute(name, frame.attributes.kinds[i], frame.attributes.values[i]));
    }
  }
  TANDEM_TRY(read_buffers(inputs, "inputs", frame.inputs));
  TANDEM_TRY(read_buffers(outputs, "outputs", frame.outputs));
  finish(&score_mod_, &args_.score_mod);
  finish(&mask_mod_, &args_.mask_mod);
  return {};
}

Status CustomCall::read_buffers(std::string_view names, const char* attribute, const XlaBuffers& buffers) {
  const Status refusal = Status::invalid(
      str_cat("attribute ", attribute, " must name each of the ", buffers.size, " buffers: add the missing names"));
  int64_t named = 0;
  for (; !names.empty(); ++named) {
    if (named == buffers.size) return refusal;
    const size_t comma = names.find(',');
    TANDEM_TRY(read_tensor(names.substr(0, comma), *static_cast<const XlaBuffer*>(buffers.buffers[named])));
    names.remove_prefix(comma == std::string_view::npos ? names.size() : comma + 1);
  }
  return named == buffers.size ? Status{} : refusal;
}

Status CustomCall::read_tensor(std::string_view name, const XlaBuffer& buffer) {
  if (name == "seed") return read_seed(buffer);
  const std::optional<tandem_dtype> dtype = dtype_of(buffer.type);
  if (!dtype) {
    return Status::unsupported(
        str_cat(name, " (XLA type ", buffer.type,
                ") must be bool, integer, float or bfloat16 of at most 64 bits: convert the array"));
  }
  tandem_tensor& tensor = tensors_.emplace_back();
  tensor = {buffer.data, device_, static_cast<int32_t>(buffer.rank), *dtype, buffer.dims, nullptr, 0};
#define TENSOR(member, access, contiguous) \
  if (name == #member) {                   \
    args_.member = &tensor;                \
    return {};                             \
  }
#include "problem/options.def"
  if (const auto captured = after("dscore_mod.", name)) return add_gradient(*captured, &tensor);
  Expression* expression = expression_of(name);
  if (expression == nullptr)
    return Status::invalid(str_cat("buffer ", name, " must have the name of a tensor: correct the name"));
  names_.emplace_back(name.substr(name.find('.') + 1));
  expression->tensors.push_back({names_.back().c_str(), &tensor, nullptr});
  return {};
}

// 64 bits are the seed; 64 more are the offset.
Status CustomCall::read_seed(const XlaBuffer& buffer) {
  const std::optional<tandem_dtype> dtype = dtype_of(buffer.type);
  const int64_t bits = dtype && buffer.rank == 1 ? buffer.dims[0] * dtype->bits : 0;
  if (bits != 64 && bits != 128) {
    return Status::invalid("seed must be one dimension of two uint32, or of one or two 64-bit integers: reshape it");
  }
  args_.dropout_seed_ptr = static_cast<const uint64_t*>(buffer.data);
  if (bits == 128) args_.dropout_offset_ptr = args_.dropout_seed_ptr + 1;
  return {};
}

Status CustomCall::read_attribute(std::string_view name, int32_t kind, const void* value) {
  if (kind == kXlaTextAttribute && (name == "score_mod" || name == "mask_mod")) {
    (name == "score_mod" ? score_mod_ : mask_mod_).text = view_of(value);
    return {};
  }
  if (kind == kXlaScalarAttribute) return read_scalar(name, *static_cast<const XlaScalar*>(value));
  return Status::invalid(
      str_cat("attribute ", name, " must be a number, or a string for an expression: pass one of them"));
}

Status CustomCall::read_scalar(std::string_view name, const XlaScalar& scalar) {
#define OPTION(member, type, kind, schema) \
  if (name == #member) return read_number(name, scalar, &args_.member);
#define MEMBER(member, type) OPTION(member, type, , )
#include "problem/options.def"
  if (Expression* expression = expression_of(name)) return add_number(expression, name, scalar);
  return Status::invalid(str_cat("attribute ", name, " must be an option of tandem_attention_args: correct the name"));
}

// The expression whose tensor or number has this name, or null.
CustomCall::Expression* CustomCall::expression_of(std::string_view name) {
  if (after("score_mod.", name)) return &score_mod_;
  return after("mask_mod.", name) ? &mask_mod_ : nullptr;
}

Status CustomCall::add_gradient(std::string_view name, const tandem_tensor* gradient) {
  for (tandem_mod_tensor& tensor : score_mod_.tensors) {
    if (tensor.name == name) {
      tensor.gradient = gradient;
      return {};
    }
  }
  return Status::invalid(
      str_cat("output dscore_mod.", name, " must be the gradient of an input score_mod.", name, ": pass that input"));
}

Status CustomCall::add_number(Expression* expression, std::string_view name, const XlaScalar& scalar) {
  names_.emplace_back(name.substr(name.find('.') + 1));
  const int32_t type = scalar.type == kXlaPred ? TANDEM_BOOL : scalar.type == kXlaF64 ? TANDEM_FLOAT : TANDEM_INT;
  tandem_mod_scalar number{names_.back().c_str(), type, 0, 0};
  TANDEM_TRY(read_number(name, scalar, &number.value));
  expression->scalars.push_back(number);
  return {};
}

void CustomCall::finish(Expression* expression, const tandem_mod** member) {
  if (expression->text.empty()) return;
  expression->mod = {sizeof(tandem_mod),         expression->text.c_str(),
                     expression->scalars.data(), static_cast<int64_t>(expression->scalars.size()),
                     expression->tensors.data(), static_cast<int64_t>(expression->tensors.size())};
  *member = &expression->mod;
}

}  // namespace tandem::xla
