// A picture of one block: a row for each warp and unit, and an arrow to each wait from the event that ended it.
#pragma once

#include <functional>
#include <string>

#include "vgpu/src/trace/timeline.h"

namespace tandem::svg {

struct TimelineStyle {
  double width = 1500;         // the steps, in pixels
  std::string where = {};      // device and schedule, for the subtitle
  std::string unit = "steps";  // the axis; "clocks" for a model
};

std::string draw(const vgpu::Timeline& timeline, const TimelineStyle& style);

}  // namespace tandem::svg
