// Common code of the asynchronous copies. PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy".
#pragma once

#include <vector>

#include "vgpu/src/machine/decode/builder.h"
#include "vgpu/src/machine/run/resolve.h"

namespace tandem::vgpu::machine {

Status decode_tensor_copy(Builder& b, const ptx::Instruction& i);  // cp{.reduce}.async.bulk.tensor
Status decode_bulk_copy(Builder& b, const ptx::Instruction& i);    // cp{.reduce}.async.bulk
Status decode_cp_async(Builder& b, const ptx::Instruction& i);     // cp.async, its groups and arrivals

Status decode_tensor_map(Builder& b, const ptx::Instruction& i);  // tensormap.replace, .cp_fenceproxy

// An mbarrier to which a copy adds completed bytes.
struct Signal {
  Block* block = nullptr;
  uint32_t offset = 0;
  uint32_t bytes = 0;
};

// A copy, resolved at its issue.
struct Copy {
  AsyncKind kind = AsyncKind::bulk_load;
  std::vector<Span> reads, writes;
  std::vector<Signal> signals;
  uint32_t blocks = 0;              // ranks of the blocks whose shared memory the copy uses
  std::function<void()> move;       // the data
  std::shared_ptr<Progress> group;  // or null
};

// Issues the copy of one lane, and completes it if the schedule selects it.
AsyncRef issue_copy(Context& context, const Op& op, uint32_t lane, Copy copy);

// The open group of a lane (bulk stores or cp.async), which the next operation joins.
std::shared_ptr<Progress> open_group(Warp& warp, uint32_t lane, bool bulk);
Status decode_groups(Builder& b, const ptx::Instruction& i);  // commit_group, wait_group, wait_all

// .shared::cluster.global, .global.shared::cta, ...
enum class Direction : uint8_t { load, store, shared_to_shared };
Direction direction_of(const ptx::Instruction& i);

// Address registers of 32 or 64 bits in detail->in, and their offsets.
struct AddressOperand {
  int32_t in = -1;  // index in Detail::in
  bool wide = false;
  int64_t offset = 0;
};
AddressOperand add_address(Builder& b, Detail* detail, const ptx::Operand& operand);
uint64_t value_of(const Context& context, const Detail& detail, const AddressOperand& a, uint32_t lane);

}  // namespace tandem::vgpu::machine
