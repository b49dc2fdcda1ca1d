// Valid launch descriptions are read, and malformed descriptions are refused with a sentence.
#include "cli/vgpu/launch.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "cli/vgpu/element.h"
#include "unit/jit/temporary.h"

namespace tandem::tool {
namespace {

class LaunchTest : public testing::Test {
 protected:
  LaunchFile read(const std::string& json) {
    std::ofstream(path()) << json;
    return read_launch(path());
  }
  std::string refusal(const std::string& json) {
    try {
      read(json);
    } catch (const io::InputError& error) {
      const std::string text = error.what();
      return text.starts_with(path() + ": ") ? text.substr(path().size() + 2) : text;
    }
    return "accepted";
  }
  std::string path() const { return folder.path() + "/launch.json"; }

  test::TemporaryFolder folder;
};

TEST_F(LaunchTest, ReadsEverything) {
  const LaunchFile file = read(R"({
    // a comment
    "entry": "kernel", "grid": [4, 2], "block": [128], "cluster": [2, 1, 1], "dynamic_shared_bytes": 4096,
    "buffers": [
      {"name": "q", "type": "bf16", "shape": [16, 64], "fill": "normal", "seed": 7, "scale": 0.5, "read_only": true},
      {"name": "out", "type": "f32", "bytes": 400, "expected": "out.npy", "tolerance": 0.25}
    ],
    "parameters": [
      {"i32": -2}, {"u64": "0xffffffffffffffff"}, {"f32": 0.5}, {"pointer": "out", "offset": 16}, {"hex": "00 ff_0A"},
      {"tensor_map": {"buffer": "q", "offset": 128, "dims": [64, 16], "byte_strides": [128], "box": [64, 8],
                      "swizzle": "128B", "out_of_bounds": "nan"}},
      {"at": 256, "i8": -1}, {"i32": [5, "0x10"]}, {"struct": [{"u8": 1}, {"pointer": "q", "offset": -64}, {"at": 40, "i16": -3}]}
    ]
  })");
  EXPECT_EQ(file.entry, "kernel");
  EXPECT_EQ(file.grid.x, 4u);
  EXPECT_EQ(file.grid.y, 2u);
  EXPECT_EQ(file.grid.z, 1u);
  EXPECT_EQ(file.block.x, 128u);
  EXPECT_EQ(file.cluster.x, 2u);
  EXPECT_EQ(file.dynamic_shared_bytes, 4096u);
  ASSERT_EQ(file.buffers.size(), 2u);
  EXPECT_EQ(file.buffers[0].bytes, 2048u);
  EXPECT_EQ(file.buffers[0].fill, LaunchBuffer::Fill::normal);
  EXPECT_EQ(file.buffers[0].seed, 7u);
  EXPECT_EQ(file.buffers[0].scale, 0.5);
  EXPECT_TRUE(file.buffers[0].read_only);
  EXPECT_EQ(file.buffers[1].shape, std::vector<int64_t>{100});
  EXPECT_EQ(file.buffers[1].tolerance, 0.25);
  EXPECT_EQ(file.beside(file.buffers[1].expected), folder.path() + "/out.npy");

  const auto value = [&](size_t n, auto type) {
    decltype(type) bits{};
    EXPECT_EQ(file.parameters[n].bytes.size(), sizeof bits);
    std::memcpy(&bits, file.parameters[n].bytes.data(), sizeof bits);
    return bits;
  };
  ASSERT_EQ(file.parameters.size(), 9u);
  EXPECT_EQ(value(0, int32_t{}), -2);
  EXPECT_EQ(value(1, uint64_t{}), UINT64_MAX);
  EXPECT_EQ(value(2, float{}), 0.5f);
  EXPECT_EQ(file.parameters[3].buffer, 1);
  EXPECT_EQ(file.parameters[3].offset, 16);
  EXPECT_EQ(file.parameters[4].bytes, (std::vector{std::byte{0}, std::byte{0xff}, std::byte{0x0a}}));
  ASSERT_TRUE(file.parameters[5].map);
  const gpu::TensorMapSpec& map = *file.parameters[5].map;
  EXPECT_EQ(file.parameters[5].offset, 128);
  EXPECT_EQ(map.type, gpu::TensorType::bf16) << "the buffer's";
  EXPECT_EQ(map.rank, 2);
  EXPECT_EQ(map.dims[1], 16u);
  EXPECT_EQ(map.byte_strides[1], 128u);
  EXPECT_EQ(map.box[1], 8u);
  EXPECT_EQ(map.element_strides[1], 1u);
  EXPECT_EQ(map.swizzle, gpu::Swizzle::b128);
  EXPECT_EQ(map.oob_fill, gpu::OobFill::nan);
  EXPECT_EQ(file.parameters[6].at, 256u);
  EXPECT_EQ(value(6, int8_t{}), -1);
  EXPECT_EQ(value(7, uint64_t{}), (uint64_t{16} << 32) + 5) << "two in a row";
  const std::vector<LaunchParameter>& parts = file.parameters[8].parts;
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts[1].alignment, 8u);
  EXPECT_EQ(parts[1].buffer, 0);
  EXPECT_EQ(parts[1].offset, -64);
  EXPECT_EQ(parts[2].at, 40u);
  EXPECT_EQ(parts[2].alignment, 2u);
}

TEST_F(LaunchTest, RefusesWithTheField) {
  const std::string begin = R"({"grid": [1], "block": [32], )";
  const auto buffer = [&](const std::string& fields) { return begin + "\"buffers\": [{" + fields + "}]}"; };
  const auto parameter = [&](const std::string& fields) {
    return begin + R"("buffers": [{"name": "a", "bytes": 64}], "parameters": [{)" + fields + "}]}";
  };
  const struct {
    std::string json, sentence;
  } refused[] = {
      {"{", "must be JSON"},
      {"[]", "must be an object"},
      {"{}", "grid must be given"},
      {R"({"grid": [1], "block": [0]})", "block must be one to three numbers from 1 on"},
      {R"({"grid": [1, 1, 1, 1], "block": [1]})", "grid must be one to three"},
      {R"({"grid": "1", "block": [1]})", "grid (\"1\") must have another type"},
      {begin + R"("gird": 1})", "gird must be a known field"},
      {begin + R"("buffers": {}})", "buffers must be a list"},
      {buffer(R"("bytes": 4)"), "buffers[0].name must be given"},
      {buffer(R"("name": "a")"), "buffers[0].bytes or shape must be given: add the size"},
      {buffer(R"("name": "a", "type": "f32", "bytes": 6)"), "buffers[0].bytes must be whole elements"},
      {buffer(R"("name": "a", "type": "float", "bytes": 6)"), "type (\"float\") must be one of u8, i8,"},
      {buffer(R"("name": "a", "bytes": 6, "fill": "ones")"), "fill (\"ones\") must be one of none, zeros"},
      {buffer(R"("name": "a", "bytes": 6, "fill": "zeros", "file": "a.npy")"), "remove one of the two"},
      {buffer(R"("name": "a", "shape": [4, -1])"), "shape (4, -1) must have a size"},
      {buffer(R"("name": "a", "shape": [4611686018427387904, 4])"), "must have a size"},
      {parameter(""), "parameters[0] must have a value"},
      {parameter(R"("i32": 1, "u8": 2)"), "parameters[0] must have one value"},
      {parameter(R"("i32": 1, "at": 32765)"), "at (32765) must be at most 32764"},
      {parameter(R"("struct": [])"), "struct must be a list: write the parts"},
      {parameter(R"("struct": [{"i32": 1}, {"pointer": "b"}])"), "parameters[0].struct[1].pointer (\"b\") must name"},
      {parameter(R"("f32": "1")"), "f32 (\"1\") must be a number"},
      {parameter(R"("i32": 1.5)"), "i32 (1.5) must be a whole number"},
      {parameter(R"("i32": "12x")"), "i32 (\"12x\") must be a whole number"},
      {parameter(R"("hex": "0")"), "hex must be two hexadecimal digits"},
      {parameter(R"("hex": "0g")"), "hex must be two hexadecimal digits"},
      {parameter(R"("pointer": "b")"), "pointer (\"b\") must name one of the buffers"},
      {parameter(R"("pointer": "a", "add": 4)"), "parameters[0].add must be a known field"},
      {parameter(R"("tensor_map": {"buffer": "a", "dims": [], "box": []})"), "dims must be one to five"},
      {parameter(R"("tensor_map": {"buffer": "a", "dims": [1, 1], "box": [1, 1]})"), "byte_strides must have one"},
      {parameter(R"("tensor_map": {"buffer": "a", "dims": [1], "box": [1, 1]})"), "box must have one size"},
      {parameter(R"("tensor_map": {"buffer": "a", "dims": [1], "box": [1], "swizzle": "128"})"),
       "parameters[0].tensor_map.swizzle (\"128\") must be one of none, 32B"},
  };
  for (const auto& [json, sentence] : refused)
    EXPECT_NE(refusal(json).find(sentence), std::string::npos) << json << "\n  " << refusal(json);
  EXPECT_NE(refusal(buffer(R"("name": "a", "file": "absent.npy")")).find("absent.npy"), std::string::npos);
}

TEST(Elements, AreReadBackAsTheyWereWritten) {
  using io::Element;
  for (const Element type :
       {Element::u8, Element::i8, Element::f8_e4m3, Element::f8_e5m2, Element::u16, Element::i16, Element::f16,
        Element::bf16, Element::u32, Element::i32, Element::f32, Element::u64, Element::i64, Element::f64}) {
    std::byte bytes[8] = {};
    for (const double value : {0.0, 1.0, 3.0, 40.0, 96.0}) {
      set_element(type, bytes, value);
      EXPECT_EQ(get_element(type, bytes), value) << io::name_of(type);
    }
    for (size_t i = static_cast<size_t>(io::size_of(type)); i < 8; ++i) EXPECT_EQ(bytes[i], std::byte{0});
  }
  std::byte bytes[8] = {};
  set_element(Element::i16, bytes, -5);
  EXPECT_EQ(get_element(Element::i16, bytes), -5);
  set_element(Element::bf16, bytes, 0.1);
  EXPECT_EQ(get_element(Element::bf16, bytes), 0.10009765625);
}

}  // namespace
}  // namespace tandem::tool
