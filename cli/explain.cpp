// tandem explain: the plan of a GPU for a problem, its reasons, and a lower bound of its time.
#include "plan/explain.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <utility>

#include "base/text.h"
#include "cli/cards.h"
#include "cli/machine_code.h"
#include "cli/terminal.h"

namespace tandem::tool {
namespace {

// Bytes per clock of bulk copies from the L2 cache to one SM, measured on an H200 while all SMs load. memory_share is
// the share of the memory's pin rate.
constexpr double l2_bytes_per_clock = 36, memory_share = 0.95;

struct Unit {
  const char* name;
  std::string work;
  double clocks;
};

std::vector<Unit> units_of(const plan::Floor& floor, const gpu::Properties& device) {
  const double sms = device.sm_count, hertz = 1e3 * device.clock_khz;
  const double memory_rate = 2e3 * device.memory_clock_khz * device.memory_bus_bits / 8 * memory_share;
  return {{"tensor core", si_text(floor.flops, "FLOP"), floor.mma_clocks},
          {"exponentials", si_text(floor.pairs, ""), floor.exp_clocks},
          {"shared memory", bytes_text(floor.shared_clocks * 128 * sms), floor.shared_clocks},
          {"L2 cache", bytes_text(floor.l2_bytes), floor.l2_bytes / l2_bytes_per_clock / sms},
          {"HBM", bytes_text(floor.hbm_bytes), floor.hbm_bytes / memory_rate * hertz}};
}

void print_floor(const plan::Floor& floor, const gpu::Properties& device) {
  const std::vector<Unit> units = units_of(floor, device);
  const Unit& most = *std::ranges::max_element(units, {}, &Unit::clocks);
  const double hertz = 1e3 * device.clock_khz;
  if (most.clocks <= 0) return;
  Table table({"floor", "work", "clocks", "time", ""});
  for (const Unit& unit : units) {
    constexpr double widest = 32;
    const auto length = static_cast<size_t>(std::lround(widest * unit.clocks / most.clocks));
    std::string bar = std::string(length, '#') + std::string(static_cast<size_t>(widest) - length, ' ');
    table.add({unit.name, unit.work, fixed(unit.clocks, 0), seconds_text(unit.clocks / hertz), std::move(bar)});
  }
  std::printf("%s\nAt least %s at %d MHz, which is %s: %s binds.%s\n", table.text().c_str(),
              seconds_text(most.clocks / hertz).c_str(), device.clock_khz / 1000,
              rate_text(floor.flops, most.clocks / hertz).c_str(), most.name,
              floor.at_bounds ? " Lengths that only the device knows count as their bounds." : "");
}

struct Explain {
  ProblemFlags problem;
  CardFlags card;
  MachineCodeFlags machine_code;
  bool backward = false;
  Explain() { problem.dtype = "bf16"; }

  int run() const;
};

int Explain::run() const {
  const tandem_pass pass = backward ? TANDEM_BACKWARD : TANDEM_FORWARD;
  if (machine_code.asked()) return machine_code.run(problem, card, pass);
  const gpu::Properties device = card.properties();
  const Planned planned(problem, device, pass);
  const Inputs& in = planned.inputs;
  std::printf("q %s  k %s  v %s  %s\non %s, %d SMs, %d MHz\n\n", io::shape_text(in.q.shape()).c_str(),
              io::shape_text(in.k.shape()).c_str(), io::shape_text(in.v.shape()).c_str(), problem.dtype.c_str(),
              device.name.c_str(), device.sm_count, device.clock_khz / 1000);
  if (!planned.plan) {
    std::printf("%s", kNothingToDo);
    return 0;
  }
  const plan::Plan& plan = *planned.plan;
  constexpr size_t indent = 11;
  std::string text;
  for (const plan::PlannedKernel& kernel : plan.kernels) text += entry("kernel", plan::name_of(kernel), indent);
  for (const std::string& reason : plan::reasons(planned.problem, plan, device)) {
    const size_t colon = reason.find(": ");
    text += entry(reason.substr(0, colon), reason.substr(colon + 2), indent);
  }
  if (plan.launches.size() > 1) {
    std::string name = "launches";
    for (const std::string& line : plan::launches(plan)) text += entry(std::exchange(name, ""), line, indent);
  }
  text += entry("workspace", bytes_text(static_cast<double>(plan.workspace_bytes)), indent);
  std::printf("%s\n", text.c_str());
  print_floor(plan::floor_of(planned.problem, plan, device), device);
  return 0;
}

}  // namespace

void add_explain(Command app) {
  auto explain = std::make_shared<Explain>();
  Command command = app.add("explain", "The plan of a GPU for a problem, its reasons, and its least time");
  std::string footer = R"(Examples:
  tandem explain --seqlen 4096 --heads 16 --head-dim 128 --causal
  tandem explain --preset llama --card h100               no GPU is needed
  tandem explain --lengths-q 300,4000,12 --heads 32 --heads-k 8 --head-dim 128 --causal
  tandem explain --preset llama --backward                the gradients' kernels
  tandem explain --machine-code --preset llama            what its instructions cost each unit
  tandem explain --cubin other.cubin                      the same of any attention kernel
  tandem explain --preset llama --beside other.cubin      both side by side

Presets:
)";
  for (const Preset& preset : presets())
    footer += str_cat("  ", preset.name, std::string(16 - std::string(preset.name).size(), ' '), preset.what, "\n");
  footer += R"(
The lower bound of a unit is its least work, in clocks of every SM. Units work in parallel, so the largest bound is the
least time. Only visible keys count, as if tiles had no edges. nvdisasm reads machine code (pip install
nvidia-cuda-nvdisasm); sass/docs/machine-code.md explains the figures.
Exit code: 0, or 2 when the GPU does not support the problem.)";
  command.footer(footer);
  command.flag("--backward", explain->backward, "The gradients of q, k, v and of the other inputs");
  explain->card.add_to(command);
  explain->machine_code.add_to(command);
  explain->problem.add_presets_to(command);
  explain->problem.add_to(command);
  command.run([explain] { return explain->run(); });
}

}  // namespace tandem::tool
