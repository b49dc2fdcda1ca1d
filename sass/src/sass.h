// Machine code as nvdisasm prints it, taken apart.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tandem::machine_code {

// What ptxas tells the scheduler about an instruction: bits 41 to 61 of the second word of its encoding (sm_70 and
// later).
struct Control {
  int stall = 0;           // clocks until the warp's next instruction may be issued
  bool yields = false;     // another warp's turn is preferred
  int write_barrier = -1;  // scoreboard that its result releases; -1: none, its latency is in the stall counts
  int read_barrier = -1;   // scoreboard that its operands' reading releases
  uint32_t waits = 0;      // mask of the scoreboards that must be released before it

  friend bool operator==(const Control&, const Control&) = default;
};
Control control_of(uint64_t second_word);

struct Instruction {
  uint32_t address = 0;
  std::optional<Control> control;     // known where nvdisasm printed the encoding (-hex)
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
  int registers = 0;            // of a thread when it starts
  int stack_bytes = 0;          // of a thread
  int shared_bytes = 0;         // of a block, those that are known before the launch
  int threads = 0;              // of a block; 0: not said
  std::vector<uint8_t> tables;  // constant bank 2: where its indirect branches lead
};

struct Cubin {
  std::string arch;  // "sm_90a"
  std::vector<Kernel> kernels;
};

// text: what `nvdisasm file.cubin` prints. Refused when there is no code in it, or a branch to nowhere.
Status parse(std::string_view text, Cubin* cubin);

}  // namespace tandem::machine_code
