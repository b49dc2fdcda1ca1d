// One head of a layer by the kernels of a GPU that is not there.
#pragma once

#include <optional>
#include <string>

#include "cli/call.h"

namespace tandem::tool {

// Runs the forward and the backward of a head (batch 1, one head) on a virtual GPU: are they exact, does the checker
// find anything? Draws what the warps of one block did in a pass. Prints as it goes. False when something is wrong;
// what keeps it from being tried at all, such as no NVRTC, is a line, and no answer.
std::optional<bool> show_on_virtual_gpu(Inputs head, const std::string& what, int threads, tandem_pass drawn,
                                        const std::string& picture);

}  // namespace tandem::tool
