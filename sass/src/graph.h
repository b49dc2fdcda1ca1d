// Control flow of a kernel's machine code: basic blocks and loops.
#pragma once

#include <cstdint>
#include <vector>

#include "sass/src/sass.h"

namespace tandem::machine_code {

struct Block {
  int32_t begin = 0, end = 0;  // instructions [begin, end)
  std::vector<int32_t> next;   // blocks
};

// A natural loop: all blocks that can reach its head again without passing through it.
struct Loop {
  int32_t head = 0;
  std::vector<int32_t> blocks;  // in the order of the code, including the head

  bool contains(int32_t block) const;
  bool contains(const Loop& other) const;  // false for the loop itself
};

struct Graph {
  std::vector<Block> blocks;        // in the order of the code; the kernel starts with the first
  std::vector<int32_t> dominators;  // immediate dominators; first block: itself; unreachable: -1
  std::vector<Loop> loops;

  bool dominates(int32_t a, int32_t b) const;  // every path to b leads through a
};

Graph graph_of(const std::vector<Instruction>& code);

// branches: the instruction may jump. falls_through: it may continue with the next instruction.
bool branches(const Instruction& instruction);
bool falls_through(const Instruction& instruction);

// Returns the predicates that decide a branch, without '!': its guard, and the predicate among its operands ("BRA.U
// !UP0, ...").
std::vector<std::string> conditions_of(const Instruction& branch);

// Immediate dominators of a graph given as successor lists, in the form of Graph::dominators.
std::vector<int32_t> dominators_of(const std::vector<std::vector<int32_t>>& next, int32_t root);

}  // namespace tandem::machine_code
