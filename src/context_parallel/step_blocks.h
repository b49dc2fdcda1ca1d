// The block mask of a step, as the block lists of a dense call whose rows count from 0 in the step.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "context_parallel/plan.h"
#include "context_parallel/rows.h"

namespace tandem::context_parallel {

// Divides a step at the first block boundary of its queries and of its keys. Each part begins at a block, or lies in
// one block, so that its blocks are the blocks of its document. Parts without a visible pair are left out.
std::vector<ContextStep> block_parts(const ContextPlan& plan, const ContextStep& step);

class StepBlocks {
 public:
  // Lists the blocks of a part, and returns their view. Host code may read the view at once.
  BlockMaskView list(const ContextPlan& plan, const ContextStep& part);
  // Copies the lists to the device, and sets the addresses of the view.
  Status write(const RowEngine& engine, BlockMaskView* view);

 private:
  std::vector<int32_t> lists_;  // counts and indices of partial blocks, then of full blocks
  RowMemory memory_;
};

// The view of a call on any rows, without lists, for checks.
BlockMaskView unlisted_blocks(const BlockMask& mask, int64_t queries, int64_t keys);

}  // namespace tandem::context_parallel
