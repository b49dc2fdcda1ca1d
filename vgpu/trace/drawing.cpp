#include "vgpu/trace/drawing.h"

#include <algorithm>
#include <array>

#include "base/text.h"
#include "vgpu/ptx/inlining.h"
#include "vgpu/trace/roles.h"

namespace tandem::vgpu::trace {
namespace {

constexpr const char* kUnitNames[kUnits] = {"copies in", "copies out", "cp.async", "tensor core", "tensor memory"};

class Drawing {
 public:
  Drawing(const Program& program, const std::vector<Warp>& warps) : program_(program), roles_(program) {
    size_t instructions = 0;
    for (const Warp& warp : warps) {
      for (const int32_t i : warp.executed) instructions = std::max(instructions, static_cast<size_t>(i) + 1);
    }
    std::vector<std::vector<uint32_t>> counts(warps.size(), std::vector<uint32_t>(instructions));
    for (size_t w = 0; w < warps.size(); ++w) {
      for (const int32_t i : warps[w].executed) ++counts[w][static_cast<size_t>(i)];
    }
    const std::vector<std::string> names = roles_.of_warps(counts);
    for (size_t w = 0; w < warps.size(); ++w)
      timeline.rows.push_back(names[w].empty() ? str_cat("warp ", w) : str_cat(names[w], ", warp ", w));
    for (size_t i = 0; i < instructions; ++i) {
      const ptx::Instruction& source = program_.source(static_cast<int32_t>(i));
      timeline.places.push_back(str_cat(source.full_name(), ", ", place_text(program_.module(), source.location)));
      name_of_instruction_.push_back(-1);
    }
  }

  // Runs of instructions of the same name, and the waits between them.
  void draw_warp(int32_t row, const Warp& warp) {
    int64_t step = 0;
    auto wait = warp.waits.begin();
    for (size_t n = 0; n < warp.executed.size() || wait != warp.waits.end(); ++n) {
      for (; wait != warp.waits.end() && wait->at == n; ++wait) {
        add({row, Activity::wait, wait->begin, wait->end.step, name("wait"), n > 0 ? warp.executed[n - 1] : -1});
        if (wait->end.row >= 0)
          timeline.arrows.push_back(
              {wait->end.row, row, wait->end.happened, wait->end.step, wait->end.step - wait->begin});
        step = wait->end.step;
      }
      if (n == warp.executed.size()) break;
      const int32_t instruction = warp.executed[n], called = name_of(instruction);
      std::vector<Slice>& slices = timeline.slices;
      const bool goes_on = !slices.empty() && slices.back().row == row && slices.back().name == called &&
                           slices.back().end == step && slices.back().activity != Activity::wait;
      if (goes_on) {
        ++slices.back().end;
      } else {
        add({row, Activity::compute, step, step + 1, called, instruction});
      }
      ++step;
    }
    timeline.steps = std::max(timeline.steps, step);
  }

  void draw_operations(const std::vector<Operation>& operations, size_t warps) {
    std::array<int32_t, kUnits> rows{};
    rows.fill(-1);
    for (const Operation& operation : operations) {
      int32_t& row = rows[operation.unit];
      if (row < 0) row = 0;
    }
    for (int32_t unit = 0; unit < kUnits; ++unit) {
      if (rows[static_cast<size_t>(unit)] < 0) continue;
      rows[static_cast<size_t>(unit)] = static_cast<int32_t>(timeline.rows.size());
      timeline.rows.emplace_back(kUnitNames[unit]);
    }
    for (const Operation& o : operations) {
      const Activity activity = o.unit == kTensorCore ? Activity::matrix : Activity::copy;
      add({rows[o.unit], activity, o.begin, o.end, name_of(o.instruction), o.instruction});
      timeline.steps = std::max(timeline.steps, o.end);
    }
    for (Arrow& arrow : timeline.arrows) {
      const auto unit = static_cast<size_t>(arrow.from_row) - warps;
      if (static_cast<size_t>(arrow.from_row) >= warps) arrow.from_row = rows[unit];
    }
  }

  Timeline timeline;

 private:
  void add(const Slice& slice) { timeline.slices.push_back(slice); }

  int32_t name(const std::string& text) {
    const auto [entry, is_new] = numbers_.try_emplace(text, static_cast<int32_t>(timeline.names.size()));
    if (is_new) timeline.names.push_back(text);
    return entry->second;
  }
  int32_t name_of(int32_t instruction) {
    int32_t& known = name_of_instruction_[static_cast<size_t>(instruction)];
    if (known < 0) known = name(roles_.activity_at(instruction));
    return known;
  }

  const Program& program_;
  Roles roles_;
  std::map<std::string, int32_t> numbers_;
  std::vector<int32_t> name_of_instruction_;
};

}  // namespace

Timeline draw(const Program& program, const std::vector<Warp>& warps, const std::vector<Operation>& operations) {
  Drawing drawing(program, warps);
  for (size_t w = 0; w < warps.size(); ++w) drawing.draw_warp(static_cast<int32_t>(w), warps[w]);
  drawing.draw_operations(operations, warps.size());
  return std::move(drawing.timeline);
}

}  // namespace tandem::vgpu::trace
