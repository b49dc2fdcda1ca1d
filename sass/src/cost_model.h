// The cost of a kernel's steady loops: instructions per unit, and clocks of each unit for a tile of 128 x 128 scores.
// sass/docs/machine-code.md describes the rules for roles, paths and tiles.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "sass/src/units.h"
#include "sass/src/work.h"

namespace tandem::machine_code {

// Sizes. A size of 0 is derived from the code, and stays 0 if the code does not show it. In a backward pass rows and
// keys exchange places, so both must be 0.
struct Shape {
  int head_dim = 0, head_dim_v = 0;
  int rows = 0, keys = 0;  // work of a block between two steps of keys
  int load_waits = 2;      // waits of the load warp per step: keys, values
  bool backward = false;   // known to be a backward pass
};

// One path through a role's loop over steps of keys.
struct LoopCost {
  Role role{};
  bool masked = false;
  bool choice = false;   // the loop has a masked and an unmasked path
  bool once = false;     // the outer loop over tiles of rows, without its inner loops
  uint32_t address = 0;  // address of its first instruction
  int registers = 0;     // registers of a thread in this role
  int instructions = 0;  // instructions of a warp in one turn
  int left_out = 0;      // the loop's other instructions: waits, rare branches, masks
  Work work;
  std::array<int, kUnits> units{};
  std::map<std::string, int> opcodes;

  // A tile of 128 x 128 scores takes `turns` turns of `warps` warps. Epilogues and code that runs once have 0 turns.
  double turns = 0, warps = 0;
  double per_tile() const { return turns * warps; }

  // Work of one warp in one turn. Clocks of the tensor core and lanes are weighted by the rates of the unit.
  double mma_clocks = 0, tensor_bytes = 0, shared_bytes = 0;
  double exponential_lanes = 0, fma_lanes = 0, alu_lanes = 0;
};

// All roles together, for one tile.
struct TileCost {
  std::array<double, kUnits> instructions{};  // sum over all warps
  std::array<double, kUnits> clocks{};        // 0: no rate is known; ALU includes conversions
  double issued = 0, issue_clocks = 0;
  std::string binds;  // the slowest units: "MMA, exponential"
};

// A kernel in the same file that runs before or after the main kernel.
struct Companion {
  std::string name;
  int registers = 0, instructions = 0, stack_bytes = 0;
};

struct CostModel {
  std::string arch, kernel;
  std::vector<Companion> companions;
  int registers = 0, threads = 0, stack_bytes = 0, shared_bytes = 0;  // like in Kernel
  int spills = 0;          // instructions that move registers to or from local memory
  int tensor_columns = 0;  // largest single allocation
  bool pair = false;       // two blocks multiply together
  bool backward = false;
  Shape shape;
  std::vector<LoopCost> loops;       // in the order of the code
  std::vector<std::string> unknown;  // unknown opcodes, counted as control
  std::optional<TileCost> plain, masked;

  // The loop that represents a role in `plain` or `masked`. For scores the loop is the cheapest path, and unmasked
  // tiles prefer a loop without masks. For load and mma the result is the loop with the most copies or products.
  const LoopCost* steady(Role role, bool with_mask) const;
  const LoopCost* steady_softmax(bool with_mask) const;  // softmax, or computing if there is no softmax role
};

// The kernel with the most products.
const Kernel& kernel_of(const Cubin& cubin);

// The cost of that kernel. whole: a turn executes every instruction of its loop.
Status cost_model(const Cubin& cubin, const Shape& known, bool whole, CostModel* cost_model);

}  // namespace tandem::machine_code
