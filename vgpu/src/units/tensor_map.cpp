#include "vgpu/src/units/tensor_map.h"

#include <bit>
#include <cstring>

#include "base/text.h"

namespace tandem::vgpu::units {
namespace {

// The virtual GPU's encoding, in the driver's 128 bytes.
struct Encoding {
  uint64_t mark;
  uint64_t left_alone;  // CUTLASS clears bit 21 here, for drivers before 13.2
  uint64_t address;
  uint32_t dims[gpu::kMaxTensorRank];  // size - 1, because 2^32 is allowed
  uint32_t reserved;
  uint64_t byte_strides[gpu::kMaxTensorRank];
  uint16_t box[gpu::kMaxTensorRank];
  uint8_t element_strides[gpu::kMaxTensorRank];
  uint8_t type, rank, swizzle, atomicity, l2_promotion, oob_fill, interleave;
};
static_assert(sizeof(Encoding) <= sizeof(gpu::TensorMap));

constexpr uint64_t kMark = 0x70614d7565676e74;

constexpr const char* kTypeNames[] = {"u8",       "u16",       "u32",        "s32",       "u64",     "s64",
                                      "f16",      "f32",       "f64",        "bf16",      "f32_ftz", "tf32",
                                      "tf32_ftz", "u4_align8", "u4_align16", "u6_align16"};
constexpr int kGlobalBits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
constexpr int kTypes = 16, kSwizzles = 7;
// tensormap.replace numbers f32.ftz, f64 and bf16 in another order than the driver.
constexpr uint8_t kReplacementTypes[kTypes] = {0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15};

bool is_floating(gpu::TensorType type) { return type >= gpu::TensorType::f16 && type <= gpu::TensorType::tf32_ftz; }

bool is_padded(gpu::TensorType type) {
  return type == gpu::TensorType::u4_align16 || type == gpu::TensorType::u6_align16;
}

uint32_t span_of(gpu::Swizzle swizzle) {
  switch (swizzle) {
    case gpu::Swizzle::none: return 0;
    case gpu::Swizzle::b32: return 32;
    case gpu::Swizzle::b64: return 64;
    default: return 128;
  }
}

Status check_dimension(const gpu::TensorMapSpec& spec, int32_t i) {
  if (spec.dims[i] == 0 || spec.dims[i] > uint64_t{1} << 32)
    return Status::invalid(
        str_cat("tensor map: size of dimension ", i, " (", spec.dims[i], ") must be 1 to 2^32: correct the size"));
  if (i > 0 && (spec.byte_strides[i] % 16 != 0 || spec.byte_strides[i] >= uint64_t{1} << 40))
    return Status::invalid(str_cat("tensor map: byte stride of dimension ", i, " (", spec.byte_strides[i],
                                   ") must be a multiple of 16 below 2^40: pad the rows"));
  if (spec.box[i] == 0 || spec.box[i] > 256)
    return Status::invalid(
        str_cat("tensor map: box of dimension ", i, " (", spec.box[i], ") must be 1 to 256: use a smaller box"));
  if (i > 0 && (spec.element_strides[i] == 0 || spec.element_strides[i] > 8))
    return Status::invalid(str_cat("tensor map: element stride of dimension ", i, " (", spec.element_strides[i],
                                   ") must be 1 to 8: correct the stride"));
  return {};
}

Status check_box_row(const gpu::TensorMapSpec& spec) {
  const uint32_t bytes = spec.box[0] * static_cast<uint32_t>(shared_bits(spec.type)) / 8, span = span_of(spec.swizzle);
  if (bytes % 16 != 0)
    return Status::invalid(str_cat("tensor map: box of dimension 0 (", spec.box[0], " elements of ", name_of(spec.type),
                                   ", ", bytes, " bytes) must be a multiple of 16 bytes: use a wider box"));
  if (span != 0 && bytes > span)
    return Status::invalid(str_cat("tensor map: box of dimension 0 (", bytes, " bytes) must fit into the swizzle of ",
                                   span, " bytes: choose a narrower box or a wider swizzle"));
  return {};
}

// Additional rules of packed types.
Status check_packed(const gpu::TensorMapSpec& spec) {
  const std::string type = name_of(spec.type);
  if (spec.type == gpu::TensorType::u4_align8 && spec.dims[0] % 2 != 0)
    return Status::invalid(
        str_cat("tensor map: size of dimension 0 (", spec.dims[0], ") must be even in type ", type, ": pad the rows"));
  if (!is_padded(spec.type)) return {};
  if (std::bit_cast<uintptr_t>(spec.address) % 32 != 0)
    return Status::invalid(
        str_cat("tensor map: the address must be a multiple of 32 in type ", type, ": align the tensor"));
  if (spec.dims[0] % 128 != 0 || spec.box[0] != 128)
    return Status::invalid(str_cat("tensor map: size of dimension 0 (", spec.dims[0],
                                   ") must be a multiple of 128, and its box (", spec.box[0], ") 128, in type ", type,
                                   ": pad the rows"));
  for (int32_t i = 1; i < spec.rank; ++i)
    if (spec.byte_strides[i] % 32 != 0)
      return Status::invalid(str_cat("tensor map: byte stride of dimension ", i, " (", spec.byte_strides[i],
                                     ") must be a multiple of 32 in type ", type, ": pad the rows"));
  using enum gpu::Swizzle;
  const bool served = spec.swizzle == none || spec.swizzle == b128 || spec.swizzle == b128_atom_32b ||
                      (spec.swizzle == b128_atom_64b && spec.type == gpu::TensorType::u6_align16);
  if (!served)
    return Status::invalid(str_cat("tensor map: type ", type, " does not have swizzle ", static_cast<int>(spec.swizzle),
                                   ": use none or 128B"));
  return {};
}

bool is_zero(const void* map) {
  const gpu::TensorMap zero = {};
  return std::memcmp(map, zero.bytes, sizeof zero.bytes) == 0;
}

Status check(const gpu::TensorMapSpec& spec) {
  const auto type = static_cast<int32_t>(spec.type), swizzle = static_cast<int32_t>(spec.swizzle);
  if (type < 0 || type >= kTypes)
    return Status::invalid(str_cat("tensor map: type ", type, " must be a CUtensorMapDataType: correct the type"));
  if (spec.rank < 1 || spec.rank > gpu::kMaxTensorRank)
    return Status::invalid(
        str_cat("tensor map: rank (", spec.rank, ") must be 1 to ", gpu::kMaxTensorRank, ": correct the rank"));
  const auto address = std::bit_cast<uintptr_t>(spec.address);
  if (address % 16 != 0)
    return Status::invalid(str_cat("tensor map: address modulo 16 (", address % 16, ") must be 0: align the tensor"));
  for (int32_t i = 0; i < spec.rank; ++i) TANDEM_TRY(check_dimension(spec, i));
  if (swizzle < 0 || swizzle >= kSwizzles)
    return Status::invalid(
        str_cat("tensor map: swizzle ", swizzle, " must be a CUtensorMapSwizzle: correct the swizzle"));
  if (static_cast<uint32_t>(spec.l2_promotion) > 3)
    return Status::invalid(str_cat("tensor map: L2 promotion ", static_cast<int32_t>(spec.l2_promotion),
                                   " must be a CUtensorMapL2promotion: correct the number"));
  if (static_cast<uint32_t>(spec.oob_fill) > 1)
    return Status::invalid(str_cat("tensor map: fill ", static_cast<int32_t>(spec.oob_fill),
                                   " must be a CUtensorMapFloatOOBfill: correct the number"));
  if (spec.oob_fill == gpu::OobFill::nan && !is_floating(spec.type))
    return Status::invalid(str_cat("tensor map: elements beyond the tensor cannot become NaN in type ",
                                   name_of(spec.type), ": fill with 0"));
  TANDEM_TRY(check_packed(spec));
  return check_box_row(spec);
}

}  // namespace

int32_t bytes_of(gpu::TensorType type) { return global_bits(type) / 8; }
int32_t global_bits(gpu::TensorType type) { return kGlobalBits[static_cast<int>(type)]; }
int32_t shared_bits(gpu::TensorType type) { return is_padded(type) ? 8 : global_bits(type); }
const char* name_of(gpu::TensorType type) { return kTypeNames[static_cast<int>(type)]; }

Status encode(const gpu::TensorMapSpec& spec, gpu::TensorMap* map) {
  TANDEM_TRY(check(spec));
  Encoding e = {};
  e.mark = kMark;
  e.address = std::bit_cast<uintptr_t>(spec.address);
  for (int32_t i = 0; i < spec.rank; ++i) {
    e.dims[i] = static_cast<uint32_t>(spec.dims[i] - 1);
    e.byte_strides[i] = i == 0 ? static_cast<uint64_t>(shared_bits(spec.type) / 8) : spec.byte_strides[i];
    e.box[i] = static_cast<uint16_t>(spec.box[i]);
    // Without interleaved layouts dimension 0 has no stride, and the driver ignores the caller's value.
    e.element_strides[i] = static_cast<uint8_t>(i == 0 ? 1 : spec.element_strides[i]);
  }
  e.type = static_cast<uint8_t>(spec.type);
  e.rank = static_cast<uint8_t>(spec.rank);
  // Mode and atomicity are separate, as tensormap.replace sets them. Modes: 0 none, 1 32 B, 2 64 B, 3 128 B. Atoms: 16
  // B, 32 B, 32 B with a flip, 64 B.
  const auto swizzle = static_cast<uint8_t>(spec.swizzle);
  e.swizzle = swizzle < 3 ? swizzle : 3;
  e.atomicity = static_cast<uint8_t>(swizzle < 3 ? 0 : swizzle - 3);
  e.l2_promotion = static_cast<uint8_t>(spec.l2_promotion);
  e.oob_fill = static_cast<uint8_t>(spec.oob_fill);
  std::memset(map->bytes, 0, sizeof map->bytes);
  std::memcpy(map->bytes, &e, sizeof e);
  return {};
}

Status decode(const void* map, gpu::TensorMapSpec* spec) {
  Encoding e;
  std::memcpy(&e, map, sizeof e);
  if (e.mark != kMark)
    return Status::invalid(
        "the 128 bytes must be a tensor map of the virtual GPU: call cuTensorMapEncodeTiled of the virtual GPU");
  if (e.interleave != 0)
    return Status::unsupported("tensor map: interleaved layouts are not modelled: use CU_TENSOR_MAP_INTERLEAVE_NONE");
  if (e.swizzle > 3 || (e.swizzle < 3 && e.atomicity != 0) || e.atomicity > 3)
    return Status::invalid(str_cat("tensor map: swizzle mode ", int{e.swizzle}, " with atomicity ", int{e.atomicity},
                                   " does not exist: correct one of them"));
  *spec = {};
  spec->address = std::bit_cast<void*>(static_cast<uintptr_t>(e.address));
  spec->type = static_cast<gpu::TensorType>(e.type);
  spec->rank = e.rank;
  for (int32_t i = 0; i < gpu::kMaxTensorRank; ++i) {
    spec->dims[i] = uint64_t{e.dims[i]} + 1;
    spec->byte_strides[i] = e.byte_strides[i];
    spec->box[i] = e.box[i];
    spec->element_strides[i] = e.element_strides[i];
  }
  spec->swizzle = static_cast<gpu::Swizzle>(e.swizzle + e.atomicity);
  spec->l2_promotion = static_cast<gpu::L2Promotion>(e.l2_promotion);
  spec->oob_fill = static_cast<gpu::OobFill>(e.oob_fill);
  return check(*spec);
}

Status replace(void* map, MapField field, int32_t index, uint64_t value) {
  Encoding e;
  std::memcpy(&e, map, sizeof e);
  // Hardware accepts 128 zero bytes as a map whose fields are all zero.
  if (is_zero(map)) e.mark = kMark;
  if (e.mark != kMark)
    return Status::invalid(
        "tensormap.replace: the 128 bytes must be zero, or a tensor map of the virtual GPU: encode the map first");
  if (index < 0 || index >= gpu::kMaxTensorRank)
    return Status::invalid(str_cat("tensormap.replace: dimension ", index, " must be 0 to ", gpu::kMaxTensorRank - 1,
                                   ": correct the index"));
  const auto small = static_cast<uint8_t>(value > 255 ? 255 : value);
  switch (field) {
    case MapField::global_address: e.address = value; break;
    case MapField::rank: e.rank = static_cast<uint8_t>(small + 1); break;  // the instruction encodes rank - 1
    case MapField::box_dim: e.box[index] = static_cast<uint16_t>(value > 0xffff ? 0xffff : value); break;
    case MapField::global_dim:
      if (value == 0)
        return Status::invalid(
            str_cat("tensormap.replace: size of dimension ", index, " must not be 0: use 1 or more"));
      e.dims[index] = static_cast<uint32_t>(value - 1);
      break;
    case MapField::global_stride:  // the instruction counts from dimension 1 on
      if (index + 1 < gpu::kMaxTensorRank) e.byte_strides[index + 1] = value;
      break;
    case MapField::element_stride: e.element_strides[index] = small; break;
    case MapField::elemtype: e.type = small < kTypes ? kReplacementTypes[small] : small; break;
    case MapField::interleave_layout: e.interleave = small; break;
    case MapField::swizzle_mode: e.swizzle = small; break;
    case MapField::fill_mode: e.oob_fill = small; break;
    case MapField::swizzle_atomicity: e.atomicity = small; break;
  }
  std::memcpy(map, &e, sizeof e);
  return {};
}

}  // namespace tandem::vgpu::units
