// A picture of one block: a row for each warp and unit, and an arrow to each long wait from the event that ended it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vgpu/src/trace/timeline.h"

namespace tandem::svg {

struct TimelineStyle {
  double width = 1500;         // the run, in pixels
  std::string title = {};      // GPU and problem; "": the timeline's title
  std::string where = {};      // device and schedule, for the subtitle
  std::string unit = "steps";  // unit of the axis; "clocks" for a model
  // Begin of each iteration of a loop. A second panel enlarges the iteration in the middle.
  std::vector<int64_t> iterations = {};
};

std::string draw(const vgpu::Timeline& timeline, const TimelineStyle& style);

}  // namespace tandem::svg
