// Draws the modelled run of one CTA: a row for each warpgroup or special warp, and one for the tensor core.
#include <algorithm>
#include <map>

#include "base/text.h"
#include "sass/cli/timing.h"
#include "sass/src/units.h"

namespace tandem::tool {
namespace {

using machine_code::Cause;
using machine_code::Delay;
using machine_code::Instruction;
using machine_code::Issue;
using machine_code::Kernel;
using machine_code::Product;
using machine_code::Role;
using machine_code::WarpTrace;

constexpr double kLongWait = 24;  // clocks
constexpr size_t kRun = 24;       // instructions that share one name

// The work that characterises a run of instructions.
struct Mix {
  int products = 0, copies = 0, exponentials = 0, maxima = 0, conversions = 0, memory = 0;

  void count(const Instruction& instruction) {
    const std::string_view base = instruction.base();
    products += is_product(instruction);
    copies += base.starts_with("UTMALD") || base.starts_with("UBLKCP");
    exponentials += base == "MUFU";
    maxima += base.starts_with("FMNMX");
    conversions += base == "F2FP";
    const machine_code::Unit unit = unit_of(instruction);
    memory += unit == machine_code::Unit::memory || unit == machine_code::Unit::shared_memory ||
              unit == machine_code::Unit::tensor_memory;
  }
  const char* name() const {
    if (products > 0) return "issues products";
    if (copies > 0) return "starts copies";
    if (exponentials >= 4) return "exp2";
    if (maxima >= 6) return "row maxima";
    if (conversions >= 6) return "conversions";
    return memory >= 4 ? "loads, stores" : "arithmetic";
  }
};

const char* cause_of_wait(Delay delay) {
  switch (delay) {
    case Delay::order: return "waits for: earlier instruction";
    case Delay::turn: return "waits for: other warps";
    case Delay::unit: return "waits for: busy unit";
    case Delay::latency: return "waits for: result";
    case Delay::products: return "waits for: tensor core";
    case Delay::copies: return "waits for: copies";
    case Delay::barrier: return "waits for: barrier";
    case Delay::fences: return "waits for: fence";
  }
  return "waits";
}

class Drawing {
 public:
  Drawing(const Modelled& model, const Kernel& kernel) : model_(model), kernel_(kernel) {}

  ModelledTimeline draw() {
    timeline_.title = str_cat(model_.name, ", modelled");
    for (size_t w = 0; w < model_.run.warps.size(); ++w) {
      if (is_drawn(model_.run.warps[w])) add_row(w);
    }
    tensor_ = static_cast<int32_t>(timeline_.rows.size());
    timeline_.rows.emplace_back("tensor core");
    for (const auto& [w, row] : rows_) add_warp(w, row);
    add_products();
    return {std::move(timeline_), iterations()};
  }

 private:
  // The four warps of a warpgroup execute the same code, and the first one represents them.
  static bool is_drawn(const WarpTrace& trace) {
    if (trace.block > 0) return false;
    return trace.warp % 4 == 0 || !in_warpgroup(trace);
  }

  static bool in_warpgroup(const WarpTrace& trace) { return trace.role != Role::mma && trace.role != Role::load; }

  static std::string warps_of(const WarpTrace& trace) {
    return in_warpgroup(trace) ? str_cat("warps ", trace.warp, " to ", trace.warp + 3) : str_cat("warp ", trace.warp);
  }

  void add_row(size_t w) {
    const WarpTrace& trace = model_.run.warps[w];
    rows_[w] = static_cast<int32_t>(timeline_.rows.size());
    timeline_.rows.push_back(str_cat(name_of(trace.role), ", ", warps_of(trace)));
  }

  int32_t index_of(const std::string& name) {
    const auto [found, is_new] = names_.try_emplace(name, static_cast<int32_t>(timeline_.names.size()));
    if (is_new) timeline_.names.push_back(name);
    return found->second;
  }

  void add(int32_t row, vgpu::Activity activity, double begin, double end, const std::string& name) {
    const auto from = static_cast<int64_t>(begin), to = static_cast<int64_t>(end);
    if (to <= from) return;
    vgpu::Slice* last = timeline_.slices.empty() ? nullptr : &timeline_.slices.back();
    const int32_t index = index_of(name);
    timeline_.steps = std::max(timeline_.steps, to);
    const bool goes_on = activity == vgpu::Activity::compute && last != nullptr && last->row == row &&
                         last->activity == activity && last->name == index && last->end == from;
    if (goes_on) {
      last->end = to;
    } else {
      timeline_.slices.push_back({.row = row, .activity = activity, .begin = from, .end = to, .name = index});
    }
  }

  void add_warp(size_t w, int32_t row) {
    const std::vector<Issue>& issues = model_.run.issues[w];
    if (issues.empty()) return;
    double begin = issues[0].time;
    Mix mix;
    size_t count = 0;
    const auto finish = [&](double end) {
      add(row, vgpu::Activity::compute, begin, end, mix.name());
      mix = {};
      count = 0;
    };
    for (size_t k = 0; k < issues.size(); ++k) {
      const double before = k == 0 ? begin : issues[k - 1].time, time = issues[k].time;
      if (time - before >= kLongWait) {
        finish(before);
        add(row, vgpu::Activity::wait, before, time, cause_of_wait(issues[k].cause.delay));
        add_arrow(issues[k], row, time - before);
        begin = time;
      } else if (count >= kRun) {
        finish(time);
        begin = time;
      }
      mix.count(kernel_.code[static_cast<size_t>(model_.run.warps[w].events[k].instruction)]);
      ++count;
    }
    finish(issues.back().time);
  }

  // Returns the row of a warp or of its warpgroup; -1: another CTA.
  int32_t row_of(size_t w) const {
    const WarpTrace& trace = model_.run.warps[w];
    for (const auto& [drawn, row] : rows_) {
      const WarpTrace& first = model_.run.warps[drawn];
      const bool same_group = in_warpgroup(trace) && first.warp == trace.warp - trace.warp % 4;
      if (trace.block == 0 && (drawn == w || same_group)) return row;
    }
    return -1;
  }

  // Barriers and products end waits of which the picture has the cause.
  void add_arrow(const Issue& issue, int32_t row, double waited) {
    const Cause& cause = issue.cause;
    vgpu::Arrow arrow{.to_row = row, .to = static_cast<int64_t>(issue.time), .waited = static_cast<int64_t>(waited)};
    if (cause.product >= 0) {
      const Product& product = model_.run.products[static_cast<size_t>(cause.product)];
      if (model_.run.warps[static_cast<size_t>(product.warp)].block > 0) return;
      arrow.from_row = tensor_;
      arrow.from = static_cast<int64_t>(product.finish);
    } else if (cause.delay == Delay::barrier && cause.warp >= 0) {
      arrow.from_row = row_of(static_cast<size_t>(cause.warp));
      arrow.from = static_cast<int64_t>(model_.run.issues[static_cast<size_t>(cause.warp)][cause.event].time);
      if (arrow.from_row < 0) return;
    } else {
      return;
    }
    timeline_.arrows.push_back(arrow);
  }

  void add_products() {
    for (const Product& p : model_.run.products) {
      const WarpTrace& by = model_.run.warps[static_cast<size_t>(p.warp)];
      const bool in_registers = !in_tensor_memory(kernel_.code[static_cast<size_t>(by.events[p.event].instruction)]);
      // One scheduler represents the four schedulers of an SM.
      if (p.multiprocessor > 0 || (in_registers && by.warp % 4 != 0)) continue;
      add(tensor_, vgpu::Activity::matrix, p.start, p.finish, str_cat("of ", warps_of(by)));
    }
  }

  std::vector<int64_t> iterations() const {
    std::vector<int64_t> begins;
    for (const auto& [w, row] : rows_) {
      const WarpTrace& trace = model_.run.warps[w];
      if (trace.role != Role::softmax && trace.role != Role::computing) continue;
      for (size_t turn = 0; turn < trace.turns.size(); ++turn) {
        const double time = model_.run.time_of_turn(w, turn);
        if (time < 0) break;
        begins.push_back(static_cast<int64_t>(time));
      }
      if (!begins.empty()) break;
    }
    return begins;
  }

  const Modelled& model_;
  const Kernel& kernel_;
  vgpu::Timeline timeline_;
  std::map<std::string, int32_t> names_;
  std::map<size_t, int32_t> rows_;  // by warp of the simulation
  int32_t tensor_ = 0;
};

}  // namespace

ModelledTimeline timeline_of(const Modelled& model, const Kernel& kernel) { return Drawing(model, kernel).draw(); }

}  // namespace tandem::tool
