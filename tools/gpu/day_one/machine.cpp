// Experiments that need no tensor core: the state of a GPU, planted faults, CTAs at once, clocks, compiled kernels.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>

#include "base/text.h"
#include "engine/gpu.h"
#include "lab.h"
#include "power.h"

namespace tandem::day_one {
namespace {

Outcome tiny(Lab& lab) {
  int n = 1000;
  const GpuBuffer to(lab.gpu(), "to", static_cast<size_t>(n) * 4, true);
  void* to_p = to.address();
  lab.launch("machine.cuh", "tiny", 1, {.blocks = 8}, {&to_p, &n}, {&to});
  const std::vector<int> got = to.read<int>();
  for (int i = 0; i < n; ++i)
    if (got[static_cast<size_t>(i)] != 3 * i + 1) return {Verdict::failed, "a tiny kernel computes wrong numbers"};
  return {Verdict::ok, str_cat(lab.properties().name, ", ", lab.properties().arch(), ", ", lab.properties().sm_count,
                               " SMs: a tiny kernel runs")};
}

// Spins far beyond the experiment's timeout, but for a bounded time.
Outcome stall(Lab& lab) {
  if (!lab.plants("stall")) return {Verdict::skipped, "only with --plant stall"};
  uint64_t duration = lab.is_virtual() ? 60'000'000'000u : 25'000'000'000u;
  const GpuBuffer to(lab.gpu(), "to", 4 * 4, true);
  void* to_p = to.address();
  lab.launch("machine.cuh", "spin", 1, {.blocks = 4, .threads = 32}, {&to_p, &duration}, {&to});
  lab.synchronize();
  return {Verdict::ok, "the planted stall ended before the timeout"};
}

Outcome fault(Lab& lab) {
  if (!lab.plants("fault")) return {Verdict::skipped, "only with --plant fault"};
  const GpuBuffer to(lab.gpu(), "to", 4, true);
  void* to_p = to.address();
  lab.launch("machine.cuh", "fault", 1, {.blocks = 1, .threads = 1}, {&to_p}, {&to});
  lab.synchronize();
  return {Verdict::ok, "the planted store to an illegal address went unnoticed"};
}

Outcome pairs_at_once(Lab& lab) {
  if (lab.properties().compute_major < 9) return {Verdict::skipped, "this GPU has no clusters"};
  const int ctas = lab.is_virtual() ? 8 : lab.properties().sm_count / 2 * 2;
  uint64_t duration = lab.is_virtual() ? 2'000'000'000u : 500'000'000u;
  const GpuBuffer arrived(lab.gpu(), "arrived", 4, true), together(lab.gpu(), "together", 4, true);
  void *arrived_p = arrived.address(), *together_p = together.address();
  const auto smem = static_cast<unsigned>(lab.properties().max_dynamic_smem_bytes);  // one CTA per SM
  lab.launch("machine.cuh", "rendezvous", 1,
             {.blocks = static_cast<unsigned>(ctas),
              .threads = 32,
              .dynamic_smem_bytes = smem,
              .cooperative = lab.is_virtual()},
             {&arrived_p, &together_p, &duration}, {&arrived, &together});
  const int count = together.read<int>().front();
  if (count == ctas) return {Verdict::ok, str_cat(ctas / 2, " pairs run at once, one CTA on each SM")};
  return {Verdict::failed,
          str_cat("of ", ctas / 2,
                  " pairs not all run at once: the second wave of a grid of pairs takes as long as the first")};
}

Outcome clock_under_load(Lab& lab) {
  if (lab.is_virtual()) return {Verdict::skipped, "time has no meaning on a virtual GPU"};
  const int blocks = 4 * lab.properties().sm_count;
  uint64_t duration = 1'000'000'000;
  const GpuBuffer to(lab.gpu(), "to", static_cast<size_t>(blocks) * 16, true);
  void* to_p = to.address();
  std::string text = "SM clock in MHz, each second under load:";
  std::optional<PowerMeter> power;
  for (int second = 0; second < 8; ++second) {
    if (second == 1) power.emplace(current_bus_id());  // the kernel is compiled in the first second
    lab.launch("machine.cuh", "clocks", 1, {.blocks = static_cast<unsigned>(blocks), .threads = 512},
               {&to_p, &duration}, {&to});
    const std::vector<int64_t> got = to.read<int64_t>();
    std::vector<double> rates;
    for (size_t i = 0; i + 1 < got.size(); i += 2)
      rates.push_back(1e3 * static_cast<double>(got[i]) / static_cast<double>(got[i + 1]));
    std::nth_element(rates.begin(), rates.begin() + rates.size() / 2, rates.end());
    text += str_cat(" ", static_cast<int>(rates[rates.size() / 2]));
  }
  text += str_cat("; without the first second ", power->average());
  return {Verdict::measured, text};
}

// As in kernels/charges.cuh.
constexpr unsigned kCharges = 8, kChargedBytes = 32768, kSlotsBytes = 16384;

Outcome charges(Lab& lab) {
  if (lab.properties().compute_major < 9) return {Verdict::skipped, "this GPU has no bulk additions"};
  const auto blocks = static_cast<unsigned>(lab.is_virtual() ? 2 : lab.properties().sm_count);
  const GpuBuffer to(lab.gpu(), "to", size_t{blocks} * kChargedBytes, true),
      semaphores(lab.gpu(), "semaphores", size_t{blocks} * 128, true),
      clocks(lab.gpu(), "clocks", size_t{blocks} * kCharges * 4, true);
  void *to_p = to.address(), *semaphores_p = semaphores.address(), *clocks_p = clocks.address();
  lab.launch("charges.cuh", "charges", 1, {.blocks = blocks, .threads = 32, .dynamic_smem_bytes = kSlotsBytes},
             {&to_p, &semaphores_p, &clocks_p}, {&to, &semaphores, &clocks});
  const std::vector<int> got = clocks.read<int>();
  if (lab.is_virtual()) return {Verdict::ok, "the kernel runs; time has no meaning on a virtual GPU"};
  constexpr const char* kNames[kCharges] = {"16 KiB added until complete (model 1144)",
                                            "until read",
                                            "fence at GPU scope (306)",
                                            "addition and a fence together",
                                            "load of a semaphore (487)",
                                            "release (573)",
                                            "dQ of a pair, release before the next additions (2782)",
                                            "release during them (2203)"};
  std::string text = "median clocks:";
  for (unsigned n = 0; n < kCharges; ++n) {
    std::vector<int> all;
    for (unsigned block = 0; block < blocks; ++block) all.push_back(got[block * kCharges + n]);
    std::ranges::nth_element(all, all.begin() + blocks / 2);
    text += str_cat(n == 0 ? " " : ", ", kNames[n], " ", all[blocks / 2]);
  }
  return {Verdict::measured, text};
}

// The registers of the main kernels as this compiler and driver have them. Kernels with setmaxnreg must begin with
// 65536 / threads registers, and none may spill.
Outcome registers(Lab& lab) {
  std::string text, wrong;
  for (const char* dims : {"64", "128", "256"}) {
    for (const tandem_pass pass : {TANDEM_FORWARD, TANDEM_BACKWARD}) {
      test::Instance instance(
          test::from_flags(str_cat("--dtype bf16 --align 8 --heads-q 64 --heads-k 64 --seqlen-q 512 "
                                   "--seqlen-k 512 --causal 1 --max-seqlen 0 --gradients qkv "
                                   "--head-dim ",
                                   dims, " --head-dim-v ", dims)));
      test::Outputs outputs = instance.outputs(pass);
      const Problem problem = instance.problem(pass, &outputs);
      const plan::Plan plan = plan::make_plan(problem, lab.properties(), plan::tuning_of(Env::get()));
      jit::KernelBuilder builder({}, Env::get(), jit::Cache::options(Env::get()));
      std::shared_ptr<const jit::Code> code;
      test::require(builder.build(request_of(plan.kernels[0], lab.properties()), &code));
      LoadedKernel loaded;
      test::require(load(lab.gpu().device(), plan.kernels[0], std::as_bytes(std::span(code->bytes)), &loaded));
      gpu::KernelAttributes attributes;
      test::require(loaded.module->attributes(loaded.at(plan::EntryId::main), &attributes));
      const std::string name = plan::name_of(plan.kernels[0]);
      std::printf("%s: %d registers, %d bytes of local memory, %d threads\n", name.c_str(), attributes.registers,
                  attributes.local_bytes, attributes.max_threads);
      const auto main = std::ranges::find(plan.launches, plan::EntryId::main, &plan::PlannedLaunch::entry);
      const int wanted = 65536 / static_cast<int>(main->block) / 8 * 8;
      const bool right =
          !lab.is_blackwell() || lab.is_virtual() || (attributes.local_bytes == 0 && attributes.registers == wanted);
      if (!right && wrong.empty())
        wrong = str_cat(name, " has ", attributes.registers, " registers and ", attributes.local_bytes,
                        " bytes of local memory, must have ", wanted, " and 0");
      text = builder.compiler_name();
    }
  }
  if (!wrong.empty()) return {Verdict::failed, str_cat(text, ": ", wrong)};
  return {Verdict::ok, str_cat(text, ", driver ", lab.properties().driver_version / 1000, ".",
                               lab.properties().driver_version % 1000 / 10, ": the main kernels load",
                               lab.is_virtual() || !lab.is_blackwell() ? "" : " with their registers and no spills")};
}

}  // namespace

std::vector<Experiment> machine_experiments() {
  return {{"tiny", tiny},         {"stall", stall},          {"fault", fault},  {"e0", charges},
          {"e11", pairs_at_once}, {"e12", clock_under_load}, {"e13", registers}};
}

}  // namespace tandem::day_one
