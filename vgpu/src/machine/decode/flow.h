// Control flow of decoded ops, and the places where divergent lanes rejoin.
#pragma once

#include <cstdint>
#include <vector>

#include "vgpu/src/machine/op.h"

namespace tandem::vgpu::machine {

struct BasicBlock {
  int32_t begin = 0, end = 0;  // ops [begin, end)
  std::vector<int32_t> next, previous;
};

// always: the virtual register that guards unconditional ops.
std::vector<BasicBlock> blocks_of(const std::vector<Op>& ops, int32_t always);

// Finds for each branch the place where its continuing lanes rejoin: its immediate post-dominator without early ends.
// Puts a join op there, and records it in the branch.
void insert_joins(std::vector<Op>* ops, int32_t always);

}  // namespace tandem::vgpu::machine
