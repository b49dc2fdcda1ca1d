// Machine code as nvdisasm prints it, taken apart.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tandem::machine_code {

struct Instruction {
  uint32_t address = 0;
  std::string guard;                  // "!UP0" of "@!UP0"; "": always executed
  std::string opcode;                 // "FADD2.RM"
  std::vector<std::string> operands;  // "R4", "tmem[UR4+0x100]"
  std::vector<int32_t> targets;       // of a branch: where it may lead, as numbers of instructions

  std::string_view base() const { return std::string_view(opcode).substr(0, opcode.find('.')); }  // "FADD2"
  bool has(std::string_view modifier) const;                                                      // "RM"
  std::string first() const { return operands.empty() ? std::string() : operands.front(); }
  std::string last() const { return operands.empty() ? std::string() : operands.back(); }
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  int registers = 0;     // of a thread when it starts
  int stack_bytes = 0;   // of a thread
  int shared_bytes = 0;  // of a block, those that are known before the launch
  int threads = 0;       // of a block; 0: not said
};

struct Cubin {
  std::string arch;  // "sm_90a"
  std::vector<Kernel> kernels;
};

// text: what `nvdisasm file.cubin` prints. Refused when there is no code in it, or a branch to nowhere.
Status parse(std::string_view text, Cubin* cubin);

}  // namespace tandem::machine_code
