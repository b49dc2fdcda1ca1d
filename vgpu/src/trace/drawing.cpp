#include "vgpu/src/trace/drawing.h"

#include <algorithm>

#include "base/text.h"
#include "vgpu/src/ptx/inlining.h"
#include "vgpu/src/trace/roles.h"

namespace tandem::vgpu::trace {
namespace {

constexpr const char* kUnitNames[kUnits] = {"copies in", "copies out", "cp.async", "tensor core", "tensor memory"};

class Drawing {
 public:
  Drawing(const Program& program, const std::vector<TracedWarp>& warps, const std::vector<TracedOperation>& operations,
          int32_t first_block, int32_t blocks)
      : program_(program), roles_(program) {
    size_t instructions = 0;
    for (const TracedWarp& warp : warps) {
      for (const int32_t i : warp.executed) instructions = std::max(instructions, static_cast<size_t>(i) + 1);
    }
    std::vector<std::vector<uint32_t>> counts(warps.size(), std::vector<uint32_t>(instructions));
    for (size_t w = 0; w < warps.size(); ++w) {
      for (const int32_t i : warps[w].executed) ++counts[w][static_cast<size_t>(i)];
    }
    const std::vector<std::string> names = roles_.of_warps(counts);
    const size_t of_block = warps.size() / static_cast<size_t>(blocks);
    rows_.resize(warps.size() + static_cast<size_t>(blocks) * kUnits, -1);
    for (const TracedOperation& o : operations)
      rows_[warps.size() + static_cast<size_t>(o.block * kUnits + o.unit)] = 0;
    const auto add_row = [&](size_t number, const std::string& name, int32_t block) {
      rows_[number] = static_cast<int32_t>(timeline.rows.size());
      timeline.rows.push_back(blocks == 1 ? name : str_cat("block ", first_block + block, ": ", name));
    };
    for (int32_t block = 0; block < blocks; ++block) {
      for (size_t w = 0; w < of_block; ++w) {
        const size_t number = static_cast<size_t>(block) * of_block + w;
        add_row(number, names[number].empty() ? str_cat("warp ", w) : str_cat(names[number], ", warp ", w), block);
      }
      for (size_t unit = 0; unit < kUnits; ++unit) {
        const size_t number = warps.size() + static_cast<size_t>(block) * kUnits + unit;
        if (rows_[number] == 0) add_row(number, kUnitNames[unit], block);
      }
    }
    for (size_t i = 0; i < instructions; ++i) {
      const ptx::Instruction& source = program_.source(static_cast<int32_t>(i));
      timeline.places.push_back(str_cat(source.full_name(), ", ", place_text(program_.module(), source.location)));
      name_of_instruction_.push_back(-1);
    }
  }

  // Draws runs of instructions of the same name, and the waits between them.
  void draw_warp(size_t number, const TracedWarp& warp) {
    const int32_t row = rows_[number];
    int64_t step = 0;
    auto wait = warp.waits.begin();
    for (size_t n = 0; n < warp.executed.size() || wait != warp.waits.end(); ++n) {
      for (; wait != warp.waits.end() && wait->at == n; ++wait) {
        add({row, Activity::wait, wait->begin, wait->end.step, name("wait"), n > 0 ? warp.executed[n - 1] : -1});
        if (wait->end.row >= 0)
          timeline.arrows.push_back({rows_[static_cast<size_t>(wait->end.row)], row, wait->end.happened, wait->end.step,
                                     wait->end.step - wait->begin});
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

  void draw_operations(const std::vector<TracedOperation>& operations, size_t warps) {
    for (const TracedOperation& o : operations) {
      const Activity activity = o.unit == kTensorCore ? Activity::matrix : Activity::copy;
      const int32_t row = rows_[warps + static_cast<size_t>(o.block * kUnits + o.unit)];
      add({row, activity, o.begin, o.end, name_of(o.instruction), o.instruction});
      timeline.steps = std::max(timeline.steps, o.end);
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
  std::vector<int32_t> rows_;  // rows of the timeline, by the numbers of marks; -1: no event
};

}  // namespace

Timeline draw(const Program& program, const std::vector<TracedWarp>& warps,
              const std::vector<TracedOperation>& operations, int32_t first_block, int32_t blocks) {
  Drawing drawing(program, warps, operations, first_block, blocks);
  for (size_t w = 0; w < warps.size(); ++w) drawing.draw_warp(w, warps[w]);
  drawing.draw_operations(operations, warps.size());
  return std::move(drawing.timeline);
}

}  // namespace tandem::vgpu::trace
