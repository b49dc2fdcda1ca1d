#include "cli/io/npy.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "cli/io/file.h"
#include "cli/refusal.h"

namespace tandem::io {
namespace {

std::string file_of(const std::string& header, size_t data_bytes = 0, char version = 1) {
  const std::string length = version == 1 ? little_endian(static_cast<uint16_t>(header.size()))
                                          : little_endian(static_cast<uint32_t>(header.size()));
  return "\x93NUMPY"s + version + '\0' + length + header + std::string(data_bytes, 'x');
}

std::string refused(const std::string& header, size_t data_bytes = 0) {
  return refusal(parse_npy, file_of(header, data_bytes));
}

const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n";

TEST(NpyTest, ReadsEveryVersion) {
  for (const char version : {1, 2, 3}) {
    const std::string text = file_of(good, 24, version);
    const FileTensor tensor = parse_npy(bytes_of(text), "file");
    EXPECT_EQ(tensor.element, Element::f32);
    EXPECT_EQ(tensor.shape, (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(tensor.data.size(), 24u);
  }
}

TEST(NpyTest, ReadsShapesAndKeysInAnyForm) {
  const auto shape = [](const std::string& header, size_t bytes) {
    const std::string text = file_of(header, bytes);
    return parse_npy(bytes_of(text), "file").shape;
  };
  EXPECT_EQ(shape("{'shape':(),\"descr\":'|b1','fortran_order':False}", 1), std::vector<int64_t>{});
  EXPECT_EQ(shape("{'shape':(5,),'descr':'|u1','fortran_order':True}", 5), std::vector<int64_t>{5});
  EXPECT_EQ(shape("{'shape':(0,7),'descr':'<i8','fortran_order':False}", 0), (std::vector<int64_t>{0, 7}));
  EXPECT_EQ(shape("{'shape':(1,2),'descr':'<V2','fortran_order':False}", 4), (std::vector<int64_t>{1, 2}));
}

TEST(NpyTest, WritesWhatItReads) {
  const std::string path = (std::filesystem::temp_directory_path() / ("npy-" + std::to_string(getpid()))).string();
  const uint16_t values[] = {1, 2, 3, 4, 5, 6};
  for (const auto& shape : {std::vector<int64_t>{2, 3}, {6}, {1, 1, 6}}) {
    for (const auto& [wrote, expected] : {std::pair{Element::f16, Element::f16}, {Element::bf16, Element::raw16}}) {
      write_npy(path, {"", wrote, shape, std::as_bytes(std::span(values))});
      const MappedFile mapped(path);
      const FileTensor read = parse_npy(mapped.bytes(), path);
      EXPECT_EQ(read.element, expected);
      EXPECT_EQ(read.shape, shape);
      ASSERT_EQ(read.data.size(), sizeof values);
      EXPECT_EQ(std::memcmp(read.data.data(), values, sizeof values), 0);
      EXPECT_EQ((read.data.data() - mapped.bytes().data()) % 64, 0);
    }
  }
  const uint8_t byte[] = {1};
  EXPECT_THROW(write_npy(path, {"", Element::f8_e4m3, {1}, std::as_bytes(std::span(byte))}), InputError);
  std::filesystem::remove(path);
}

TEST(NpyTest, RefusesTruncatedFiles) {
  EXPECT_EQ(refusal(parse_npy, "\x93NUMP"), "file: must begin as a .npy file (\\x93NUMPY): pass a .npy file");
  EXPECT_EQ(refusal(parse_npy, "\x93NUMPY\x01\0\x00"s),
            "file: must not be truncated within the first 10 bytes: write the file again");
  EXPECT_EQ(refusal(parse_npy, "\x93NUMPY\x02\0\x00\x00\x00"s),
            "file: must not be truncated within the first 12 bytes: write the file again");
  EXPECT_EQ(refusal(parse_npy, "\x93NUMPY\x01\0\x05\x00{}"s),
            "file: header length 5 must be at most the 2 bytes that follow: write the file again");
  EXPECT_EQ(refusal(parse_npy, "\x93NUMPY\x02\0\xff\xff\xff\xff{}"s),
            "file: header length 4294967295 must be at most 65536: save one array per file");
  EXPECT_EQ(refused(good, 23), "file: holds 23 bytes of data but <f4 (2, 3) needs 24: write the file again");
  EXPECT_EQ(refused(good, 25), "file: holds 25 bytes of data but <f4 (2, 3) needs 24: save one array per file");
}

TEST(NpyTest, RefusesUnknownVersions) {
  EXPECT_EQ(refusal(parse_npy, "\x93NUMPY\x04\0\0\0\0\0"s),
            "file: version 4.0 must be 1.0, 2.0 or 3.0: save the array with numpy.save");
  EXPECT_EQ(refusal(parse_npy, "\x93NUMPY\x01\x01\0\0\0\0"s),
            "file: version 1.1 must be 1.0, 2.0 or 3.0: save the array with numpy.save");
}

TEST(NpyTest, RefusesHeadersThatAreNoDictionary) {
  const auto at = [](const std::string& rest) { return "file: header: must be a dictionary of numpy: write " + rest; };
  EXPECT_EQ(refused(""), at("'{' at byte 0, not the end"));
  EXPECT_EQ(refused("x"), at("'{' at byte 0, not \"x\""));
  EXPECT_EQ(refused("{descr"), at("a key in quotes at byte 1, not \"d\""));
  EXPECT_EQ(refused("{'descr"), at("a closing quote at byte 2, not \"d\""));
  EXPECT_EQ(refused("{'descr' 1"), at("':' at byte 9, not \"1\""));
  EXPECT_EQ(refused("{'descr': 1"), at("a type in quotes at byte 10, not \"1\""));
  EXPECT_EQ(refused("{'descr': '<f4' 'shape'"), at("',' at byte 16, not \"'\""));
  EXPECT_EQ(refused("{'fortran_order': 0"), at("True or False at byte 18, not \"0\""));
  EXPECT_EQ(refused("{'shape': 3"), at("'(' at byte 10, not \"3\""));
  EXPECT_EQ(refused("{'shape': (2 3)"), at("',' or ')' at byte 13, not \"3\""));
  EXPECT_EQ(refused("{'shape': (,)"), at("a number at byte 11, not \",\""));
  EXPECT_EQ(refused(good + "x"), at("the end of the header at byte 63, not \"x\""));
}

TEST(NpyTest, RefusesWrongKeys) {
  EXPECT_EQ(refused("{}"), "file: header: has no 'descr': save the array with numpy.save");
  EXPECT_EQ(refused("{'descr': '<f4'}"), "file: header: has no 'fortran_order': save the array with numpy.save");
  EXPECT_EQ(refused("{'descr': '<f4', 'fortran_order': False}"),
            "file: header: has no 'shape': save the array with numpy.save");
  EXPECT_EQ(refused("{'descr': '<f4', 'descr': '<f4'}"),
            "file: header: 'descr' must be given once: save the array with numpy.save");
  EXPECT_EQ(refused("{'shape': (), 'shape': ()}"),
            "file: header: 'shape' must be given once: save the array with numpy.save");
  EXPECT_EQ(refused("{'fortran_order': True, 'fortran_order': False}"),
            "file: header: 'fortran_order' must be given once: save the array with numpy.save");
  EXPECT_EQ(refused("{'colour': 1}"),
            "file: header: \"colour\" must be descr, fortran_order or shape: save the array with numpy.save");
}

TEST(NpyTest, RefusesTypesAndOrders) {
  const auto with = [](const std::string& descr, const std::string& order = "False") {
    return refused("{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': (2, 3)}", 24);
  };
  EXPECT_EQ(with("'>f4'"),
            "file: header: 'descr' \">f4\" must be little-endian: convert the array with .astype('<f4')");
  EXPECT_EQ(
      with("'|O'"),
      "file: header: 'descr' \"|O\" must be a boolean, an integer, <f2, <f4, <f8 or <V2 (bfloat16): convert the array");
  EXPECT_EQ(with("[('a', '<f4')]"),
            "file: header: 'descr' must be one type, not a list of fields: save one field as an array");
  EXPECT_EQ(with("'<f4'", "True"),
            "file: header: 'fortran_order' must be False: save the array with numpy.ascontiguousarray");
}

TEST(NpyTest, RefusesBadShapes) {
  const auto with = [](const std::string& shape) {
    return refused("{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + "}", 4);
  };
  EXPECT_EQ(with("(-1,)"), "file: header: 'shape' must have no negative number: correct the header");
  EXPECT_EQ(with("(9223372036854775808,)"),
            "file: header: 'shape' must have no number above 2^63 - 1: correct the header");
  EXPECT_EQ(with("(4294967296, 4294967296)"),
            "file: header: 'shape' (4294967296, 4294967296) must fit into 2^63 - 1 bytes: correct the header");
  EXPECT_EQ(with("(1)"), "file: header: 'shape' must be a tuple, not a number in brackets: write (n,)");
  std::string many = "(";
  for (size_t i = 0; i <= max_dimensions; ++i) many += "1,";
  EXPECT_EQ(with(many + ")"), "file: header: 'shape' must have at most 64 dimensions: reshape the array");
}

}  // namespace
}  // namespace tandem::io
