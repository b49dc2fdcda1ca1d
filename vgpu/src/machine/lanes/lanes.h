// Arithmetic on rows, compiled once per instruction set. units/numbers.h has floating point.
#pragma once

#include <span>
#include <string>

#include "vgpu/src/machine/op.h"

namespace tandem::vgpu::machine {

// A form by its canonical name (operation, qualifiers, type): "mul.wide.u16", "setp.ltu.f32", "cvt.sat.s8.s32".
struct LaneEntry {
  const char* name;
  Action action;
};

// The functions of one instruction set.
struct LaneTarget {
  const char* name;
  std::span<const std::span<const LaneEntry>> families;
};

// Returns a form of the best instruction set of this machine. Shape::none: no such form.
Action lane_function(const std::string& name);

// The forms of all targets. Tests compare these forms.
std::span<const LaneTarget* const> lane_targets();
Action lane_function(const LaneTarget& target, const std::string& name);

}  // namespace tandem::vgpu::machine
