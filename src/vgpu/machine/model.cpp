// The GPUs that the machine can be, and schedules.
#include "vgpu/machine/machine.h"
#include "vgpu/machine/run/random.h"

namespace tandem::vgpu {
namespace {

const std::vector<Model>& models() {
  static const std::vector<Model> all = [] {
    Model h100;
    h100.name = "h100";
    h100.marketing_name = "NVIDIA H100 (virtual)";
    h100.arch = "sm_90a";
    h100.compute_major = 9;
    h100.compute_minor = 0;
    h100.sm_count = 132;
    h100.clock_khz = 1'980'000;
    h100.memory_clock_khz = 2'619'000;
    h100.memory_bus_bits = 5120;
    h100.l2_bytes = int64_t{50} << 20;
    h100.memory_bytes = int64_t{80} << 30;
    h100.shared_bytes_per_block = 232448;
    h100.registers_per_sm = 65536;
    h100.max_threads_per_block = 1024;
    h100.max_cluster = 16;
    h100.wgmma = true;
    Model h200 = h100;
    h200.name = "h200";
    h200.marketing_name = "NVIDIA H200 (virtual)";
    h200.memory_clock_khz = 3'201'000;
    h200.memory_bus_bits = 6144;
    h200.memory_bytes = int64_t{141} << 30;
    Model b200 = h100;
    b200.name = "b200";
    b200.marketing_name = "NVIDIA B200 (virtual)";
    b200.arch = "sm_100a";
    b200.compute_major = 10;
    b200.sm_count = 148;
    b200.clock_khz = 1'965'000;
    b200.memory_clock_khz = 3'996'000;
    b200.memory_bus_bits = 8192;
    b200.l2_bytes = int64_t{126} << 20;
    b200.memory_bytes = int64_t{180} << 30;
    b200.wgmma = false;
    b200.tcgen05 = true;
    return std::vector<Model>{h200, h100, b200};
  }();
  return all;
}

}  // namespace

const Model* find_model(std::string_view name) {
  for (const Model& model : models())
    if (model.name == name) return &model;
  return nullptr;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Model& model : models()) names.push_back(model.name);
  return names;
}

Schedule Schedule::nth(int n) {
  if (n <= 0) return {0, Completion::early};
  if (n == 1) return {0, Completion::late};
  const auto seed = static_cast<uint64_t>(n);
  // Late and early once more in a random order of warps, then random altogether.
  return {seed, n == 2 ? Completion::late : n == 3 ? Completion::early : Completion::random};
}

std::string Schedule::text() const {
  if (seed == 0) return completion == Completion::late ? "1" : "0";
  return std::to_string(seed);
}

}  // namespace tandem::vgpu
