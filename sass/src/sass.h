// Parses the machine code that nvdisasm prints.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tandem::machine_code {

// The control bits that ptxas sets for the scheduler: bits 41 to 61 of the second word of an encoding (sm_70 and
// later).
struct Control {
  int stall = 0;           // clocks until the warp's next instruction may be issued
  bool yields = false;     // the scheduler prefers another warp
  int write_barrier = -1;  // scoreboard released by its result; -1: fixed latency
  int read_barrier = -1;   // scoreboard released when its operands are read
  uint32_t waits = 0;      // mask of scoreboards that must be released first

  friend bool operator==(const Control&, const Control&) = default;
};
Control control_of(uint64_t second_word);

struct Instruction {
  uint32_t address = 0;
  std::optional<Control> control;     // present if nvdisasm printed the encoding (-hex)
  std::string guard;                  // "!UP0" of "@!UP0"; "": always executed
  std::string opcode;                 // "FADD2.RM"
  std::vector<std::string> operands;  // "R4", "tmem[UR4+0x100]"
  std::vector<int32_t> targets;       // targets of a branch, as indices of instructions

  std::string_view base() const { return std::string_view(opcode).substr(0, opcode.find('.')); }  // "FADD2"
  bool has(std::string_view modifier) const;                                                      // "RM"
  std::string first() const { return operands.empty() ? std::string() : operands.front(); }
  std::string last() const { return operands.empty() ? std::string() : operands.back(); }
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  int registers = 0;            // per thread at the start
  int stack_bytes = 0;          // per thread
  int shared_bytes = 0;         // static shared memory of a block
  int threads = 0;              // threads of a block; 0: unknown
  std::vector<uint8_t> tables;  // constant bank 2: targets of indirect branches
};

struct Cubin {
  std::string arch;  // "sm_90a"
  std::vector<Kernel> kernels;
};

// text: output of `nvdisasm file.cubin`. The function fails if the text has no code or a branch has an unknown target.
Status parse(std::string_view text, Cubin* cubin);

}  // namespace tandem::machine_code
