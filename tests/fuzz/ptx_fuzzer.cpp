// Reads any bytes as PTX: they are refused with a sentence, or give a module whose every index is in range.
#include <cstdint>
#include <cstdlib>

#include "vgpu/src/ptx/parser.h"

namespace {

using namespace tandem::vgpu::ptx;

void demand(bool holds) {
  if (!holds) std::abort();
}

bool inside(int32_t index, size_t size) { return index >= 0 && static_cast<size_t>(index) < size; }

void check(const Module& module, const Function& function, const Operand& operand) {
  switch (operand.kind) {
    case Operand::Kind::none: std::abort();
    case Operand::Kind::reg: demand(inside(operand.reg, function.registers.size())); break;
    case Operand::Kind::symbol: demand(inside(operand.symbol, function.symbols.size())); break;
    case Operand::Kind::label: demand(inside(operand.target, function.instructions.size() + 1)); break;
    case Operand::Kind::function: demand(module.find(operand.text)); break;
    case Operand::Kind::pair: demand(operand.parts.size() == 2); break;
    case Operand::Kind::address: demand(!operand.parts.empty()); break;
    default: break;
  }
  for (const Operand& part : operand.parts) check(module, function, part);
}

void check(const Symbol& symbol) {
  demand(symbol.alignment > 0 && symbol.bytes() >= 0);
  demand(static_cast<int64_t>(symbol.initial.size()) <= symbol.bytes());
}

void check(const Module& module, const Function& function) {
  demand(function.symbols.size() >= module.variables.size());
  for (const Symbol& symbol : function.symbols) check(symbol);
  for (const int32_t parameter : function.parameters) demand(inside(parameter, function.symbols.size()));
  for (const int32_t result : function.results) demand(inside(result, function.symbols.size()));
  for (const RegisterName& reg : function.registers) demand(reg.type != Type::none);
  for (const Instruction& instruction : function.instructions) {
    demand(instruction.guard < static_cast<int32_t>(function.registers.size()));
    demand(instruction.location.ptx_line > 0);
    demand(instruction.location.file < static_cast<int32_t>(module.files.size()));
    if (instruction.opcode == "call") demand(instruction.operands.size() >= 3);
    for (const Operand& operand : instruction.operands) check(module, function, operand);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Module module;
  const tandem::Status status = parse({reinterpret_cast<const char*>(data), size}, &module);
  if (!status.ok()) {
    demand(status.message.starts_with("PTX "));
    return 0;
  }
  for (const Function& function : module.functions) check(module, function);
  return 0;
}
