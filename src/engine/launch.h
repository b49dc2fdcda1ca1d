// Launches a planned call on the device's stream.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "base/fixed_vector.h"
#include "base/status.h"
#include "gpu/device.h"
#include "plan/plan.h"
#include "problem/problem.h"

namespace tandem {

// A kernel on a device: its code and its entries, such as the entries of plan::entries_of().
struct LoadedKernel {
  std::unique_ptr<gpu::Module> module;
  std::array<gpu::Kernel, plan::kEntryIds> entries{};  // null: the kernel has no entry with this id

  gpu::Kernel at(plan::EntryId id) const { return entries[static_cast<size_t>(id)]; }
};
Status load(gpu::Device& device, const plan::PlannedKernel& planned, std::span<const std::byte> image,
            LoadedKernel* kernel);
Status load(gpu::Device& device, std::span<const plan::KernelEntry> entries, std::span<const std::byte> image,
            LoadedKernel* kernel);

// kernels: the plan's kernels. workspace: may have any alignment.
Status launch(gpu::Device& device, const Problem& problem, const plan::Plan& plan,
              std::span<const LoadedKernel* const> kernels, void* workspace, gpu::Stream stream);

}  // namespace tandem
