// Computes a block mask from a mask_mod on a GPU: two kernels, compiled for each expression.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "config/make_blocks.h"
#include "gpu/device.h"
#include "plan/kernel.h"
#include "problem/make_blocks.h"

namespace tandem::plan {

inline constexpr KernelEntry kMakeBlocksEntries[] = {{EntryId::classify_blocks, "classify_blocks", 0},
                                                     {EntryId::list_blocks, "list_blocks", 0}};

std::string make_blocks_name(const MakeBlocksProblem& problem);
std::string make_blocks_translation_unit(const MakeBlocksProblem& problem);

// Returns ok, or the reason why this device does not serve the call.
Status check_make_blocks(const MakeBlocksProblem& problem, const gpu::Properties& device);

// The parameter of both kernels, and the number of CTAs of each kernel.
struct MakeBlocksLaunch {
  MakeBlocksParams params;
  uint32_t grid[2], threads[2];
};
MakeBlocksLaunch make_blocks_launch(const MakeBlocksProblem& problem, const gpu::Properties& device,
                                    std::byte* workspace);
// Returns the memory that either kernel accesses, for devices that check every access.
std::vector<gpu::NamedBuffer> make_blocks_buffers(const MakeBlocksProblem& problem, std::byte* workspace,
                                                  size_t launch);

}  // namespace tandem::plan
