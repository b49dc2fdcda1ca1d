// One head of a layer, computed by GPU kernels on a virtual GPU.
#pragma once

#include <optional>
#include <string>

#include "cli/call.h"

namespace tandem::tool {

// Runs the forward and the backward of a head (batch 1) under the checker, and compares them with float64. Draws one
// CTA of a pass. Returns false if a result is not exact, and nothing without NVRTC.
std::optional<bool> show_on_virtual_gpu(Inputs head, const std::string& what, int threads, tandem_pass drawn,
                                        const std::string& picture);

}  // namespace tandem::tool
