// Tests of tensor maps: valid maps are decoded again, and the driver's refusals are repeated with the reason.
#include "vgpu/src/units/tensor_map.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

namespace tandem::vgpu::units {
namespace {

size_t wide(int x) { return static_cast<size_t>(x); }

alignas(64) std::byte memory[4096];

gpu::TensorMapSpec good() {
  gpu::TensorMapSpec spec;
  spec.address = memory;
  spec.type = gpu::TensorType::bf16;
  spec.rank = 4;
  for (int i = 0; i < 4; ++i) {
    spec.dims[i] = uint64_t{64} + wide(i);
    spec.byte_strides[i] = wide(128 * (i + 1));
    spec.box[i] = i == 0 ? 64 : 4;
    spec.element_strides[i] = static_cast<uint32_t>(1 + i);
  }
  spec.swizzle = gpu::Swizzle::b128;
  spec.l2_promotion = gpu::L2Promotion::b256;
  spec.oob_fill = gpu::OobFill::nan;
  return spec;
}

TEST(TensorMap, ComesBack) {
  for (int swizzle = 0; swizzle < 7; ++swizzle) {
    gpu::TensorMapSpec spec = good(), back;
    spec.swizzle = static_cast<gpu::Swizzle>(swizzle);
    spec.box[0] = swizzle == 1 ? 16 : swizzle == 2 ? 32 : 64;
    spec.dims[3] = uint64_t{1} << 32;
    gpu::TensorMap map;
    ASSERT_TRUE(encode(spec, &map).ok());
    const Status status = decode(&map, &back);
    ASSERT_TRUE(status.ok()) << status.message;
    EXPECT_EQ(back.address, spec.address);
    EXPECT_EQ(back.type, spec.type);
    EXPECT_EQ(back.rank, spec.rank);
    for (int i = 0; i < spec.rank; ++i) {
      EXPECT_EQ(back.dims[i], spec.dims[i]);
      EXPECT_EQ(back.box[i], spec.box[i]);
      EXPECT_EQ(back.element_strides[i], i == 0 ? 1 : spec.element_strides[i]);
      EXPECT_EQ(back.byte_strides[i], i == 0 ? 2 : spec.byte_strides[i]);
    }
    EXPECT_EQ(back.swizzle, spec.swizzle);
    EXPECT_EQ(back.l2_promotion, spec.l2_promotion);
    EXPECT_EQ(back.oob_fill, spec.oob_fill);
  }
}

// CUTLASS clears the bit in maps of tensors below 128 KiB, because older NVIDIA drivers require it.
TEST(TensorMap, DoesNotNeedTheBitThatCutlassClears) {
  for (uint64_t address = 1 << 12; address < uint64_t{1} << 40; address <<= 1) {
    gpu::TensorMapSpec spec = good(), back;
    spec.address = reinterpret_cast<void*>(address);
    gpu::TensorMap map;
    ASSERT_TRUE(encode(spec, &map).ok());
    uint64_t words[sizeof map / 8];
    std::memcpy(words, &map, sizeof map);
    words[1] &= ~(uint64_t{1} << 21);
    std::memcpy(&map, words, sizeof map);
    ASSERT_TRUE(decode(&map, &back).ok());
    EXPECT_EQ(back.address, spec.address);
  }
}

TEST(TensorMap, RefusesWhatTheDriverRefuses) {
  struct Case {
    const char* says;
    std::function<void(gpu::TensorMapSpec&)> spoil;
  };
  using Spec = gpu::TensorMapSpec;
  const Case cases[] = {
      {"type 16", [](Spec& s) { s.type = static_cast<gpu::TensorType>(16); }},
      {"rank (0)", [](Spec& s) { s.rank = 0; }},
      {"rank (6)", [](Spec& s) { s.rank = 6; }},
      {"address modulo 16 (8)", [](Spec& s) { s.address = memory + 8; }},
      {"size of dimension 2 (0)", [](Spec& s) { s.dims[2] = 0; }},
      {"size of dimension 1 (4294967297)", [](Spec& s) { s.dims[1] = (uint64_t{1} << 32) + 1; }},
      {"byte stride of dimension 1 (24)", [](Spec& s) { s.byte_strides[1] = 24; }},
      {"byte stride of dimension 3 (1099511627776)", [](Spec& s) { s.byte_strides[3] = uint64_t{1} << 40; }},
      {"box of dimension 3 (0)", [](Spec& s) { s.box[3] = 0; }},
      {"box of dimension 1 (257)", [](Spec& s) { s.box[1] = 257; }},
      {"element stride of dimension 2 (9)", [](Spec& s) { s.element_strides[2] = 9; }},
      {"element stride of dimension 1 (0)", [](Spec& s) { s.element_strides[1] = 0; }},
      {"multiple of 16 bytes", [](Spec& s) { s.box[0] = 4; }},
      {"swizzle of 64 bytes", [](Spec& s) { s.swizzle = gpu::Swizzle::b64; }},
      {"swizzle 7", [](Spec& s) { s.swizzle = static_cast<gpu::Swizzle>(7); }},
      {"L2 promotion 4", [](Spec& s) { s.l2_promotion = static_cast<gpu::L2Promotion>(4); }},
      {"fill 2", [](Spec& s) { s.oob_fill = static_cast<gpu::OobFill>(2); }},
      {"NaN in type s32", [](Spec& s) { s.type = gpu::TensorType::s32, s.box[0] = 32; }},
  };
  for (const Case& c : cases) {
    gpu::TensorMapSpec spec = good();
    c.spoil(spec);
    gpu::TensorMap map;
    const Status status = encode(spec, &map);
    EXPECT_FALSE(status.ok()) << c.says;
    EXPECT_NE(status.message.find(c.says), std::string::npos) << status.message;
  }
}

TEST(TensorMap, IgnoresTheStrideOfDimensionZero) {
  gpu::TensorMapSpec spec = good();
  spec.element_strides[0] = 0;
  spec.byte_strides[0] = 7;
  gpu::TensorMap map;
  EXPECT_TRUE(encode(spec, &map).ok());
}

TEST(TensorMap, RefusesForeignBytes) {
  gpu::TensorMapSpec spec;
  gpu::TensorMap map;
  for (const int byte : {0, 0xff, 0x5a}) {
    std::memset(map.bytes, byte, sizeof map.bytes);
    EXPECT_FALSE(decode(&map, &spec).ok());
    EXPECT_EQ(replace(&map, MapField::rank, 0, 1).ok(), byte == 0);
  }
  std::memset(map.bytes, 0, sizeof map.bytes);
  map.bytes[127] = 1;
  EXPECT_FALSE(replace(&map, MapField::rank, 0, 1).ok());
}

// The fields may be replaced in any order. Other fields are zero.
TEST(TensorMap, IsMadeFromZeroBytes) {
  const std::vector<std::tuple<MapField, int32_t, uint64_t>> fields = {
      {MapField::global_address, 0, reinterpret_cast<uint64_t>(memory)},
      {MapField::rank, 0, 1},
      {MapField::box_dim, 0, 32},
      {MapField::box_dim, 1, 8},
      {MapField::global_dim, 0, 32},
      {MapField::global_dim, 1, 64},
      {MapField::global_stride, 0, 128},
      {MapField::element_stride, 0, 1},
      {MapField::element_stride, 1, 1},
      {MapField::elemtype, 0, 2}};
  for (size_t first = 0; first < fields.size(); ++first) {
    gpu::TensorMap map = {};
    gpu::TensorMapSpec spec;
    EXPECT_FALSE(decode(&map, &spec).ok());
    for (size_t n = 0; n < fields.size(); ++n) {
      const auto& [field, index, value] = fields[(first + n) % fields.size()];
      const Status status = replace(&map, field, index, value);
      ASSERT_TRUE(status.ok()) << status.message;
    }
    const Status status = decode(&map, &spec);
    ASSERT_TRUE(status.ok()) << status.message;
    EXPECT_EQ(spec.address, memory);
    EXPECT_EQ(spec.rank, 2);
    EXPECT_EQ(spec.dims[1], 64u);
    EXPECT_EQ(spec.byte_strides[1], 128u);
    EXPECT_EQ(spec.box[0], 32u);
    EXPECT_EQ(spec.type, gpu::TensorType::u32);
    EXPECT_EQ(spec.swizzle, gpu::Swizzle::none);
  }
}

TEST(TensorMap, FieldsCanBeReplaced) {
  gpu::TensorMap map;
  gpu::TensorMapSpec spec;
  ASSERT_TRUE(encode(good(), &map).ok());
  const auto set = [&](MapField field, int32_t index, uint64_t value) {
    const Status status = replace(&map, field, index, value);
    ASSERT_TRUE(status.ok()) << status.message;
  };
  set(MapField::global_address, 0, reinterpret_cast<uint64_t>(memory + 64));
  set(MapField::rank, 0, 1);  // rank - 1
  set(MapField::global_dim, 1, 77);
  set(MapField::global_stride, 0, 4096);  // stride of dimension 1
  set(MapField::box_dim, 1, 8);
  set(MapField::element_stride, 1, 2);
  set(MapField::elemtype, 0, 7);
  set(MapField::box_dim, 0, 16);
  set(MapField::swizzle_mode, 0, 2);
  set(MapField::fill_mode, 0, 0);
  const Status status = decode(&map, &spec);
  ASSERT_TRUE(status.ok()) << status.message;
  EXPECT_EQ(spec.address, memory + 64);
  EXPECT_EQ(spec.rank, 2);
  EXPECT_EQ(spec.dims[1], 77u);
  EXPECT_EQ(spec.byte_strides[1], 4096u);
  EXPECT_EQ(spec.box[1], 8u);
  EXPECT_EQ(spec.box[0], 16u);
  EXPECT_EQ(spec.element_strides[1], 2u);
  EXPECT_EQ(spec.type, gpu::TensorType::f32);
  EXPECT_EQ(spec.swizzle, gpu::Swizzle::b64);
  EXPECT_EQ(spec.oob_fill, gpu::OobFill::zero);
  // The instruction's numbers of these types differ from the driver's.
  set(MapField::elemtype, 0, 10);
  ASSERT_TRUE(decode(&map, &spec).ok());
  EXPECT_EQ(spec.type, gpu::TensorType::bf16);
  set(MapField::swizzle_mode, 0, 3);
  set(MapField::swizzle_atomicity, 0, 3);
  ASSERT_TRUE(decode(&map, &spec).ok());
  EXPECT_EQ(spec.swizzle, gpu::Swizzle::b128_atom_64b);
  // Invalid values are refused at once, or when the map is used.
  set(MapField::elemtype, 0, 14);
  EXPECT_FALSE(decode(&map, &spec).ok());
  EXPECT_FALSE(replace(&map, MapField::global_dim, 0, 0).ok());
  EXPECT_FALSE(replace(&map, MapField::box_dim, 5, 1).ok());
  ASSERT_TRUE(encode(good(), &map).ok());
  set(MapField::interleave_layout, 0, 1);
  EXPECT_EQ(decode(&map, &spec).code, TANDEM_UNSUPPORTED);
}

}  // namespace
}  // namespace tandem::vgpu::units
