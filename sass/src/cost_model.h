// What a kernel's steady loops cost: instructions by unit, and the clocks that each unit needs for a tile of 128 x 128
// scores. sass/docs/machine-code.md says how roles, paths and tiles are told.
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

// Sizes. What is 0 is taken from the code, and stays 0 where that does not say. Of a backward pass, whose tiles are the
// other way round, rows and keys are to be 0.
struct Shape {
  int head_dim = 0, head_dim_v = 0;
  int rows = 0, keys = 0;  // of what a block works on between two steps of keys
  int load_waits = 2;      // of the loading warp in a step: one for keys, one for values
};

// One way through a role's loop over steps of keys.
struct LoopCost {
  Role role{};
  bool masked = false;
  bool choice = false;   // its loop has a masked and an unmasked way
  bool once = false;     // the loop around, over tiles of rows, without its loops over steps
  uint32_t address = 0;  // of its first instruction
  int registers = 0;     // of a thread in this role
  int instructions = 0;  // of a warp in one turn
  int left_out = 0;      // the loop's other instructions: waits, rare branches, masks
  Work work;
  std::array<int, kUnits> units{};
  std::map<std::string, int> opcodes;

  // A tile of 128 x 128 scores takes so many turns of so many warps; what is done once, or by an epilogue, none.
  double turns = 0, warps = 0;
  double per_tile() const { return turns * warps; }

  // Of one warp and turn. Clocks of the tensor core and lanes are those of the unit, weighed by its rates.
  double mma_clocks = 0, tensor_bytes = 0, shared_bytes = 0;
  double exponential_lanes = 0, fma_lanes = 0, alu_lanes = 0;
};

// All roles together, for one tile.
struct TileCost {
  std::array<double, kUnits> instructions{};  // of all warps
  std::array<double, kUnits> clocks{};        // 0 where no rate is known; conversions are among those of the ALU
  double issued = 0, issue_clocks = 0;
  std::string binds;  // what needs the most clocks: "MMA, exponential"
};

// A kernel in the same file, which comes before or after the one that is accounted for.
struct Companion {
  std::string name;
  int registers = 0, instructions = 0, stack_bytes = 0;
};

struct CostModel {
  std::string arch, kernel;
  std::vector<Companion> companions;
  int registers = 0, threads = 0, stack_bytes = 0, shared_bytes = 0;  // as in Kernel
  int spills = 0;          // instructions that move registers to and from local memory
  int tensor_columns = 0;  // allocated at once
  bool pair = false;       // two blocks multiply together
  bool backward = false;
  Shape shape;
  std::vector<LoopCost> loops;       // in the order of the code
  std::vector<std::string> unknown;  // opcodes that no unit is known for, counted as control
  std::optional<TileCost> plain, masked;

  // The loop that stands for a role in plain or masked. Of scores the cheapest way, for unmasked ones through a loop
  // that has no masks if there is one; of load and mma the loop with the most copies or products.
  const LoopCost* steady(Role role, bool with_mask) const;
  const LoopCost* steady_softmax(bool with_mask) const;  // or computing
};

// The kernel that an account is of: that with the most products.
const Kernel& kernel_of(const Cubin& cubin);

// Of that kernel. whole: a turn is taken to execute all of its loop.
Status cost_model(const Cubin& cubin, const Shape& known, bool whole, CostModel* cost_model);

}  // namespace tandem::machine_code
