// Score and mask modifications of a call.
#include <algorithm>
#include <string>

#include "base/text.h"
#include "problem/bound_expression.h"
#include "problem/builder.h"
#include "problem/struct_size.h"
#include "score_mod/placed_text.h"

namespace tandem {
namespace {

constexpr int64_t kFirstModSize = sizeof(tandem_mod);  // size in the version that introduced the struct

constexpr DTypes kReadable =
    kFloats | only(DType::boolean) | only(DType::i32) | only(DType::i64);  // types of tensors that expressions may read

score_mod::Element element_of(DType type) {
  switch (type) {
    case DType::f64: return score_mod::Element::f64;
    case DType::f32: return score_mod::Element::f32;
    case DType::bf16: return score_mod::Element::bf16;
    case DType::f16: return score_mod::Element::f16;
    case DType::boolean: return score_mod::Element::boolean;
    case DType::i32: return score_mod::Element::i32;
    case DType::i64: return score_mod::Element::i64;
  }
  return score_mod::Element::f32;
}

Status check_list(const std::string& name, const void* list, int64_t count) {
  if (count < 0 || count > static_cast<int64_t>(score_mod::kMaxNames)) {
    return Status::invalid(
        str_cat(name, "_count (", count, ") must be 0 to ", score_mod::kMaxNames, ": pass fewer names"));
  }
  if (list != nullptr || count == 0) return {};
  return Status::invalid(
      str_cat(name, "s (NULL) must point to ", name, "_count (", count, ") entries: pass their address"));
}

Status read_scalar(const std::string& mod, const tandem_mod_scalar& scalar, score_mod::Name* name) {
  if (scalar.name == nullptr)
    return Status::invalid(str_cat(mod, ".scalars[].name (NULL) must be a string: set the name"));
  name->name = scalar.name;
  if (scalar.reserved != 0) {
    return Status::invalid(
        str_cat(mod, ".", name->name, ".reserved (", scalar.reserved, ") must be 0: zero the struct first"));
  }
  switch (scalar.type) {
    case TANDEM_FLOAT: name->type = score_mod::Type::real; return {};
    case TANDEM_INT: name->type = score_mod::Type::integer; return {};
    case TANDEM_BOOL: name->type = score_mod::Type::boolean; return {};
    default:
      return Status::invalid(
          str_cat(mod, ".", name->name, ".type (", scalar.type,
                  ") must be TANDEM_FLOAT (2), TANDEM_INT (0) or TANDEM_BOOL (6): choose one of them"));
  }
}

score_mod::TensorView tensor_view_of(const Operand& o) {
  score_mod::TensorView view{.data = o.data, .element = element_of(o.dtype), .rank = o.rank};
  for (int i = 0; i < o.rank; ++i) {
    view.size[i] = static_cast<int32_t>(o.shape[i]);
    view.stride[i] = o.stride[i];
  }
  return view;
}

BiasView gradient_view_of(const Operand& o) {
  BiasView view{.data = o.data, .dtype = o.dtype, .present = true};
  std::copy_n(o.shape, o.rank, view.shape);
  std::copy_n(o.stride, o.rank, view.stride);
  return view;
}

// Returns a refusal of the text or a name, with the modification's name before it.
Status told_of(const std::string& mod, Status status) {
  if (!status.ok()) status.message = str_cat(mod, ": ", status.message);
  return status;
}

}  // namespace

// Reads a tensor of any shape, or of a model's shape.
Status ProblemBuilder::read_captured(const std::string& name, const tandem_tensor& tensor, const Operand* model,
                                     Use use) {
  if (tensor.ndim < 0 || tensor.ndim > score_mod::kMaxRank) {
    return Status::invalid(str_cat(name, ".ndim (", tensor.ndim, ") must be 0 to ", score_mod::kMaxRank,
                                   ": reshape the tensor to fewer dimensions"));
  }
  static constexpr const char* kDims[] = {"dim0", "dim1", "dim2", "dim3"};
  const int rank = model != nullptr ? model->rank : tensor.ndim;
  Dim dims[score_mod::kMaxRank];
  for (int i = 0; i < rank; ++i) {
    dims[i] = {kDims[i], model != nullptr ? model->shape[i] : -1, model != nullptr ? model->name : nullptr,
               "allocate the gradient with the shape of its tensor"};
  }
  mod_operands_.push_back(std::make_unique<Captured>(Captured{.name = name, .use = use, .operand = {}}));
  Captured& captured = *mod_operands_.back();
  const OperandInfo info{captured.name.c_str(), nullptr, use, use};
  const DTypes types = model == nullptr ? kReadable : only(model->dtype) | only(DType::f32);
  const char* why =
      model == nullptr ? "convert the tensor to one of these types" : "allocate the gradient with one of these types";
  TANDEM_TRY(read_operand(tensor,
                          {.info = info,
                           .dtypes = types,
                           .dtype_why = why,
                           .dims = {dims, static_cast<size_t>(rank)},
                           .dims_why = "",
                           .contiguous_last = false},
                          mode_, &captured.operand));
  const Operand& o = captured.operand;
  for (int i = 0; i < o.rank; ++i) {
    if (o.shape[i] > 0) continue;
    return Status::invalid(
        str_cat(name, ".", o.dim_name[i], " (", o.shape[i],
                ") must be at least 1: pass a tensor with elements, because the expression reads the nearest element"));
  }
  return {};
}

Status ProblemBuilder::read_mod_tensor(const std::string& mod, const tandem_mod_tensor& tensor, bool mask,
                                       score_mod::Name* name, BoundExpression* read) {
  if (tensor.name == nullptr)
    return Status::invalid(str_cat(mod, ".tensors[].name (NULL) must be a string: set the name"));
  name->name = tensor.name;
  const std::string own = str_cat(mod, ".", name->name), gradient = str_cat(own, ".gradient");
  if (tensor.tensor == nullptr)
    return Status::invalid(str_cat(own, ".tensor (NULL) must point to a tensor: pass its address"));
  TANDEM_TRY(read_captured(own, *tensor.tensor, nullptr, Use::read));
  const Operand model = mod_operands_.back()->operand;
  name->element = element_of(model.dtype);
  name->type = score_mod::type_of(name->element);
  name->rank = model.rank;
  read->values.tensors.push_back(tensor_view_of(model));
  read->dtypes.push_back(model.dtype);
  read->gradients.emplace_back();
  if (!backward() || tensor.gradient == nullptr) return {};
  if (mask || name->type != score_mod::Type::real) {
    return Status::invalid(str_cat(gradient, " must be NULL: ",
                                   mask ? "pass NULL, because a mask has no gradient"
                                        : "pass NULL, because only tensors of floats have gradients"));
  }
  TANDEM_TRY(read_captured(gradient, *tensor.gradient, &model, Use::write));
  const Operand& o = mod_operands_.back()->operand;
  read->gradients.back() = {.to = gradient_view_of(o), .first = read->cells};
  int64_t cells = 1;
  for (int i = 0; i < o.rank; ++i) cells *= o.shape[i];
  constexpr int64_t kMaxCells = int64_t{1} << 48;  // so that bytes of workspace can be counted
  if (cells > kMaxCells) return Status::unsupported(str_cat(gradient, " must have at most 2^48 elements: pass NULL"));
  read->cells += cells;
  return {};
}

// Gives names of positions their values in longer sequences. The places are a further tensor of the expression.
Status ProblemBuilder::place_mod(const std::string& mod, const char* text, bool mask, score_mod::Signature* signature,
                                 BoundExpression* read) {
  const score_mod::PlacedText placed = score_mod::placed_text(text);
  if (placed.places.empty()) return {};
  const tandem_mod_tensor tensor{placed.places.c_str(), args_.places, nullptr};
  TANDEM_TRY(read_mod_tensor(mod, tensor, mask, &signature->tensors.emplace_back(), read));
  return told_of(mod, score_mod::read_program(placed.text, *signature, &read->program));
}

Status ProblemBuilder::read_mod(const std::string& mod, const tandem_mod* given, bool mask, ModView* view) {
  if (given == nullptr) return {};
  tandem_mod args;
  TANDEM_TRY(read_struct(mod.c_str(), "tandem_mod", given, kFirstModSize, &args));
  if (args.text == nullptr)
    return Status::invalid(str_cat(mod, ".text (NULL) must be an expression: write one as docs/score_mod.md shows"));
  TANDEM_TRY(check_list(str_cat(mod, ".scalar"), args.scalars, args.scalar_count));
  TANDEM_TRY(check_list(str_cat(mod, ".tensor"), args.tensors, args.tensor_count));
  auto read = std::make_shared<BoundExpression>();
  score_mod::Signature signature{
      .result = mask ? score_mod::Signature::Result::mask : score_mod::Signature::Result::score,
      .scalars = {},
      .tensors = {}};
  for (int64_t i = 0; i < args.scalar_count; ++i) {
    TANDEM_TRY(read_scalar(mod, args.scalars[i], &signature.scalars.emplace_back()));
    read->values.scalars.push_back(args.scalars[i].value);
  }
  for (int64_t i = 0; i < args.tensor_count; ++i) {
    TANDEM_TRY(read_mod_tensor(mod, args.tensors[i], mask, &signature.tensors.emplace_back(), read.get()));
  }
  TANDEM_TRY(told_of(mod, score_mod::read_program(args.text, signature, &read->program)));
  if (args_.places != nullptr) TANDEM_TRY(place_mod(mod, args.text, mask, &signature, read.get()));
  TANDEM_TRY(told_of(mod, score_mod::check_values(signature, read->values)));
  *view = {.present = true, .read = std::move(read)};
  return {};
}

Status ProblemBuilder::read_mods() {
  TANDEM_TRY(read_mod("score_mod", args_.score_mod, false, &p_.score_mod));
  return read_mod("mask_mod", args_.mask_mod, true, &p_.mask_mod);
}

}  // namespace tandem
