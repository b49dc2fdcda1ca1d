#include "cli/io/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "cli/io/file.h"
#include "cli/refusal.h"

namespace tandem::io {
namespace {

std::string file_of(const std::string& header, size_t data_bytes = 0) {
  return little_endian(uint64_t{header.size()}) + header + std::string(data_bytes, 'x');
}

std::string refused(const std::string& header, size_t data_bytes = 0) {
  return refusal(parse_safetensors, file_of(header, data_bytes));
}

TEST(SafetensorsTest, ReadsTensorsAndMetadata) {
  const std::string text = file_of(
      R"({"b":{"dtype":"F16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"who":"me"},)"
      R"("a":{"shape":[],"data_offsets":[0,4],"dtype":"F32"},"none":{"dtype":"I8","shape":[0,9],"data_offsets":[16,16]}}  )",
      16);
  const Safetensors file = parse_safetensors(bytes_of(text), "file");
  ASSERT_EQ(file.tensors.size(), 3u);
  EXPECT_EQ(file.tensors[0].name, "a");
  EXPECT_EQ(file.tensors[1].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(file.tensors[1].element, Element::f16);
  EXPECT_EQ(file.tensors[1].data.size(), 12u);
  EXPECT_EQ(file.find("none")->data.size(), 0u);
  EXPECT_EQ(file.find("absent"), nullptr);
  EXPECT_EQ(file.metadata.at("who"), "me");
}

TEST(SafetensorsTest, WritesWhatItReads) {
  const std::string path = (std::filesystem::temp_directory_path() / ("st-" + std::to_string(getpid()))).string();
  const float a[] = {1, 2, 3, 4, 5, 6};
  const uint8_t b[] = {7};
  const FileTensor tensors[] = {{"a \"quoted\"", Element::f32, {2, 3}, std::as_bytes(std::span(a))},
                                {"b", Element::u8, {}, std::as_bytes(std::span(b))},
                                {"empty", Element::bf16, {0, 4}, {}}};
  write_safetensors(path, tensors, {{"key", "value"}});
  const MappedFile mapped(path);
  const Safetensors read = parse_safetensors(mapped.bytes(), path);
  ASSERT_EQ(read.tensors.size(), 3u);
  for (const FileTensor& wrote : tensors) {
    const FileTensor* got = read.find(wrote.name);
    ASSERT_NE(got, nullptr);
    EXPECT_EQ(got->element, wrote.element);
    EXPECT_EQ(got->shape, wrote.shape);
    EXPECT_TRUE(std::equal(got->data.begin(), got->data.end(), wrote.data.begin(), wrote.data.end()));
  }
  EXPECT_EQ(read.metadata.at("key"), "value");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(read.tensors[0].data.data()) % 8, 0u);
  std::filesystem::remove(path);
}

TEST(SafetensorsTest, RefusesTruncatedFiles) {
  EXPECT_EQ(refusal(parse_safetensors, "1234567"),
            "file: is 7 bytes long; a .safetensors file begins with 8 bytes of header length");
  EXPECT_EQ(refusal(parse_safetensors, little_endian(uint64_t{3}) + "{}"),
            "file: header length 3 is more than the 2 bytes that follow it; the file may be truncated");
  EXPECT_EQ(refusal(parse_safetensors, little_endian(~uint64_t{0}) + "{}"),
            "file: header length 18446744073709551615 is above the limit of 100000000");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7),
            "file: tensor \"a\": data_offsets [0, 8] reach beyond the 7 bytes of data; the file may be truncated");
}

TEST(SafetensorsTest, RefusesBadJson) {
  EXPECT_EQ(refused(""), "file: header: must begin with '{'");
  EXPECT_EQ(refused(" {}"), "file: header: must begin with '{'");
  EXPECT_EQ(refused("[]"), "file: header: must begin with '{'");
  EXPECT_NE(refused("{").find("file: header: is not valid JSON at byte 2: "), std::string::npos);
  EXPECT_NE(refused("{} x").find("file: header: is not valid JSON at byte 4: "), std::string::npos);
  EXPECT_NE(refused("{\"\xff\":1}").find("file: header: is not valid JSON at byte 3: "), std::string::npos);
}

TEST(SafetensorsTest, RefusesDuplicates) {
  const std::string a = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_EQ(refused("{" + a + "," + a + "}", 1), "file: header: the key \"a\" appears twice; names must be unique");
  EXPECT_EQ(refused(R"({"__metadata__":{},"__metadata__":{}})"),
            "file: header: the key \"__metadata__\" appears twice; names must be unique");
  EXPECT_EQ(refused(R"({"__metadata__":{"k":"1","k":"2"}})"), "file: __metadata__: \"k\" appears twice");
  EXPECT_EQ(refused(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
            "file: tensor \"a\": \"dtype\" appears twice");
}

TEST(SafetensorsTest, RefusesWrongStructure) {
  EXPECT_EQ(refused(R"({"a":1})"), "file: tensor \"a\": is the number 1 where an object must be");
  EXPECT_EQ(refused(R"({"a":"text"})"), "file: tensor \"a\": is the text \"text\" where an object must be");
  EXPECT_EQ(refused(R"({"a":[]})"), "file: tensor \"a\": is an array where an object must be");
  EXPECT_EQ(refused(R"({"a":{"dtype":{}}})"), "file: tensor \"a\": \"dtype\" is an object where a text must be");
  EXPECT_EQ(refused(R"({"a":{"dtype":["F32"]}})"), "file: tensor \"a\": \"dtype\" is an array where a text must be");
  EXPECT_EQ(refused(R"({"a":{"shape":4}})"),
            "file: tensor \"a\": \"shape\" is the number 4 where an array of numbers must be");
  EXPECT_EQ(refused(R"({"a":{"shape":null}})"),
            "file: tensor \"a\": \"shape\" is null where an array of numbers must be");
  EXPECT_EQ(refused(R"({"a":{"color":"red"}})"),
            "file: tensor \"a\": \"color\" is not a field of a tensor; the fields are dtype, shape and data_offsets");
  EXPECT_EQ(refused(R"({"__metadata__":{"k":1}})"),
            "file: __metadata__: \"k\" is the number 1; metadata is an object of texts");
  EXPECT_EQ(refused(R"({"__metadata__":"text"})"),
            "file: __metadata__: is the text \"text\"; metadata is an object of texts");
  EXPECT_EQ(refused(R"({"__metadata__":{"k":{}}})"),
            "file: __metadata__: \"k\" is an object; metadata is an object of texts");
  EXPECT_EQ(refused(R"({"a":{"shape":[2,[3]]}})"),
            "file: tensor \"a\": \"shape\" contains an array; its numbers must be whole and not negative");
}

TEST(SafetensorsTest, RefusesDeepNesting) {
  const std::string deep(1'000'000, '[');
  EXPECT_EQ(refused("{\"a\":" + deep), "file: tensor \"a\": is an array where an object must be");
  EXPECT_EQ(refused("{\"a\":{\"shape\":" + deep),
            "file: tensor \"a\": \"shape\" contains an array; its numbers must be whole and not negative");
}

TEST(SafetensorsTest, RefusesMissingFields) {
  EXPECT_EQ(refused(R"({"a":{}})"), "file: tensor \"a\": has no \"dtype\"");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32"}})"), "file: tensor \"a\": has no \"shape\"");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[]}})"), "file: tensor \"a\": needs \"data_offsets\": [begin, end]");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0]}})"),
            "file: tensor \"a\": needs \"data_offsets\": [begin, end]");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4,4]}})", 4),
            "file: tensor \"a\": \"data_offsets\" has more than 2 numbers");
}

TEST(SafetensorsTest, RefusesBadNumbers) {
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": \"shape\" contains the number -1; its numbers must be whole and not negative");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": \"shape\" contains the number 1.5; its numbers must be whole and not negative");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": \"shape\" contains a boolean; its numbers must be whole and not negative");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": \"shape\" the number 9223372036854775808 is above 2^63 - 1");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": shape (4294967296, 4294967296) overflows; its bytes must fit into 63 bits");
  std::string ones = "1";
  for (size_t i = 0; i < max_dimensions; ++i) ones += ",1";
  EXPECT_EQ(refused(R"({"a":{"dtype":"U8","shape":[)" + ones + R"(],"data_offsets":[0,1]}})", 1),
            "file: tensor \"a\": \"shape\" has more than 64 numbers");
}

TEST(SafetensorsTest, RefusesUnknownTypes) {
  EXPECT_EQ(
      refused(R"({"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}})", 4),
      "file: tensor \"a\": dtype \"F31\" is not known; known are BOOL, U8, I8, F8_E4M3, F8_E5M2, U16, I16, F16, BF16, "
      "U32, I32, F32, U64, I64, F64");
}

TEST(SafetensorsTest, RefusesOffsetsThatDoNotFit) {
  EXPECT_EQ(refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1),
            "file: tensor \"a\": data_offsets [1, 0] end before they begin");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": data_offsets [0, 4] hold 4 bytes but F32 (2,) needs 8");
  EXPECT_EQ(
      refused(
          R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}})",
          5),
      "file: tensor \"b\": begins at byte 2 and overlaps the tensor before it, which ends at 3; tensors must follow "
      "one another");
  EXPECT_EQ(
      refused(
          R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}})",
          5),
      "file: tensor \"b\": begins at byte 4 and leaves a hole before it, which ends at 3; tensors must follow one "
      "another");
  EXPECT_EQ(
      refused(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}})", 4),
      "file: tensor \"a\": begins at byte 1 and leaves a hole before it, which ends at 0; tensors must follow one "
      "another");
  EXPECT_EQ(refused(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", 5),
            "file: 2 bytes after the last tensor belong to none; every byte must belong to a tensor");
}

TEST(SafetensorsTest, MessagesAreSafeToPrint) {
  EXPECT_EQ(refused("{\"\\u001b[31m" + std::string(100, 'n') + "\":1}"),
            "file: tensor \"\\x1b[31m" + std::string(55, 'n') + "...\": is the number 1 where an object must be");
}

}  // namespace
}  // namespace tandem::io
