// Parses a compiler's text: data/sample.ptx, compiled from data/sample.cu.
#include <gtest/gtest.h>

#include <algorithm>

#include "snippet.h"

namespace tandem::test {
namespace {

using namespace vgpu::ptx;

const Module& sample() {
  static const Module module = parsed(sample_ptx());
  return module;
}

TEST(PtxSample, Functions) {
  std::vector<std::string> entries, bodies, declared;
  for (const Function& f : sample().functions) {
    (f.is_entry ? entries : f.has_body ? bodies : declared).push_back(f.name);
    if (!f.has_body) continue;
    EXPECT_FALSE(f.instructions.empty()) << f.name;
    EXPECT_EQ(f.instructions.back().opcode, "ret") << f.name;
  }
  EXPECT_EQ(entries, (std::vector<std::string>{"print", "choose", "indirect", "local", "atomics", "clusters"}));
  EXPECT_EQ(bodies.size(), 6u);
  EXPECT_EQ(declared, std::vector<std::string>{"vprintf"});
}

TEST(PtxSample, EveryOperandIsResolved) {
  int labels = 0, registers = 0, symbols = 0;
  const auto check = [&](auto& self, const Function& f, const std::vector<Operand>& operands) -> void {
    for (const Operand& operand : operands) {
      self(self, f, operand.parts);
      if (operand.kind == Operand::Kind::reg) {
        ++registers;
        EXPECT_LT(static_cast<size_t>(operand.reg), f.registers.size());
      } else if (operand.kind == Operand::Kind::symbol) {
        ++symbols;
        EXPECT_LT(static_cast<size_t>(operand.symbol), f.symbols.size());
      }
      if (operand.kind != Operand::Kind::label) continue;
      ++labels;
      EXPECT_GE(operand.target, 0);
      EXPECT_LE(static_cast<size_t>(operand.target), f.instructions.size());
    }
  };
  for (const Function& f : sample().functions) {
    for (const Instruction& instruction : f.instructions) check(check, f, instruction.operands);
  }
  EXPECT_GT(labels, 20);
  EXPECT_GT(registers, 500);
  EXPECT_GT(symbols, 50);
}

TEST(PtxSample, LinesAreThoseOfTheSource) {
  ASSERT_FALSE(sample().files.empty());
  EXPECT_EQ(sample().files[0], "sample.cu");
  const Function& f = *sample().find("clusters");
  const auto mapa = std::ranges::find(f.instructions, "mapa", &Instruction::opcode);
  ASSERT_NE(mapa, f.instructions.end());
  EXPECT_EQ(mapa->location.file, 0);
  const std::string text = sample_ptx();
  const auto line_of = [&](size_t at) {
    return 1 + std::count(text.begin(), text.begin() + static_cast<long>(at), '\n');
  };
  EXPECT_EQ(mapa->location.ptx_line, line_of(text.find("mapa.")));
  const size_t loc = text.rfind(".loc\t1 ", text.find("mapa."));
  EXPECT_EQ(std::to_string(mapa->location.line), text.substr(loc + 7, text.find(' ', loc + 7) - loc - 7));
}

TEST(PtxSample, Directives) {
  const Function& f = *sample().find("clusters");
  EXPECT_EQ(f.max_threads[0], 256);
  EXPECT_EQ(f.min_ctas, 2);
  EXPECT_EQ(f.required_cluster[0], 2);
  EXPECT_TRUE(f.explicit_cluster);
  EXPECT_EQ(f.parameters.size(), 2u);
  EXPECT_EQ(f.symbols.at(f.parameters.at(1)).bytes(), 32);
}

}  // namespace
}  // namespace tandem::test
