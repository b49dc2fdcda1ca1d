// mbarrier objects. PTX ISA, "mbarrier".
//
// The 64 bits in shared memory hold a mark and the number of the object in its block's list, where its state is. Memory
// with other contents is not an mbarrier.
#pragma once

#include "vgpu/src/machine/decode/builder.h"
#include "vgpu/src/machine/run/state.h"

namespace tandem::vgpu::machine {

Status decode_mbarrier(Builder& b, const ptx::Instruction& i);

// Returns the object at an offset. Null: no object, which has been reported as fatal.
Mbarrier* mbarrier_at(Grid& grid, const Actor& actor, Block& block, uint32_t offset);

// Adds arrivals and bytes. Returns false if the run is over.
bool mbarrier_arrive(Grid& grid, const Actor& actor, Block& block, Mbarrier& barrier, uint32_t count);
bool mbarrier_complete_bytes(Grid& grid, const Actor& actor, Block& block, Mbarrier& barrier, int64_t bytes);

std::string name_of(const Mbarrier& barrier);

}  // namespace tandem::vgpu::machine
