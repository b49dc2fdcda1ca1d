#include "snippet.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

namespace tandem::test {

using namespace vgpu::ptx;

std::string with_preamble(std::string_view text) {
  return ".version 9.0 .target sm_90a .address_size 64\n" + std::string(text);
}

std::string in_kernel(std::string_view body) { return with_preamble(".entry f() {" + std::string(body) + "}"); }

Module parsed(std::string_view text) {
  Module module;
  const Status status = parse(text, &module);
  EXPECT_TRUE(status.ok()) << status.message << "\n" << text;
  return module;
}

Function parsed_body(std::string_view body) {
  const Module module = parsed(in_kernel(body));
  const Function* f = module.find("f");
  return f ? *f : Function();
}

namespace {

std::string enclosed(const char* before, const std::string& text, const char* after) {
  return std::string(before).append(text).append(after);
}

std::string parts_of(const Function& function, const Operand& operand, size_t first) {
  std::string text;
  for (size_t i = first; i < operand.parts.size(); ++i)
    text += (i > first ? ", " : "") + text_of(function, operand.parts[i]);
  return text;
}

}  // namespace

std::string text_of(const Function& function, const Operand& operand) {
  const std::string number = std::to_string(static_cast<int64_t>(operand.bits));
  const std::string offset = operand.bits == 0 ? "" : enclosed("+", number, "");
  switch (operand.kind) {
    case Operand::Kind::none: return "nothing";
    case Operand::Kind::reg: return (operand.negated ? "!" : "") + function.registers.at(operand.reg).name;
    case Operand::Kind::integer: return number;
    case Operand::Kind::real: return (operand.is_f32 ? "f32:" : "f64:") + number;
    case Operand::Kind::special: return operand.text;
    case Operand::Kind::symbol: return function.symbols.at(operand.symbol).name + offset;
    case Operand::Kind::label: return operand.text + "@" + std::to_string(operand.target);
    case Operand::Kind::function: return operand.text + "()";
    case Operand::Kind::vector: return enclosed("{", parts_of(function, operand, 0), "}");
    case Operand::Kind::pair:
      return text_of(function, operand.parts.at(0)) + "|" + text_of(function, operand.parts.at(1));
    case Operand::Kind::address: {
      const std::string more = operand.parts.size() > 1 ? ", " + parts_of(function, operand, 1) : "";
      return enclosed("[", text_of(function, operand.parts.at(0)) + offset + more, "]");
    }
    case Operand::Kind::sink: return "_";
    case Operand::Kind::string: return enclosed("\"", operand.text, "\"");
  }
  return "";
}

std::string text_of(const Function& function, const Instruction& instruction) {
  std::string text;
  if (instruction.guard >= 0) {
    text = (instruction.guard_negated ? "@!" : "@") + function.registers.at(instruction.guard).name + " ";
  }
  text += instruction.full_name();
  for (size_t i = 0; i < instruction.operands.size(); ++i) {
    text += (i > 0 ? ", " : " ") + text_of(function, instruction.operands[i]);
  }
  return text;
}

std::string last_of(std::string_view body) {
  const Function f = parsed_body(body);
  return f.instructions.empty() ? "" : text_of(f, f.instructions.back());
}

std::string sample_ptx() {
  std::ifstream in(SAMPLE_PTX, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(in), {});
  EXPECT_GT(text.size(), 10000u) << SAMPLE_PTX;
  return text;
}

}  // namespace tandem::test
