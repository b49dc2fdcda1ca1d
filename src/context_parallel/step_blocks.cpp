#include "context_parallel/step_blocks.h"

#include <algorithm>

namespace tandem::context_parallel {
namespace {

// The parts of a range before and after its first block boundary.
std::vector<TokenRange> cut_at_block(const TokenRange& range, int64_t block) {
  const int64_t first = std::min(range.count, block - range.begin % block);
  if (range.begin % block == 0 || first == range.count) return {range};
  return {range.part(0, first), range.part(first, range.count - first)};
}

BlockList list_of(const int32_t* count, int64_t rows, int64_t columns) {
  BlockList list;
  list.count = count;
  if (count != nullptr) list.index = count + rows;
  list.present = true;
  list.count_stride[2] = rows > 1 ? 1 : 0;
  list.index_stride[2] = rows > 1 ? columns : 0;
  list.index_stride[3] = columns > 1 ? 1 : 0;
  const int64_t shape[] = {1, 1, rows, columns};
  std::copy_n(shape, 4, list.shape);
  std::copy_n(shape, 3, list.count_shape);
  return list;
}

// Places the lists of a view in memory.
void place(const int32_t* data, BlockMaskView* view) {
  const int64_t rows = view->partial.shape[2], columns = view->partial.shape[3];
  view->partial = list_of(data, rows, columns);
  view->full = list_of(data + rows * (1 + columns), rows, columns);
}

}  // namespace

std::vector<ContextStep> block_parts(const ContextPlan& plan, const ContextStep& step) {
  const BlockMask& mask = plan.block_mask();
  if (!mask) return {step};
  std::vector<ContextStep> parts;
  for (const TokenRange& q : cut_at_block(step.q, mask.block_q)) {
    for (const TokenRange& k : cut_at_block(step.k, mask.block_k)) {
      ContextStep part = step;
      part.q = q;
      part.k = k;
      part.pairs = visible_rect(plan.mask_of(q.document), q, k).pairs;
      part.diagonal += (q.begin - step.q.begin) - (k.begin - step.k.begin);
      if (part.pairs > 0) parts.push_back(part);
    }
  }
  return parts;
}

BlockMaskView unlisted_blocks(const BlockMask& mask, int64_t queries, int64_t keys) {
  BlockMaskView view;
  view.block_q = mask.block_q;
  view.block_k = mask.block_k;
  const int64_t rows = ceil_div(queries, mask.block_q), columns = ceil_div(keys, mask.block_k);
  view.partial = view.full = list_of(nullptr, rows, columns);
  view.blocks_k = columns;
  return view;
}

BlockMaskView StepBlocks::list(const ContextPlan& plan, const ContextStep& part) {
  const BlockMask& mask = plan.block_mask();
  BlockMaskView view = unlisted_blocks(mask, part.q.count, part.k.count);
  const int64_t rows = view.partial.shape[2], columns = view.blocks_k;
  lists_.assign(static_cast<size_t>(2 * rows * (1 + columns)), 0);
  const auto states = std::make_shared<BlockState[]>(static_cast<size_t>(rows * columns));
  const int64_t first_row = plan.mask_of(part.q.document).first_row + part.q.begin / mask.block_q;
  const int64_t first_column = part.k.begin / mask.block_k;
  for (int64_t row = 0; row < rows; ++row) {
    const auto at = static_cast<size_t>(first_row + row);
    for (int64_t n = mask.row_begin[at]; n < mask.row_begin[at + 1]; ++n) {
      const int64_t column = mask.key_blocks[static_cast<size_t>(n)] - first_column;
      if (column < 0 || column >= columns) continue;
      const bool full = !mask.full.empty() && mask.full[static_cast<size_t>(n)] != 0;
      int32_t* const lists = lists_.data() + (full ? rows * (1 + columns) : 0);
      lists[rows + row * columns + lists[row]++] = static_cast<int32_t>(column);
      states[static_cast<size_t>(row * columns + column)] = full ? BlockState::full : BlockState::partial;
    }
  }
  view.states = states;
  place(lists_.data(), &view);
  return view;
}

Status StepBlocks::write(const RowEngine& engine, BlockMaskView* view) {
  if (engine.pool == nullptr) return {};
  const auto bytes = static_cast<int64_t>(lists_.size() * sizeof(int32_t));
  memory_ = RowMemory(engine, bytes);
  TANDEM_TRY(memory_.write(lists_.data()));
  place(reinterpret_cast<const int32_t*>(memory_.data()), view);
  return {};
}

}  // namespace tandem::context_parallel
