// The work of one block of a kernel against a count of steps: a row for each warp and each unit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem::vgpu {

enum class Activity : uint8_t { compute, wait, copy, matrix };

struct Slice {
  int32_t row = 0;
  Activity activity = Activity::compute;
  int64_t begin = 0, end = 0;  // steps
  int32_t name = 0;            // index of Timeline::names
  int32_t instruction = -1;    // executed instruction; -1: several
};

// The end of a wait: the row that arrived last, its step, and the step at which the waiting row proceeded.
struct Arrow {
  int32_t from_row = 0, to_row = 0;
  int64_t from = 0, to = 0;
  int64_t waited = 0;  // steps
};

struct Timeline {
  std::string title;
  std::vector<std::string> rows;  // "compute, warp 4"; then the units: "copies in"
  std::vector<std::string> names;
  std::vector<std::string> places;  // by instruction: "kernels/sm90/forward.cuh:283 ..."
  std::vector<Slice> slices;        // slices of a row by time, without overlap except for units
  std::vector<Arrow> arrows;
  int64_t steps = 0;
};

}  // namespace tandem::vgpu
