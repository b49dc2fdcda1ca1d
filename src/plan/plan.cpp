#include "plan/plan.h"

#include <bit>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "plan/arch_planner.h"
#include "plan/arguments.h"
#include "plan/backward.h"
#include "plan/forward.h"
#include "problem/bound_expression.h"

namespace tandem::plan {

namespace {
constexpr ForwardPass kForward;
constexpr BackwardPass kBackward;

bool captured_per_tile(const Configuration& configuration) {
  return std::visit(
      [](const auto& t) {
        if constexpr (requires { t.captured_per_tile; }) return t.captured_per_tile;
        return false;
      },
      configuration);
}

// Clears the fields that Unit::prepost does not read, so that kernels that differ only in these fields share the unit.
Configuration prepost_of(Configuration configuration) {
  std::visit(
      [](auto& t) {
        if constexpr (requires { t.captured; }) {
          t.q_stages = t.dout_stages = 1;
          t.store_from_registers = t.captured = t.captured_per_tile = false;
          if constexpr (requires { t.captured_per_score; }) t.captured_per_score = false;
          if constexpr (requires { t.exact_n; }) t.exact_n = t.wait_products = false;
          ScoreOptions& o = t.options;
          o.scale_outside_exp2 = o.softcap = o.alibi = o.score_mod = o.mask_mod = o.placed = false;
          // The sums of a split n_block depend on the order of tiles and on the scale of dropout.
          if (t.m_split) return;
          t.spt = o.dropout = false;
          o.bias = Bias::none;
        }
      },
      configuration);
  return configuration;
}
}  // namespace

const Pass* pass_of(tandem_pass pass) {
  if (pass == TANDEM_FORWARD) return &kForward;
  return &kBackward;
}

// Not inline, because memset() with a size unknown to the compiler is the fastest way to zero a kilobyte.
void* Arguments::zeroed(size_t bytes) {
  const size_t begin = (used_ + kAlignment - 1) / kAlignment * kAlignment;
  if (begin + bytes > kBytes) throw std::length_error("kernel parameters: Arguments::kBytes is too small");
  used_ = begin + bytes;
  return of_kernel_.push_back(std::memset(memory_ + begin, 0, bytes));
}

// A hash identifies an expression. The hash is almost certainly unique.
PlannedKernel kernel_of(const Problem& p, const Configuration& configuration, Unit unit) {
  const Configuration own = unit == Unit::prepost ? prepost_of(configuration) : configuration;
  // Configuration ids do not use the two highest bits (combinations() in fields.h).
  const uint64_t of_unit = static_cast<uint64_t>(unit) << 62;
  PlannedKernel kernel{.configuration = own, .unit = unit, .id = id_of(own) + of_unit};
  if (unit == Unit::prepost) return kernel;  // this unit reads no score
  if (p.score_mod) {
    kernel.score_mod = p.score_mod->program.get();
    kernel.id += kernel.score_mod->cuda_hash;
  }
  if (p.mask_mod) {
    kernel.mask_mod = p.mask_mod->program.get();
    kernel.id += std::rotl(kernel.mask_mod->cuda_hash, 32);
  }
  return kernel;
}

std::string name_of(const PlannedKernel& kernel) {
  std::string name = name_of(kernel.configuration);
  if (kernel.unit == Unit::prepost) name += "_ends";
  if (kernel.unit == Unit::dbias) name += "_dbias";
  for (const score_mod::Program* mod : {kernel.score_mod, kernel.mask_mod}) {
    if (mod == nullptr) continue;
    char hash[20];
    std::snprintf(hash, sizeof hash, "_%016" PRIx64, mod->cuda_hash);
    name += hash;
  }
  return name;
}

std::string translation_unit(const PlannedKernel& kernel) {
  std::string functions;
  for (const score_mod::Program* mod : {kernel.score_mod, kernel.mask_mod}) {
    if (mod != nullptr) functions += mod->cuda + "\n";
  }
  if (kernel.score_mod != nullptr && captured_per_tile(kernel.configuration))
    functions += kernel.score_mod->cuda_ranges + "\n";
  return translation_unit(kernel.configuration, functions, kernel.unit);
}

bool overlaps_launches(const gpu::Properties& device, const Tuning& tuning) {
  return planner_for(device).overlaps_launches(tuning);
}

Plan make_plan(const Problem& problem, const gpu::Properties& device, const Tuning& tuning) {
  Plan plan;
  plan.pass = pass_of(problem.pass);
  plan.pass->plan(problem, device, tuning, &plan);
  if (!overlaps_launches(device, tuning)) {
    for (PlannedLaunch& launch : plan.launches) launch.overlap_previous = false;
  }
  return plan;
}

}  // namespace tandem::plan
