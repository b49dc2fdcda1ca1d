// Adversarial texts: sizes, depths, and a compiler's text damaged in many ways. The parser refuses or accepts each
// text, with time and memory in proportion.
#include <gtest/gtest.h>

#include <random>

#include "snippet.h"

namespace tandem::test {
namespace {

using namespace vgpu::ptx;

std::string repeated(std::string_view text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

std::string message_of(const std::string& text) {
  Module module;
  return parse(text, &module).message;
}

TEST(PtxHostile, Counts) {
  const std::pair<const char*, const char*> cases[] = {
      {".reg .b32 %r<4000000000>;", "registers (4000000000) must be 1 to 16777216"},
      {".reg .b32 %r<18446744073709551615>;", "registers (18446744073709551615) must be "},
      {".reg .b32 %r<-1>;", "registers (-1) must be "},
      {".reg .b32 %r<1.5>;", "registers (a fraction) must be "},
      {".shared .b8 a[99999999999];", "elements of an array (99999999999) must be "},
      {".shared .b64 a[4294967296];", "'a' must have at most 4 GiB"},
      {".shared .b8 a[4294967296][4294967296][4294967296];", "'a' must have at most 4 GiB"},
      {".shared .b8 a[1][1][1][1][1][1][1][1][1][1][1][1][1][1][1][1][1];", "must have at most 16 dimensions"},
      {".shared .align 4294967296 .b8 a;", "alignment (4294967296) must be "},
      {".loc 4294967296 1 1\n", "file of .loc (4294967296) must be "},
  };
  for (const auto& [body, says] : cases) {
    EXPECT_NE(message_of(in_kernel(body)).find(says), std::string::npos) << message_of(in_kernel(body));
  }
}

TEST(PtxHostile, FewBytesThatMeanManyAreRefused) {
  const std::string far = ".global .b8 a[2][1000000000] = {{1}, {2}};";
  EXPECT_NE(message_of(with_preamble(far)).find("initial values need far more memory than the text"),
            std::string::npos);

  // Every function has all variables of the module.
  std::string square;
  for (int i = 0; i < 20000; ++i) square += ".global .b8 v" + std::to_string(i) + ";";
  for (int i = 0; i < 20000; ++i) square += ".func f" + std::to_string(i) + "(){}";
  EXPECT_NE(message_of(with_preamble(square)).find("variables and functions need far more memory"), std::string::npos);

  // Every branch has all labels of its list.
  const std::string list = ".reg .b32 r; T: .branchtargets L" + repeated(", L", 20000) + "; L: ";
  EXPECT_NE(
      message_of(in_kernel(list + repeated("brx.idx r, T;", 20000))).find("lists of targets need far more memory"),
      std::string::npos);
}

TEST(PtxHostile, Depths) {
  EXPECT_NE(message_of(in_kernel(repeated("{", 100000))).find("blocks must be nested at most 64 deep"),
            std::string::npos);
  const std::string deep = ".reg .b32 r; mov.b32 r, ";
  EXPECT_NE(message_of(in_kernel(deep + repeated("[", 100000))).find("nested less deeply"), std::string::npos);
  EXPECT_NE(message_of(in_kernel(deep + repeated("{", 100000))).find("nested less deeply"), std::string::npos);
  EXPECT_NE(message_of(in_kernel(deep + repeated("(", 100000))).find("nested less deeply"), std::string::npos);
  EXPECT_NE(message_of(in_kernel(deep + repeated("-", 100000) + "1;")).find("nested less deeply"), std::string::npos);
  EXPECT_NE(message_of(in_kernel(deep + repeated("1?1:", 100000) + "1;")).find("nested less deeply"),
            std::string::npos);
  EXPECT_NE(message_of(in_kernel(deep + repeated("!", 100000) + "r;")).find("'!'"), std::string::npos);
  EXPECT_EQ(parsed_body(repeated("{", 60) + "ret;" + repeated("}", 60)).instructions.size(), 1u);
}

TEST(PtxHostile, LongThingsAreReadInTheirLength) {
  const std::string name(300000, 'n');
  EXPECT_EQ(parsed_body(".reg .b32 " + name + "; mov.b32 " + name + ", 1;").registers.at(0).name, name);
  EXPECT_LT(message_of(in_kernel(name + ".b32 x;")).size(), 500u);
  EXPECT_EQ(
      parsed_body(".reg .b32 r; mov.b32 r, " + repeated("1+", 100000) + "1;").instructions.at(0).operands.at(1).bits,
      100001u);
  // Names with many digits, of many families.
  std::string families;
  for (int i = 0; i < 20000; ++i) families += ".reg .b32 a" + std::to_string(i) + "x<9>;";
  EXPECT_EQ(parsed_body(families + repeated("mov.b32 a12345x1, a999x8;", 20000)).instructions.size(), 20000u);
  EXPECT_NE(message_of(in_kernel(".reg .b32 %r<9>; mov.b32 %r1, %r" + std::string(100000, '1') + ";"))
                .find("must be declared"),
            std::string::npos);
}

TEST(PtxHostile, PrefixesOfACompilersText) {
  const std::string text = sample_ptx();
  Module module;
  const size_t last = text.find_last_of('}') + 1;
  for (size_t size = 0; size < text.size(); size += size < 8000 ? 1 : 13) {
    const Status status = parse(std::string_view(text).substr(0, size), &module);
    if (status.ok()) continue;
    ASSERT_TRUE(status.message.starts_with("PTX line ")) << size << ": " << status.message;
  }
  EXPECT_TRUE(parse(std::string_view(text).substr(0, last), &module).ok());
}

// Applies random damage: bytes are changed; pieces are deleted, repeated or moved.
TEST(PtxHostile, DamagedText) {
  const std::string whole = sample_ptx();
  std::mt19937 random(20251);
  const auto below = [&](size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); };
  int refused = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string text = whole;
    for (size_t i = 0, n = 1 + below(4); i < n; ++i) {
      const size_t at = below(text.size()), length = 1 + below(std::min<size_t>(40, text.size() - at));
      switch (below(5)) {
        case 0: text[at] = static_cast<char>(below(256)); break;
        case 1: text[at] = text[below(text.size())]; break;
        case 2: text.erase(at, length); break;
        case 3: text.insert(below(text.size()), text.substr(at, length)); break;
        default: text.insert(at, repeated(text.substr(at, 1), 1 + static_cast<int>(below(70))));
      }
    }
    Module module;
    const Status status = parse(text, &module);
    if (status.ok()) continue;
    ++refused;
    ASSERT_TRUE(status.message.starts_with("PTX line ")) << status.message;
    ASSERT_LT(status.message.size(), 600u);
  }
  EXPECT_GT(refused, 500);
  EXPECT_LT(refused, 2000);  // some damage is to comments
}

}  // namespace
}  // namespace tandem::test
