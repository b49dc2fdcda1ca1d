#include "cli/machine_code.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <iterator>

#include "base/text.h"
#include "cli/io/file.h"
#include "cli/svg/timeline.h"
#include "cli/terminal.h"
#include "cli/vgpu/perfetto.h"
#include "engine/gpu.h"
#include "jit/compiler.h"
#include "plan/explain.h"
#include "sass/cli/report.h"
#include "sass/src/nvdisasm.h"

namespace tandem::tool {
namespace {

using machine_code::Shape;

Examined examine(const std::string& file, bool whole) {
  std::string text;
  throw_if_failed(machine_code::disassemble(file, machine_code::Places::get(), &text));
  Examined examined;
  examined.name = std::filesystem::path(file).stem().string();
  throw_if_failed(machine_code::parse(text, &examined.cubin));
  throw_if_failed(machine_code::cost_model(examined.cubin, {}, whole, &examined.cost_model));
  return examined;
}

// Returns the tile of one block. Two CTAs that issue one MMA have twice the rows.
Shape shape_of(const plan::ForwardKernel& tile) {
  const int rows = tile.tile_m() / tile.ctas();
  Shape shape{.head_dim = tile.head_dim, .head_dim_v = tile.head_dim_v, .rows = rows, .keys = tile.tile_n};
  // Blackwell's ring has separate blocks for columns of keys and for rows of values.
  if (tile.blackwell()) shape.load_waits = tile.for_blackwell().k_blocks() + tile.for_blackwell().v_blocks();
  return shape;
}

Shape shape_of(const plan::BackwardKernel& tile) {
  return {.head_dim = tile.head_dim, .head_dim_v = tile.head_dim_v, .backward = true};
}

void write(const std::string& path, std::string_view text) {
  io::AtomicFile file(path);
  file.write(text);
  file.commit();
}

// Compiles the kernels of a problem again, because the time of a first call is one of the figures. Kernels compile in
// parallel, so that the longest time counts. save: a file for the first cubin, or "".
Examined examine(const plan::Plan& plan, tandem_pass pass, gpu::Properties device, bool whole,
                 const std::string& save) {
  setenv("CUDA_CACHE_DISABLE", "1", 1);     // NVRTC has a separate cache
  device.image = gpu::Image::machine_code;  // a virtual device also gets machine code
  const auto seconds_since = [](std::clock_t start) {
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  };
  const std::clock_t start = std::clock();
  std::unique_ptr<jit::Compiler> compiler;
  throw_if_failed(
      jit::Compiler::open({.site_packages = {}, .newest_major = device.driver_version / 1000}, Env::get(), &compiler));
  const double found = seconds_since(start);
  Examined examined;
  for (const plan::PlannedKernel& kernel : plan.kernels) {
    const jit::Request request = request_of(kernel, device);
    const std::clock_t begin = std::clock();
    const std::vector<jit::Text> headers = jit::included_by(request.source, jit::kernels());
    std::string cubin, log, text;
    throw_if_failed(compiler->compile(request, headers, &cubin, &log));
    examined.compile_seconds = std::max(examined.compile_seconds, found + seconds_since(begin));
    throw_if_failed(machine_code::disassemble_bytes(cubin, machine_code::Places::get(), &text));
    machine_code::Cubin parsed;
    throw_if_failed(machine_code::parse(text, &parsed));
    if (&kernel == plan.kernels.begin()) {
      if (!save.empty()) write(save, cubin);
      examined.name = request.name;
      examined.cubin = std::move(parsed);
    } else {
      std::ranges::move(parsed.kernels, std::back_inserter(examined.cubin.kernels));
    }
  }
  examined.compiler = str_cat("NVRTC ", compiler->major(), ".", compiler->minor());
  examined.shared_bytes =
      plan::find_entry(plan.kernels[0].configuration, plan::Unit::main, plan::EntryId::main).shared_bytes;
  const Shape shape = pass == TANDEM_FORWARD ? shape_of(plan.forward.tile) : shape_of(plan.backward.tile);
  throw_if_failed(machine_code::cost_model(examined.cubin, shape, whole, &examined.cost_model));
  return examined;
}

// Returns the tiles of a forward, and their iterations over keys.
Grid grid_of(const Planned& planned, const gpu::Properties& device) {
  const plan::ForwardKernel& tile = planned.plan->forward.tile;
  const plan::Floor floor = plan::floor_of(planned.problem, *planned.plan, device);
  const auto& q = planned.inputs.q.shape();
  const double rows = static_cast<double>(q[0]) * static_cast<double>(q[1]) * static_cast<double>(q[2]);
  const double keys = static_cast<double>(planned.inputs.k.shape()[1]);
  Grid grid{
      .tiles = std::ceil(rows / tile.tile_m()) * tile.ctas(), .flops = floor.flops, .multiprocessors = device.sm_count};
  grid.longest_first = floor.pairs < 0.99 * rows * keys;
  const double tile_rows = 1.0 * tile.tile_m() / tile.ctas();
  grid.tile_bytes = 2 * tile_rows * (tile.head_dim + tile.head_dim_v);
  // At the diagonal half of the iterations that a tile crosses is hidden.
  grid.steps = floor.pairs / (tile_rows * tile.tile_n) +
               (grid.longest_first ? 0.5 * grid.tiles * std::max(1.0, tile_rows / tile.tile_n) : 0);
  return grid;
}

// Returns the waits of a backward. A cubin's kernel runs in the order of the plan.
std::optional<Turns> turns_of(const Planned& planned, const gpu::Properties& device, const Modelled& model) {
  constexpr double kLeast = 0.6, kMax = 1.6;
  const auto waiting = [&](double times) {
    HandOver hand_over = hand_over_of(model);
    hand_over.adds *= times, hand_over.busy *= times, hand_over.visible *= times;
    const plan::BackwardSchedule& tiling = planned.plan->backward;
    return waiting_of(planned.problem, tiling, model.clocks.step + adding_clocks(tiling.tile), hand_over);
  };
  const std::optional<Waiting> usual = waiting(1);
  if (!usual) return std::nullopt;
  return Turns{.waiting = *usual,
               .least = waiting(kLeast)->share(),
               .most = waiting(kMax)->share(),
               .flops = plan::floor_of(planned.problem, *planned.plan, device).flops};
}

// Returns a title: the GPU, the pass and the problem.
std::string title_of(const Planned& planned, const gpu::Properties& device, tandem_pass pass) {
  const auto &q = planned.inputs.q.shape(), &k = planned.inputs.k.shape(), &v = planned.inputs.v.shape();
  std::string text = str_cat(device.name, ", ", pass == TANDEM_FORWARD ? "forward" : "backward", ": batch ", q[0], ", ",
                             q[2], q[2] == 1 ? " head" : " heads");
  if (k[2] != q[2]) text += str_cat(" (", k[2], " of keys)");
  text += str_cat(", ", q[1], " queries, ", k[1], " keys, head_dim ", q[3]);
  if (v[3] != q[3]) text += str_cat(" and ", v[3]);
  return text + str_cat(", ", name_of(planned.inputs.q.dtype()));
}

std::string picture_of(const Examined& examined, const Modelled& model, const std::string& title) {
  ModelledTimeline drawn = timeline_of(model, machine_code::kernel_of(examined.cubin));
  return svg::draw(drawn.timeline, {.title = title,
                                    .where = str_cat("One CTA of ", model.name),
                                    .unit = "clocks",
                                    .iterations = std::move(drawn.iterations)});
}

}  // namespace

std::string picture_of(const ProblemFlags& problem, const gpu::Properties& device, tandem_pass pass) {
  const Planned planned(problem, device, pass);
  const Examined examined = examine(*planned.plan, pass, device, false, "");
  return picture_of(examined, model_of(examined), title_of(planned, device, pass));
}

void MachineCodeFlags::print_clocks(const Examined& examined, const Modelled& model, const WholeProblem& problem,
                                    const std::string& title) const {
  if (!timeline.empty()) {
    write(timeline, timeline.ends_with(".svg")
                        ? picture_of(examined, model, title)
                        : perfetto_json(timeline_of(model, machine_code::kernel_of(examined.cubin)).timeline));
  }
  if (json == "-") {
    std::printf("%s", timing_json(model, problem).c_str());
    return;
  }
  std::printf("%s\n", timing_report(model, problem).c_str());
  if (!json.empty()) write(json, timing_json(model, problem));
}

void MachineCodeFlags::add_to(Command app) {
  constexpr const char* group = "Machine code";
  app.flag("--machine-code", wanted, "Cost of the kernel's machine code by unit").group(group);
  app.flag("--clocks", clocks, "Clocks of a step by reason, from a timing model of the machine code").group(group);
  app.option("--clocks-timeline", timeline, "Draw the modelled run: FILE.svg, or JSON for ui.perfetto.dev")
      .group(group);
  app.option("--cubin", cubin, "Examine this file instead of a problem's kernel").group(group);
  app.option("--beside", beside, "Compare with the figures of these files").group(group);
  app.option("--path", path, "likely: the instructions that an iteration executes; all: every instruction of the loop")
      .one_of({"likely", "all"})
      .group(group);
  app.option("--save-cubin", save, "Write the problem's kernel to this file").group(group);
  app.option("--json", json, "Write the figures to this file; -: print JSON instead of tables").group(group);
}

int MachineCodeFlags::run(const ProblemFlags& problem, const CardFlags& card, tandem_pass pass) const {
  io::check_output_file("--clocks-timeline", timeline);
  io::check_output_file("--save-cubin", save);
  if (json != "-") io::check_output_file("--json", json);
  const bool whole = path == "all";
  std::vector<Examined> all;
  gpu::Properties device;
  std::optional<Planned> planned;
  if (!cubin.empty()) {
    all.push_back(examine(cubin, whole));
  } else {
    device = card.properties();
    planned.emplace(problem, device, pass);
    if (!planned->plan) {
      std::printf("%s", kNothingToDo);
      return 0;
    }
    all.push_back(examine(*planned->plan, pass, device, whole, save));
  }
  for (const std::string& file : beside) all.push_back(examine(file, whole));
  if (clocks || !timeline.empty()) {
    for (const Examined& examined : all) {
      const Modelled model = model_of(examined);
      WholeProblem whole_problem;
      std::string title = str_cat("Cubin ", examined.name);
      const bool own = planned && &examined == &all.front();
      if (own) title = title_of(*planned, device, pass);
      if (own && pass == TANDEM_FORWARD) whole_problem.grid = grid_of(*planned, device);
      const bool in_order = model.dq && model.dq->hand_over > 0;
      if (planned && pass == TANDEM_BACKWARD && (own || in_order))
        whole_problem.turns = turns_of(*planned, device, model);
      print_clocks(examined, model, whole_problem, title);
    }
    return 0;
  }
  if (json == "-") {
    std::printf("%s", json_of(all).c_str());
    return 0;
  }
  std::printf("%s", beside.empty() ? report_of(all.front()).c_str() : comparison_of(all).c_str());
  if (json.empty()) return 0;
  write(json, json_of(all));
  std::printf("\nwrote %s\n", json.c_str());
  return 0;
}

}  // namespace tandem::tool
