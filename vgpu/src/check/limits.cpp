// Checks launches against the limits of the device.
#include <algorithm>

#include "base/text.h"
#include "vgpu/src/check/watch.h"

namespace tandem::vgpu::check {
namespace {

int64_t count(gpu::Dim3 size) { return int64_t{size.x} * size.y * size.z; }

int64_t blocks_of_cluster(const LaunchDescription& launch, const ptx::Function& function) {
  int64_t required = 1;
  for (const int32_t size : function.required_cluster) required *= std::max(size, 1);
  return std::max(count(launch.cluster), required);
}

// Registers are allocated in units of four warps, and of eight per thread.
int64_t registers_of(const ptx::Function& function, int64_t threads) {
  return (threads + 127) / 128 * 128 * ((function.max_registers + 7) / 8 * 8);
}

}  // namespace

void Watch::check_limits(const Model& model) {
  const ptx::Function& function = launch_.program->function();
  const auto check = [&](int64_t asked, int64_t most, std::string_view of_what) {
    if (asked <= most) return;
    findings_.add(Rule::device_limit, {-1, -1, -1, -1, "the launch"}, {}, "",
                  str_cat(asked, " ", of_what, " are beyond the ", most, " that ", model.name, " has"));
  };
  const int64_t threads = count(launch_.block);
  check(threads, model.max_threads_per_block, "threads in a block");
  check(int64_t{launch_.program->static_shared_bytes()} + launch_.dynamic_shared_bytes, model.shared_bytes_per_block,
        "bytes of shared memory in a block");
  check(registers_of(function, threads), model.registers_per_sm, "registers in a block");
  check(blocks_of_cluster(launch_, function), model.max_cluster, "blocks in a cluster");
}

}  // namespace tandem::vgpu::check
