#include "engine/launch.h"

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "plan/arguments.h"

namespace tandem {
namespace {

std::byte* aligned(void* workspace) {
  constexpr auto mask = static_cast<uintptr_t>(plan::kWorkspaceAlignment - 1);
  return reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(workspace) + mask) & ~mask);
}

bool is_empty(const gpu::TensorMapSpec& spec) {
  return std::any_of(spec.dims, spec.dims + spec.rank, [](uint64_t size) { return size == 0; });
}

// Drivers refuse a tensor without elements. A kernel is launched anyway, because the gradient of an empty sum is 0. The
// tensor map copies nothing.
Status encode_maps(gpu::Device& device, const plan::Arguments& arguments) {
  for (const plan::Arguments::Map& map : arguments.maps()) {
    gpu::TensorMap encoded{};
    if (!is_empty(map.spec)) TANDEM_TRY(device.encode(map.spec, &encoded));
    static_assert(sizeof encoded == sizeof *map.place);
    std::memcpy(map.place, &encoded, sizeof encoded);
  }
  return {};
}

// All memory that a launch may access. again: the launch repeats an earlier launch.
std::vector<gpu::NamedBuffer> buffers_of(const Problem& p, const plan::Plan& plan, size_t launch, bool again,
                                         std::byte* workspace) {
  std::vector<gpu::NamedBuffer> buffers = plan.pass->tensors_of(p, plan, launch);
  for (const plan::Region& region : plan.regions) {
    buffers.push_back({.name = region.name,
                       .address = workspace + region.offset,
                       .bytes = region.bytes,
                       .writable = true,
                       .initialised = region.first_writer < static_cast<int>(launch) || again});
  }
  return buffers;
}

}  // namespace

Status load(gpu::Device& device, const plan::PlannedKernel& planned, std::span<const std::byte> image,
            LoadedKernel* kernel) {
  const auto entries = plan::entries_of(planned.configuration, planned.unit);
  return load(device, {entries.begin(), entries.end()}, image, kernel);
}

Status load(gpu::Device& device, std::span<const plan::KernelEntry> entries, std::span<const std::byte> image,
            LoadedKernel* kernel) {
  TANDEM_TRY(device.load(image, &kernel->module));
  for (const plan::KernelEntry& entry : entries) {
    gpu::Kernel* const found = &kernel->entries[static_cast<size_t>(entry.id)];
    TANDEM_TRY(kernel->module->find(entry.name, entry.shared_bytes, found));
  }
  return {};
}

Status launch(gpu::Device& device, const Problem& p, const plan::Plan& plan,
              std::span<const LoadedKernel* const> kernels, void* workspace, gpu::Stream stream) {
  std::byte* const memory = aligned(workspace);
  plan::Arguments arguments;
  plan.pass->bind(p, plan, memory, &arguments);
  TANDEM_TRY(encode_maps(device, arguments));
  for (const plan::Fill& fill : plan.fills) TANDEM_TRY(device.fill(memory + fill.offset, 0, fill.bytes, stream));
  const bool named = device.wants_buffers();
  int64_t times = 1;  // passes through the repeated launches so far
  for (size_t n = 0; n < plan.launches.size(); ++n) {
    const plan::PlannedLaunch& planned = plan.launches[n];
    void* parameters[] = {arguments.of_kernel(planned.kernel)};
    std::vector<gpu::NamedBuffer> buffers;
    gpu::Launch wanted;
    wanted.kernel = kernels[planned.kernel]->at(planned.entry);
    wanted.grid.x = planned.grid;
    wanted.block.x = planned.block;
    wanted.dynamic_smem_bytes = planned.shared_bytes;
    wanted.overlap_previous = planned.overlap_previous;
    wanted.args = parameters;
    wanted.stream = stream;
    if (named) wanted.buffers = buffers = buffers_of(p, plan, n, times > 1, memory);
    TANDEM_TRY(device.launch(wanted));
    if (n + 1 == plan.repeat.end && times < plan.repeat.times) {
      ++times;
      n = plan.repeat.begin - 1;
    }
  }
  return {};
}

}  // namespace tandem
