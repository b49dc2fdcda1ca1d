// The memory of a call, by name: what devices that watch every access are told with a launch.
#pragma once

#include <cstddef>
#include <vector>

#include "gpu/device.h"
#include "plan/forward.h"
#include "problem/problem.h"

namespace tandem {

// Each from its first byte to its last, gaps of strides included. workspace: aligned to plan::kWorkspaceAlignment.
std::vector<gpu::NamedBuffer> buffers_of_forward(const Problem& problem, const plan::ForwardPlan& plan,
                                                 std::byte* workspace);
// Of the kernel that lists the tiles of a ragged problem.
std::vector<gpu::NamedBuffer> buffers_of_schedule(const Problem& problem, const plan::ForwardPlan& plan,
                                                  std::byte* workspace);

}  // namespace tandem
