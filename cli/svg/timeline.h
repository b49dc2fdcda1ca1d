// What one block of a kernel did, as a picture: a row for each warp and unit, arrows from what a warp waited for.
#pragma once

#include <functional>
#include <string>

#include "vgpu/src/trace/timeline.h"

namespace tandem::svg {

struct TimelineStyle {
  double width = 1500;         // of the steps, in pixels
  std::string where = {};      // it ran, and how: before what a step is
  std::string unit = "steps";  // of the axis; "clocks" of a model
};

std::string draw(const vgpu::Timeline& timeline, const TimelineStyle& style);

}  // namespace tandem::svg
