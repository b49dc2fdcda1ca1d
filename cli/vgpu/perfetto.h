// A timeline as a file for ui.perfetto.dev and chrome://tracing.
#pragma once

#include <string>

#include "vgpu/src/trace/timeline.h"

namespace tandem::tool {

// Returns JSON, in which a step is a microsecond.
std::string perfetto_json(const vgpu::Timeline& timeline);

}  // namespace tandem::tool
