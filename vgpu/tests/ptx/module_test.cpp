// Tests of modules: declarations outside of functions, and the begin of functions.
#include <gtest/gtest.h>

#include <cstring>

#include "snippet.h"

namespace tandem::test {
namespace {

using namespace std::literals;

using namespace vgpu::ptx;

TEST(PtxModule, Preamble) {
  const Module module = parsed("// made by\n.version 8.7\n.target sm_100a, debug\n.address_size 64\n");
  EXPECT_EQ(module.version_major, 8);
  EXPECT_EQ(module.version_minor, 7);
  EXPECT_EQ(module.target, "sm_100a");
  EXPECT_EQ(parsed(".version 9.10 .target sm_90").version_minor, 10);
}

TEST(PtxModule, TextMayEndWithItsTerminator) {
  EXPECT_TRUE(parsed(".version 9.0 .target sm_90a .entry f() { ret; }\n\0\0"sv).find("f"));
}

TEST(PtxModule, DebugInformationAndHintsAreLeftOut) {
  const Module module = parsed(
      with_preamble("@@DWARF .byte 0x10, 1\n# 1 \"a.cu\"\n.pragma \"nounroll\", \"x\";\n"
                    ".section .debug_abbrev\n{\n.b8 17,1 // }\n.b64 a_label+4\n$L__info_string0:\n.b8 95,90,0\n}\n"
                    ".entry f() .pragma \"abi\"; { .pragma \"nounroll\"; ret; }\n .section .debug_loc { }\n"));
  ASSERT_EQ(module.functions.size(), 1u);
  EXPECT_EQ(module.functions[0].instructions.size(), 1u);
}

TEST(PtxModule, Variables) {
  const Module module = parsed(with_preamble(
      ".extern .shared .align 1024 .b8 dynamic[];\n.visible .global .align 16 .v4 .f32 vectors[3];\n"
      ".weak .const .u16 numbers[2][3] = {{1, 2}, {0xFFFF, -1}};\n.global .f32 a = 1.5, b = 0f3F800000, c;\n"
      ".global .f64 d[] = {1.0, 0f40000000};\n.shared .b64 bar;\n.visible .global .attribute(.managed) .s32 m = -2;\n"
      ".common .global .b128 wide;\n"));
  ASSERT_EQ(module.variables.size(), 10u);
  const auto named = [&](std::string_view name) {
    for (const Symbol& v : module.variables) {
      if (v.name == name) return v;
    }
    ADD_FAILURE() << name;
    return Symbol();
  };
  const Symbol dynamic = named("dynamic");
  EXPECT_TRUE(dynamic.is_extern);
  EXPECT_EQ(dynamic.elements, 0);
  EXPECT_EQ(dynamic.bytes(), 0);
  EXPECT_EQ(dynamic.alignment, 1024);
  EXPECT_EQ(dynamic.space, Space::shared);
  const Symbol vectors = named("vectors");
  EXPECT_EQ(vectors.elements, 12);
  EXPECT_EQ(vectors.bytes(), 48);
  EXPECT_EQ(vectors.alignment, 16);
  EXPECT_TRUE(vectors.initial.empty());
  EXPECT_FALSE(vectors.is_extern);
  const Symbol numbers = named("numbers");
  EXPECT_EQ(numbers.space, Space::constant);
  EXPECT_EQ(numbers.alignment, 2);
  const uint16_t expected[5] = {1, 2, 0, 0xFFFF, 0xFFFF};  // and an implied zero
  ASSERT_EQ(numbers.initial.size(), sizeof expected);
  EXPECT_EQ(std::memcmp(numbers.initial.data(), expected, sizeof expected), 0);
  const auto f32 = [&](const char* name) {
    float value = 0;
    EXPECT_EQ(named(name).initial.size(), 4u);
    std::memcpy(&value, named(name).initial.data(), 4);
    return value;
  };
  EXPECT_EQ(f32("a"), 1.5f);
  EXPECT_EQ(f32("b"), 1.0f);
  EXPECT_TRUE(named("c").initial.empty());
  const uint64_t doubles[2] = {0x3ff0000000000000, 0x4000000000000000};
  EXPECT_EQ(named("d").elements, 2);
  ASSERT_EQ(named("d").initial.size(), 16u);
  EXPECT_EQ(std::memcmp(named("d").initial.data(), doubles, 16), 0);
  EXPECT_EQ(named("bar").alignment, 8);
  EXPECT_EQ(std::to_integer<int>(named("m").initial.at(0)), 0xFE);
  EXPECT_EQ(named("wide").bytes(), 16);
}

TEST(PtxModule, InitialValuesThatAreAddresses) {
  const Module module = parsed(with_preamble(
      ".global .b32 x[4]; .const .b64 y; .global .u64 list[4] = {generic(x)+8, 5, y, x-4}; .const .b64 one = x;"));
  const Symbol& list = module.variables.at(2);
  EXPECT_EQ(list.initial.size(), 32u);
  EXPECT_EQ(std::to_integer<int>(list.initial.at(8)), 5);
  ASSERT_EQ(list.addresses.size(), 3u);
  EXPECT_EQ(list.addresses[0].variable, 0);
  EXPECT_EQ(list.addresses[0].offset, 8u);
  EXPECT_EQ(list.addresses[1].at, 16);
  EXPECT_EQ(list.addresses[1].variable, 1);
  EXPECT_EQ(list.addresses[2].at, 24);
  EXPECT_EQ(list.addresses[2].offset, ~uint64_t{3});
  EXPECT_EQ(module.variables.at(3).addresses.size(), 1u);
}

TEST(PtxModule, ExternVariablesMayBeDeclaredAgain) {
  const Module module = parsed(with_preamble(
      ".extern .global .b32 a[]; .extern .shared .b8 s[]; .extern .shared .b8 s[];\n"
      ".entry f() { .reg .b64 r; mov.b64 r, a; } .visible .global .b32 a[2] = {1, 2}; .extern .global .b32 a[];"));
  ASSERT_EQ(module.variables.size(), 2u);
  EXPECT_FALSE(module.variables[0].is_extern);
  EXPECT_EQ(module.variables[0].initial.size(), 8u);
  EXPECT_EQ(module.find("f")->symbols[0].elements, 2);
}

TEST(PtxModule, LaunchDirectives) {
  const Module module = parsed(
      with_preamble(".visible .entry a() .maxntid 384, 1, 2 .minnctapersm 3 .maxnreg 64 .maxclusterrank 8 { ret; }\n"
                    ".weak .entry b() .reqntid 128 .reqnctapercluster 2, 4 .explicitcluster .blocksareclusters "
                    ".maxnctapersm 2 .abi_preserve 0 { ret; }\n"
                    ".entry c { ret; }"));
  const auto dimensions = [](const int32_t(&n)[3]) { return std::vector<int32_t>(n, n + 3); };
  const Function &a = *module.find("a"), &b = *module.find("b"), &c = *module.find("c");
  EXPECT_EQ(dimensions(a.max_threads), (std::vector<int32_t>{384, 1, 2}));
  EXPECT_EQ(dimensions(a.required_threads), (std::vector<int32_t>{0, 0, 0}));
  EXPECT_EQ(a.min_ctas, 3);
  EXPECT_EQ(a.max_registers, 64);
  EXPECT_EQ(a.max_cluster_rank, 8);
  EXPECT_FALSE(a.explicit_cluster);
  EXPECT_EQ(dimensions(b.required_threads), (std::vector<int32_t>{128, 1, 1}));
  EXPECT_EQ(dimensions(b.required_cluster), (std::vector<int32_t>{2, 4, 1}));
  EXPECT_TRUE(b.explicit_cluster);
  EXPECT_TRUE(b.blocks_are_clusters);
  EXPECT_TRUE(c.is_entry);
  EXPECT_TRUE(c.has_body);
  EXPECT_EQ(dimensions(c.max_threads), (std::vector<int32_t>{0, 0, 0}));
  EXPECT_EQ(module.find("d"), nullptr);
}

TEST(PtxModule, Parameters) {
  const Module module = parsed(with_preamble(
      ".visible .entry f(\n.param .u64 .ptr .global .align 1 a,\n.param .align 64 .b8 b[128],\n.param .f32 c,\n"
      ".param .u64 .ptr d, .param .b8 e\n) { ret; }\n"
      ".func (.param .align 8 .b8 result[24]) g(.param .b32 x, .param .align 4 .b8 rest[]) { ret; }"));
  const Function& f = *module.find("f");
  ASSERT_EQ(f.parameters, (std::vector<int32_t>{0, 1, 2, 3, 4}));
  const int32_t alignments[] = {8, 64, 4, 8, 1};
  const int64_t bytes[] = {8, 128, 4, 8, 1};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(f.symbols[i].name, std::string(1, static_cast<char>('a' + i)));
    EXPECT_EQ(f.symbols[i].space, Space::param);
    EXPECT_EQ(f.symbols[i].alignment, alignments[i]) << i;
    EXPECT_EQ(f.symbols[i].bytes(), bytes[i]) << i;
  }
  const Function& g = *module.find("g");
  EXPECT_FALSE(g.is_entry);
  EXPECT_EQ(g.results, std::vector<int32_t>{0});
  EXPECT_EQ(g.parameters, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(g.symbols[0].bytes(), 24);
  EXPECT_EQ(g.symbols[2].elements, 0);
}

TEST(PtxModule, PrototypesGiveWayToDefinitions) {
  const Module module = parsed(with_preamble(
      ".extern .func (.param .b32 r) vprintf(.param .b64 _, .param .b64 _) .noreturn;\n.func late(.param .b32 a);\n"
      ".func early(.param .b32 a) { ret; }\n.func early(.param .b32 _);\n.func late(.param .b32 a) { ret; ret; }\n"
      ".entry f(); .entry f() { call late, (1); }"));
  ASSERT_EQ(module.functions.size(), 4u);
  EXPECT_FALSE(module.find("vprintf")->has_body);
  EXPECT_EQ(module.find("vprintf")->parameters.size(), 2u);
  EXPECT_EQ(module.find("late")->instructions.size(), 2u);
  EXPECT_TRUE(module.find("late")->has_body);
  EXPECT_EQ(module.find("early")->instructions.size(), 1u);
  EXPECT_EQ(module.find("f")->instructions.size(), 1u);
}

TEST(PtxModule, Calls) {
  const Module module = parsed(
      with_preamble(".func (.param .b32 r) g(.param .b32 a, .param .b64 b) { ret; }\n.func h() { call h; ret; }\n"
                    ".entry f() { .reg .b32 %r<3>; .reg .b64 p; .reg .pred q;\n"
                    "mov.u64 p, g; call.uni h; call h, (); call (), h, ();\n"
                    "{ .param .b32 result; .param .b32 a; .param .b64 b; @q call.uni (result), g, (a, b); }\n"
                    "call (_), g, (%r1, 5);\n"
                    "type: .callprototype (.param .b32 _) _ (.param .b32 _, .param .align 8 .b8 _[16]) .noreturn;\n"
                    "call (%r1), p, (%r1, p), type;\n"
                    "list: .calltargets g, h; call p, list; }"));
  const Function& f = *module.find("f");
  const char* expected[] = {"mov.u64 p, g()",
                            "call.uni {}, h(), {}",
                            "call {}, h(), {}",
                            "call {}, h(), {}",
                            "@q call.uni {result}, g(), {a, b}",
                            "call {_}, g(), {%r1, 5}",
                            "call {%r1}, p, {%r1, p}, \"type\"",
                            "call {}, p, {}, {g(), h()}"};
  ASSERT_EQ(f.instructions.size(), std::size(expected));
  for (size_t i = 0; i < std::size(expected); ++i) EXPECT_EQ(text_of(f, f.instructions[i]), expected[i]);
}

TEST(PtxModule, AliasesAreFollowed) {
  const Module module = parsed(with_preamble(
      ".func other(); .func one() { ret; } .alias other, one;\n"
      ".entry f() { .reg .b64 p; mov.b64 p, other; call other; list: .calltargets other; call p, list; }"));
  const Function& f = *module.find("f");
  ASSERT_EQ(f.instructions.size(), 3u);
  EXPECT_EQ(text_of(f, f.instructions[0]), "mov.b64 p, one()");
  EXPECT_EQ(text_of(f, f.instructions[1]), "call {}, one(), {}");
  EXPECT_EQ(text_of(f, f.instructions[2]), "call {}, p, {}, {one()}");
}

}  // namespace
}  // namespace tandem::test
