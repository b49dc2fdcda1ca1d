#include "cli/cards.h"

#include <algorithm>

#include "base/text.h"
#include "cli/gpu.h"
#include "cli/io/tensor.h"
#include "gpu/driver/driver.h"
#include "gpu/virtual.h"
#include "vgpu/src/device.h"

namespace tandem::tool {
namespace {

struct Card {
  const char *key, *name;
  int32_t sm_count, clock_khz, memory_clock_khz, memory_bus_bits;
  int64_t l2_bytes, memory_bytes;
};

constexpr int64_t MiB = int64_t{1} << 20, GiB = int64_t{1} << 30;
constexpr Card cards[] = {
    {"h200", "NVIDIA H200", 132, 1'980'000, 3'201'000, 6144, 60 * MiB, 141 * GiB},
    {"h100", "NVIDIA H100 80GB HBM3", 132, 1'980'000, 2'619'000, 5120, 50 * MiB, 80 * GiB},
    {"h100-pcie", "NVIDIA H100 PCIe", 114, 1'755'000, 1'593'000, 5120, 50 * MiB, 80 * GiB},
};

gpu::Properties properties_of(const Card& card) {
  gpu::Properties p;
  p.name = card.name;
  p.compute_major = 9;
  p.sm_count = card.sm_count;
  p.clock_khz = card.clock_khz;
  p.memory_clock_khz = card.memory_clock_khz;
  p.memory_bus_bits = card.memory_bus_bits;
  p.max_dynamic_smem_bytes = 232448;
  p.l2_bytes = card.l2_bytes;
  p.memory_bytes = card.memory_bytes;
  return p;
}

gpu::Properties properties_of(const std::string& device) {
  std::unique_ptr<gpu::Device> opened;
  throw_if_failed(gpu::is_virtual(device) ? vgpu::open(device, &opened) : gpu::cuda::open(device, &opened));
  return opened->properties();
}

}  // namespace

void CardFlags::add_to(Command app) {
  std::vector<std::string> keys;
  for (const Card& known : cards) keys.emplace_back(known.key);
  const Flag by_name = app.option("--gpu,--card", card, "A GPU by name; this machine need not have it").one_of(keys);
  app.option("--device", device, "cuda, cuda:N or vgpu:MODEL [this machine's GPU, else --gpu h200]").excludes(by_name);
}

gpu::Properties CardFlags::properties() const {
  if (!device.empty()) {
    if (gpu::cuda::is_cuda(device) || gpu::is_virtual(device)) return properties_of(device);
    throw io::InputError("--device (" + device +
                         ") must be cuda, cuda:N or vgpu:MODEL, because only GPUs have a plan: " +
                         "pass --gpu h200 if the machine has no GPU");
  }
  if (!card.empty()) return properties_of(*std::ranges::find(cards, card, &Card::key));
  const GpusSeen seen = gpus_seen();
  const auto served = std::ranges::find_if(seen.gpus, &GpuSeen::served);
  return served == seen.gpus.end() ? properties_of(cards[0])
                                   : properties_of(str_cat("cuda:", served - seen.gpus.begin()));
}

Planned::Planned(const ProblemFlags& flags, const gpu::Properties& device, tandem_pass pass)
    : inputs(flags.inputs([](DType dtype, const std::vector<int64_t>& shape, double) {
        return Buffer::without_memory(dtype, shape);
      })) {
  const Results results(inputs, pass == TANDEM_BACKWARD, false);
  const detail::CArgs args(with_results(inputs.attention(flags.mask.options()), results), pass);
  throw_if_failed(make_problem(pass, args.get(), {TANDEM_CPU, 0}, false, &problem));
  throw_if_failed(plan::check(problem, device, plan::tuning_of(Env::get())));
  const bool no_queries = problem.total_q == 0 || problem.heads_q == 0;
  const bool no_keys = problem.total_k == 0 || problem.heads_k == 0;
  if (!no_queries || (pass == TANDEM_BACKWARD && !no_keys))
    plan = plan::make_plan(problem, device, plan::tuning_of(Env::get()));
}

}  // namespace tandem::tool
