// Tests of tensor maps of packed 4- and 6-bit numbers: refusals, and the layout of a box's rows on both sides.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "vgpu/src/units/box.h"
#include "vgpu/src/units/tensor_map.h"

namespace tandem::vgpu::units {
namespace {

using gpu::Swizzle;
using gpu::TensorType;

alignas(128) std::byte memory[8192];
alignas(128) std::byte window[8192];

// Rows of 256 numbers, three of them; boxes of 128 in two rows.
gpu::TensorMapSpec spec_of(TensorType type, Swizzle swizzle = Swizzle::none) {
  gpu::TensorMapSpec spec;
  spec.address = memory;
  spec.type = type;
  spec.rank = 2;
  spec.dims[0] = 256;
  spec.dims[1] = 3;
  spec.byte_strides[1] = 224;
  spec.box[0] = 128;
  spec.box[1] = 2;
  spec.swizzle = swizzle;
  return spec;
}

BoxCopy copy_of(TensorType type, Swizzle swizzle, int32_t x, int32_t y) {
  BoxCopy copy;
  gpu::TensorMap map;
  const Status encoded = encode(spec_of(type, swizzle), &map);
  EXPECT_TRUE(encoded.ok()) << encoded.message;
  const Status decoded = decode(&map, &copy.map);
  EXPECT_TRUE(decoded.ok()) << decoded.message;
  copy.coordinates[0] = x;
  copy.coordinates[1] = y;
  return copy;
}

void fill_memory() {
  for (size_t i = 0; i < sizeof memory; ++i) memory[i] = static_cast<std::byte>(i * 37 % 251 + 1);
  std::memset(window, 0xee, sizeof window);
}

TEST(PackedMap, RefusesWhatTheDriverRefuses) {
  struct Case {
    TensorType type;
    std::function<void(gpu::TensorMapSpec&)> break_it;
    const char* says;
  };
  const Case cases[] = {
      {TensorType::u4_align8, [](auto& s) { s.dims[0] = 255; }, "must be even"},
      {TensorType::u4_align8, [](auto& s) { s.box[0] = 16; }, "multiple of 16 bytes"},
      {TensorType::u4_align16, [](auto& s) { s.dims[0] = 192; }, "multiple of 128"},
      {TensorType::u4_align16, [](auto& s) { s.box[0] = 64; }, "multiple of 128"},
      {TensorType::u6_align16, [](auto& s) { s.address = memory + 16; }, "multiple of 32"},
      {TensorType::u6_align16, [](auto& s) { s.byte_strides[1] = 208; }, "multiple of 32"},
      {TensorType::u4_align16, [](auto& s) { s.swizzle = Swizzle::b128_atom_64b; }, "does not have swizzle"},
      {TensorType::u6_align16, [](auto& s) { s.swizzle = Swizzle::b128_atom_32b_flip_8b; }, "does not have swizzle"},
      {TensorType::u6_align16, [](auto& s) { s.oob_fill = gpu::OobFill::nan; }, "cannot become NaN"},
  };
  for (const Case& c : cases) {
    gpu::TensorMapSpec spec = spec_of(c.type);
    gpu::TensorMap map;
    ASSERT_TRUE(encode(spec, &map).ok());
    c.break_it(spec);
    const Status status = encode(spec, &map);
    EXPECT_FALSE(status.ok()) << c.says;
    EXPECT_NE(status.message.find(c.says), std::string::npos) << status.message;
  }
}

TEST(PackedMap, LoadsSixteenNumbersIntoSixteenBytes) {
  for (const auto& [type, packed] : {std::pair(TensorType::u4_align16, 8u), std::pair(TensorType::u6_align16, 12u)}) {
    for (const Swizzle swizzle : {Swizzle::none, Swizzle::b128, Swizzle::b128_atom_32b}) {
      fill_memory();
      const BoxCopy copy = copy_of(type, swizzle, 128, 2);  // the second row lies beyond the tensor
      ASSERT_TRUE(check(copy, 2, true).ok());
      EXPECT_EQ(image_bytes(copy), 256u);
      EXPECT_EQ(transaction_bytes(copy), 16 * packed);
      load_box(copy, window);
      for (uint32_t at = 0; at < 256; ++at) {
        const uint32_t column = at % 128, chunk = column / 16, byte = column % 16;
        const bool inside = at < 128 && byte < packed;
        const std::byte expected = inside ? memory[2 * 224 + (8 + chunk) * packed + byte] : std::byte{0};
        EXPECT_EQ(window[swizzled(swizzle, at)], expected) << at;
      }
      std::vector<Range> global, shared;
      list_ranges(copy, true, &global, &shared);
      ASSERT_EQ(global.size(), 1u);
      EXPECT_EQ(global[0].bytes, 8 * packed);
    }
  }
}

TEST(PackedMap, StoresWithoutPadding) {
  fill_memory();
  const BoxCopy copy = copy_of(TensorType::u6_align16, Swizzle::b128, 0, 0);
  ASSERT_TRUE(check(copy, 2, false).ok());
  std::vector<std::byte> before(memory, memory + sizeof memory);
  load_box(copy, window);
  std::memset(memory, 0, sizeof memory);
  store_box(copy, window);
  for (size_t i = 0; i < 2 * 224; ++i) EXPECT_EQ(memory[i], i % 224 < 96 ? before[i] : std::byte{0}) << i;
}

TEST(PackedMap, FourBitsWithoutPaddingAreHalfBytes) {
  fill_memory();
  const BoxCopy copy = copy_of(TensorType::u4_align8, Swizzle::none, 32, 1);
  ASSERT_TRUE(check(copy, 2, true).ok());
  EXPECT_EQ(image_bytes(copy), 128u);
  EXPECT_EQ(transaction_bytes(copy), 128u);
  load_box(copy, window);
  for (size_t i = 0; i < 128; ++i) EXPECT_EQ(window[i], memory[(1 + i / 64) * 224 + 16 + i % 64]) << i;
}

TEST(PackedMap, CopiesThatHardwareDoesNotHaveAreFindings) {
  EXPECT_FALSE(check(copy_of(TensorType::u4_align16, Swizzle::none, 0, 0), 2, false).ok());
  EXPECT_FALSE(check(copy_of(TensorType::u4_align16, Swizzle::none, 64, 0), 2, true).ok());
  EXPECT_FALSE(check(copy_of(TensorType::u6_align16, Swizzle::b128_atom_64b, 0, 0), 2, true).ok());
  EXPECT_TRUE(check(copy_of(TensorType::u6_align16, Swizzle::b128_atom_64b, 0, 0), 2, false).ok());
}

}  // namespace
}  // namespace tandem::vgpu::units
