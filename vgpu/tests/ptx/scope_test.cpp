// The register, variable or label that a name denotes.
#include <gtest/gtest.h>

#include "snippet.h"

namespace tandem::test {
namespace {

using namespace vgpu::ptx;

std::vector<std::string> texts(const Function& f) {
  std::vector<std::string> all;
  for (const Instruction& instruction : f.instructions) all.push_back(text_of(f, instruction));
  return all;
}

TEST(PtxScope, OnlyRegistersThatAreUsedExist) {
  const Function f = parsed_body(".reg .b32 %r<1000000>; .reg .f32 x, unused; mov.b32 %r7, %r999999; mov.b32 %r7, x;");
  ASSERT_EQ(f.registers.size(), 4u);  // a separate name is used by its declaration
  EXPECT_EQ(f.registers[0].name, "x");
  EXPECT_EQ(f.registers[0].type, Type::f32);
  EXPECT_EQ(f.registers[2].name, "%r7");
  EXPECT_EQ(f.registers[3].name, "%r999999");
  EXPECT_EQ(f.registers[3].type, Type::b32);
  EXPECT_EQ(f.instructions[0].operands[0].reg, f.instructions[1].operands[0].reg);
}

TEST(PtxScope, NumberedNamesMayBeOfSeveralPrefixes) {
  const Function f = parsed_body(
      ".reg .b32 %r<10>; .reg .b64 %rd<10>; .reg .f32 %r1<10>; .reg .pred %p<3>, %q<2>;\n"
      "mov.b32 %r9, 0; mov.b32 %r19, 0; mov.b64 %rd9, 0; setp.eq.b32 %p2|%q1, %r9, 0;");
  std::vector<std::pair<std::string, Type>> found;
  for (const RegisterName& r : f.registers) found.emplace_back(r.name, r.type);
  EXPECT_EQ(
      found,
      (std::vector<std::pair<std::string, Type>>{
          {"%r9", Type::b32}, {"%r19", Type::f32}, {"%rd9", Type::b64}, {"%p2", Type::pred}, {"%q1", Type::pred}}));
}

TEST(PtxScope, InlineAssemblyMayRepeatItsNames) {
  const Function f = parsed_body(
      ".reg .b32 %r<9>;\n"
      "{ .reg .pred P1; WAIT: setp.eq.b32 P1, %r1, 0; @P1 bra DONE; bra WAIT; DONE: }\n"
      "{ .reg .pred P1; WAIT: setp.ne.b32 P1, %r1, 0; @P1 bra DONE; bra WAIT; DONE: }\n");
  EXPECT_EQ(texts(f), (std::vector<std::string>{"setp.eq.b32 P1, %r1, 0", "@P1 bra DONE@3", "bra WAIT@0",
                                                "setp.ne.b32 P1, %r1, 0", "@P1 bra DONE@6", "bra WAIT@3"}));
  EXPECT_EQ(f.instructions[0].operands[1].reg, f.instructions[3].operands[1].reg);
  EXPECT_NE(f.instructions[0].operands[0].reg, f.instructions[3].operands[0].reg);
}

TEST(PtxScope, InnerNamesHideOuterOnesUntilTheBlockEnds) {
  const Function f = parsed_body(
      ".reg .b32 %r<9>, x; mov.b32 %r1, x;\n"
      "{ .reg .b64 %r<2>, x; mov.b64 %r1, x; mov.b32 %r2, 0; { .shared .b8 x[4]; mov.b64 %r1, x; } mov.b64 %r0, x; }\n"
      "mov.b32 %r1, x; mov.b32 %r0, %r2;");
  const auto reg = [&](int instruction, int operand) {
    return f.instructions.at(instruction).operands.at(operand).reg;
  };
  EXPECT_EQ(f.registers.at(reg(1, 0)).type, Type::b64);
  EXPECT_EQ(f.registers.at(reg(1, 1)).type, Type::b64);
  EXPECT_EQ(f.registers.at(reg(2, 0)).type, Type::b32);
  EXPECT_EQ(f.instructions.at(3).operands.at(1).kind, Operand::Kind::symbol);
  EXPECT_EQ(reg(3, 0), reg(1, 0));
  EXPECT_EQ(f.registers.at(reg(4, 0)).type, Type::b64);
  EXPECT_EQ(reg(4, 1), reg(1, 1));
  EXPECT_EQ(reg(5, 0), reg(0, 0));
  EXPECT_EQ(reg(5, 1), reg(0, 1));
  EXPECT_EQ(f.registers.at(reg(6, 0)).type, Type::b32);
  EXPECT_EQ(reg(6, 1), reg(2, 0));
}

TEST(PtxScope, BranchesGoToTheInnermostLabelThatTheySee) {
  const Function f = parsed_body("L: { bra L; { bra L; bra M; } L: ret; } bra L; { bra M; } ret; M: N:");
  EXPECT_EQ(texts(f), (std::vector<std::string>{"bra L@3", "bra L@3", "bra M@7", "ret", "bra L@0", "bra M@7", "ret"}));
}

TEST(PtxScope, IndexedBranchesHaveTheLabelsOfTheirList) {
  const Function f = parsed_body(
      ".reg .b32 %r<2>; .reg .pred %p<1>;\n$L_brx_0: .branchtargets $A, $B,\n $A;\n @%p0 brx.idx.uni %r1, $L_brx_0;\n"
      "$A: exit; $B: ret;");
  EXPECT_EQ(texts(f), (std::vector<std::string>{"@%p0 brx.idx.uni %r1, {$A@1, $B@2, $A@1}", "exit", "ret"}));
}

TEST(PtxScope, VariablesOfFunctionsComeAfterThoseOfTheModule) {
  const Module module = parsed(with_preamble(
      ".global .b32 a; .entry f(.param .u64 p) { .shared .f32 s[8]; .local .align 8 .b8 l[16]; .reg .u64 r;\n"
      "mov.u64 r, a; mov.u64 r, p; { .shared .b8 s; mov.u64 r, s; } mov.u64 r, s; mov.u64 r, l; }\n"
      ".const .b32 b; .entry g(.param .u64 p) { .reg .u64 r; ld.param.u64 r, [p]; ld.const.u64 r, [b+4]; }"));
  const Function& f = *module.find("f");
  EXPECT_EQ(texts(f),
            (std::vector<std::string>{"mov.u64 r, a", "mov.u64 r, p", "mov.u64 r, s", "mov.u64 r, s", "mov.u64 r, l"}));
  std::vector<std::string> names;
  for (const Symbol& symbol : f.symbols) names.push_back(symbol.name);
  EXPECT_EQ(names, (std::vector<std::string>{"a", "b", "p", "s", "l", "s"}));
  EXPECT_EQ(f.parameters, std::vector<int32_t>{2});
  EXPECT_EQ(f.instructions[2].operands[1].symbol, 5);
  EXPECT_EQ(f.instructions[3].operands[1].symbol, 3);
  EXPECT_EQ(f.symbols[3].bytes(), 32);
  EXPECT_EQ(f.symbols[3].alignment, 4);
  EXPECT_EQ(f.symbols[4].alignment, 8);
  EXPECT_EQ(f.symbols[4].space, Space::local);
  const Function& g = *module.find("g");
  EXPECT_EQ(texts(g), (std::vector<std::string>{"ld.param.u64 r, [p]", "ld.const.u64 r, [b+4]"}));
  EXPECT_EQ(g.symbols[0].name, "a");
  EXPECT_EQ(g.parameters, std::vector<int32_t>{2});
}

}  // namespace
}  // namespace tandem::test
