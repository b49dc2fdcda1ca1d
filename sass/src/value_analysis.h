// Integer arithmetic of one lane of a warp, to find the barriers and bytes that instructions use.
//
// Values from memory or kernel parameters are unknown, and so are all values computed from them. The first lane
// represents the warp. Votes and shuffles are assumed to give the same value in all lanes.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sass/src/sass.h"

namespace tandem::machine_code {

using Value = std::optional<uint32_t>;
using Truth = std::optional<bool>;

struct Place {
  int thread = 0;  // first thread of its warp, in the block
  int block = 0;   // block of the cluster
};

class ValueAnalysis {
 public:
  // kernel must outlive this object.
  ValueAnalysis(const Kernel& kernel, const Place& place) : kernel_(kernel), place_(place) {
    registers_.fill(0);  // unwritten registers only affect unused bytes
    uniform_.fill(0);
  }

  // Executes an instruction that is not a branch. An instruction with an unknown predicate is executed too.
  void execute(const Instruction& instruction);

  Truth guard(const Instruction& instruction) const {
    return instruction.guard.empty() ? true : truth(instruction.guard);
  }
  Value value(std::string_view operand) const;                  // "-R4", "0x10", "UR5", "SRZ"
  Value address(std::string_view operand) const;                // "[R3+URZ+-0x18]"
  Value behind(std::string_view operand, int registers) const;  // "[UR8]": the register that follows UR8 by that number
  Truth truth(std::string_view predicate) const;                // "!UP0", "PT"

 private:
  struct Register {
    bool uniform = false;
    int number = -1;  // -1: no register, or the zero register
  };
  static Register register_of(std::string_view operand);
  void set(std::string_view operand, Value value, int behind = 0);
  void set_predicate(std::string_view operand, Truth value);
  void forget(const Instruction& instruction);
  Value special(std::string_view name) const;
  Value table(std::string_view operand) const;
  Value compute(const Instruction& i, const std::vector<std::string_view>& from) const;
  void compare(const Instruction& i);
  void logic(const Instruction& i);
  void multiply_wide(const Instruction& i);
  void access_stack(const Instruction& i);

  const Kernel& kernel_;
  Place place_;
  std::array<Value, 256> registers_{}, uniform_{};
  std::array<Truth, 8> predicates_{}, uniform_predicates_{};
  std::map<std::string, Value, std::less<>> stack_;  // by address, "[R1+0x34]"
};

}  // namespace tandem::machine_code
