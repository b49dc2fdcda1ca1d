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
            "file: is 7 bytes long and must begin with 8 bytes of header length: write the file again");
  EXPECT_EQ(refusal(parse_safetensors, little_endian(uint64_t{3}) + "{}"),
            "file: header length 3 must be at most the 2 bytes that follow: write the file again");
  EXPECT_EQ(refusal(parse_safetensors, little_endian(~uint64_t{0}) + "{}"),
            "file: header length 18446744073709551615 must be at most 100000000: write the file again");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7),
            "file: tensor \"a\": data_offsets [0, 8] must be at most the 7 bytes of data: write the file again");
}

TEST(SafetensorsTest, RefusesBadJson) {
  EXPECT_EQ(refused(""), "file: header: must begin with '{': write the file again");
  EXPECT_EQ(refused(" {}"), "file: header: must begin with '{': write the file again");
  EXPECT_EQ(refused("[]"), "file: header: must begin with '{': write the file again");
  EXPECT_NE(refused("{").find("file: header: must be valid JSON, but has an error at byte 2: "), std::string::npos);
  EXPECT_NE(refused("{} x").find("file: header: must be valid JSON, but has an error at byte 4: "), std::string::npos);
  EXPECT_NE(refused("{\"\xff\":1}").find("file: header: must be valid JSON, but has an error at byte 3: "),
            std::string::npos);
}

TEST(SafetensorsTest, RefusesDuplicates) {
  const std::string a = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_EQ(refused("{" + a + "," + a + "}", 1),
            "file: header: the key \"a\" must be given once: rename one of the two");
  EXPECT_EQ(refused(R"({"__metadata__":{},"__metadata__":{}})"),
            "file: header: the key \"__metadata__\" must be given once: rename one of the two");
  EXPECT_EQ(refused(R"({"__metadata__":{"k":"1","k":"2"}})"),
            "file: __metadata__: \"k\" must be given once: remove one of the two");
  EXPECT_EQ(refused(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
            "file: tensor \"a\": \"dtype\" must be given once: remove one of the two");
}

TEST(SafetensorsTest, RefusesWrongStructure) {
  EXPECT_EQ(refused(R"({"a":1})"), "file: tensor \"a\": is the number 1 and must be an object: correct the header");
  EXPECT_EQ(refused(R"({"a":"text"})"),
            "file: tensor \"a\": is the text \"text\" and must be an object: correct the header");
  EXPECT_EQ(refused(R"({"a":[]})"), "file: tensor \"a\": is an array and must be an object: correct the header");
  EXPECT_EQ(refused(R"({"a":{"dtype":{}}})"),
            "file: tensor \"a\": \"dtype\" is an object and must be a text: correct the header");
  EXPECT_EQ(refused(R"({"a":{"dtype":["F32"]}})"),
            "file: tensor \"a\": \"dtype\" is an array and must be a text: correct the header");
  EXPECT_EQ(refused(R"({"a":{"shape":4}})"),
            "file: tensor \"a\": \"shape\" is the number 4 and must be an array of numbers: correct the header");
  EXPECT_EQ(refused(R"({"a":{"shape":null}})"),
            "file: tensor \"a\": \"shape\" is null and must be an array of numbers: correct the header");
  EXPECT_EQ(refused(R"({"a":{"color":"red"}})"),
            "file: tensor \"a\": \"color\" must be dtype, shape or data_offsets: remove this field");
  EXPECT_EQ(refused(R"({"__metadata__":{"k":1}})"),
            "file: __metadata__: \"k\" is the number 1, but metadata must be an object of texts: correct the header");
  EXPECT_EQ(refused(R"({"__metadata__":"text"})"),
            "file: __metadata__: is the text \"text\", but metadata must be an object of texts: correct the header");
  EXPECT_EQ(refused(R"({"__metadata__":{"k":{}}})"),
            "file: __metadata__: \"k\" is an object, but metadata must be an object of texts: correct the header");
  EXPECT_EQ(refused(R"({"a":{"shape":[2,[3]]}})"),
            "file: tensor \"a\": \"shape\" contains an array and must contain whole numbers of at least 0: correct the "
            "header");
}

TEST(SafetensorsTest, RefusesDeepNesting) {
  const std::string deep(1'000'000, '[');
  EXPECT_EQ(refused("{\"a\":" + deep), "file: tensor \"a\": is an array and must be an object: correct the header");
  EXPECT_EQ(refused("{\"a\":{\"shape\":" + deep),
            "file: tensor \"a\": \"shape\" contains an array and must contain whole numbers of at least 0: correct the "
            "header");
}

TEST(SafetensorsTest, RefusesMissingFields) {
  EXPECT_EQ(refused(R"({"a":{}})"), "file: tensor \"a\": has no \"dtype\": add the field");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32"}})"), "file: tensor \"a\": has no \"shape\": add the field");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[]}})"),
            "file: tensor \"a\": must have \"data_offsets\": add [begin, end]");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0]}})"),
            "file: tensor \"a\": must have \"data_offsets\": add [begin, end]");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4,4]}})", 4),
            "file: tensor \"a\": \"data_offsets\" has more than 2 numbers: correct the header");
}

TEST(SafetensorsTest, RefusesBadNumbers) {
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": \"shape\" contains the number -1 and must contain whole numbers of at least 0: "
            "correct the header");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": \"shape\" contains the number 1.5 and must contain whole numbers of at least 0: "
            "correct the header");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": \"shape\" contains a boolean and must contain whole numbers of at least 0: correct "
            "the header");
  EXPECT_EQ(
      refused(R"({"a":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]}})", 4),
      "file: tensor \"a\": \"shape\" the number 9223372036854775808 must be at most 2^63 - 1: correct the header");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": shape (4294967296, 4294967296) must fit into 2^63 - 1 bytes: correct the header");
  std::string ones = "1";
  for (size_t i = 0; i < max_dimensions; ++i) ones += ",1";
  EXPECT_EQ(refused(R"({"a":{"dtype":"U8","shape":[)" + ones + R"(],"data_offsets":[0,1]}})", 1),
            "file: tensor \"a\": \"shape\" has more than 64 numbers: correct the header");
}

TEST(SafetensorsTest, RefusesUnknownTypes) {
  EXPECT_EQ(refused(R"({"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": dtype \"F31\" must be one of BOOL, U8, I8, F8_E4M3, F8_E5M2, U16, I16, F16, BF16, "
            "U32, I32, F32, U64, I64, F64: convert the tensor");
}

TEST(SafetensorsTest, RefusesOffsetsThatDoNotFit) {
  EXPECT_EQ(refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1),
            "file: tensor \"a\": data_offsets [1, 0] must have a begin of at most the end: correct the header");
  EXPECT_EQ(refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4),
            "file: tensor \"a\": data_offsets [0, 4] hold 4 bytes but F32 (2,) needs 8: correct the header");
  EXPECT_EQ(
      refused(
          R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}})",
          5),
      "file: tensor \"b\": begins at byte 2 and overlaps the previous tensor, which ends at 3: write the tensors one "
      "after another");
  EXPECT_EQ(
      refused(
          R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}})",
          5),
      "file: tensor \"b\": begins at byte 4 and leaves a hole after the previous tensor, which ends at 3: write the "
      "tensors one after another");
  EXPECT_EQ(refused(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}})", 4),
            "file: tensor \"a\": begins at byte 1 and leaves a hole after the previous tensor, which ends at 0: write "
            "the tensors one after another");
  EXPECT_EQ(refused(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", 5),
            "file: 2 bytes after the last tensor belong to no tensor: remove these bytes");
}

TEST(SafetensorsTest, MessagesAreSafeToPrint) {
  EXPECT_EQ(refused("{\"\\u001b[31m" + std::string(100, 'n') + "\":1}"),
            "file: tensor \"\\x1b[31m" + std::string(55, 'n') +
                "...\": is the number 1 and must be an object: correct the header");
}

}  // namespace
}  // namespace tandem::io
