// Arithmetic on rows, compiled once per instruction set; floating point is units/numbers.h's.
#pragma once

#include <span>
#include <string>

#include "vgpu/src/machine/op.h"

namespace tandem::vgpu::machine {

// A form by its canonical name: operation, what distinguishes it, type: "mul.wide.u16", "setp.ltu.f32",
// "cvt.sat.s8.s32".
struct LaneEntry {
  const char* name;
  Action action;
};

// The functions of one instruction set.
struct LaneTarget {
  const char* name;
  std::span<const std::span<const LaneEntry>> families;
};

// Looks up a form in the best instruction set of this machine. Shape::none: no such form.
Action lane_function(const std::string& name);

// The same from a given target; for tests that compare them.
std::span<const LaneTarget* const> lane_targets();
Action lane_function(const LaneTarget& target, const std::string& name);

}  // namespace tandem::vgpu::machine
