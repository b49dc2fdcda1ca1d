// Common code of the tcgen05 instructions. PTX ISA, "TensorCore 5th Generation Family Instructions".
#pragma once

#include <vector>

#include "vgpu/src/machine/decode/builder.h"
#include "vgpu/src/machine/run/state.h"
#include "vgpu/src/units/ranges.h"

namespace tandem::vgpu::machine {

Status decode_tmem_mma(Builder& b, const ptx::Instruction& i, Modifiers& words);
Status decode_tmem(Builder& b, const ptx::Instruction& i);            // alloc, dealloc, ld, st, wait, fence
Status decode_cluster_launch(Builder& b, const ptx::Instruction& i);  // clusterlaunchcontrol

// Consumes .cta_group::N and returns N, or 0 if it is absent.
int32_t take_group(Modifiers& words);
// All tcgen05 instructions of a kernel use one group. Returns false if the run is over.
bool use_group(Context& context, const Op& op, int32_t group);
// Returns the other block of a pair. Null: the cluster has none, which is reported as fatal.
Block* peer_of(Context& context, const Op& op);

// Returns true if all cells are allocated in the block. Returns false if the run ends.
bool check_cells(Context& context, const Op& op, const Block& block, const std::vector<units::CellRange>& cells);
void add_cells(const Block& block, const std::vector<units::CellRange>& cells, std::vector<Span>* spans);

// Finds the blocks of an instruction, the block of even rank first. Returns false if the run ends.
bool group_of(Context& context, const Op& op, int32_t group, std::vector<Block*>* blocks);
// Outstanding operations of these blocks.
std::vector<TensorOp>& tensor_ops(const std::vector<Block*>& blocks);
void add_shared(const Block& block, const std::vector<units::Range>& ranges, std::vector<Span>* spans);

// An operation of the tensor core: the cells that it accesses, and the operations that it follows.
struct TensorWork {
  AsyncKind kind = AsyncKind::tcgen05_mma;
  std::vector<Block*> blocks;
  std::vector<Span> reads, writes;
  std::vector<AsyncRef> after;
  std::function<void()> move;
};
AsyncRef issue_work(Context& context, const Op& op, uint32_t lane, TensorWork work);

}  // namespace tandem::vgpu::machine
