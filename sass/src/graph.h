// Control flow of a kernel's machine code: basic blocks, and the loops among them.
#pragma once

#include <cstdint>
#include <vector>

#include "sass/src/sass.h"

namespace tandem::machine_code {

struct Block {
  int32_t begin = 0, end = 0;  // instructions [begin, end)
  std::vector<int32_t> next;   // blocks
};

// A natural loop: all that can come back to its head without leaving it.
struct Loop {
  int32_t head = 0;
  std::vector<int32_t> blocks;  // in the order of the code, the head among them

  bool contains(int32_t block) const;
  bool contains(const Loop& other) const;  // and is not the same
};

struct Graph {
  std::vector<Block> blocks;        // in the order of the code; the kernel starts with the first
  std::vector<int32_t> dominators;  // of each block the immediate one; of the first itself; of what is never reached -1
  std::vector<Loop> loops;

  bool dominates(int32_t a, int32_t b) const;  // every way to b leads through a
};

Graph graph_of(const std::vector<Instruction>& code);

// Whether an instruction may go elsewhere than to the next one, and whether it may go on to the next all the same.
bool branches(const Instruction& instruction);
bool falls_through(const Instruction& instruction);

// The predicates that decide about a branch: its guard, and one among its operands ("BRA.U !UP0, ..."). Without '!'.
std::vector<std::string> conditions_of(const Instruction& branch);

// Immediate dominators of a graph given as lists of successors, as in Graph::dominators.
std::vector<int32_t> dominators_of(const std::vector<std::vector<int32_t>>& next, int32_t root);

}  // namespace tandem::machine_code
