// Appends keys and values to a cache on a GPU with one kernel, launched once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "config/append_kv.h"
#include "gpu/device.h"
#include "plan/kernel.h"
#include "problem/append_kv.h"

namespace tandem::plan {

inline constexpr const char* kAppendKvKernel = "append_kv";
inline constexpr KernelEntry kAppendKvEntries[] = {{EntryId::append_kv, kAppendKvKernel, 0}};
std::string append_kv_translation_unit();

// Returns ok, or the reason why this device does not serve the append.
Status check_append_kv(const AppendKvProblem& problem, const gpu::Properties& device);

struct AppendKvLaunch {
  AppendKvParams params;
  uint32_t blocks, parts;  // parts: CTAs that divide the elements of the same rows
};
AppendKvLaunch append_kv_launch(const AppendKvProblem& problem, const gpu::Properties& device);

// Returns the tensors that the launch accesses, for devices that check every access.
std::vector<gpu::NamedBuffer> append_kv_buffers(const AppendKvProblem& problem);

}  // namespace tandem::plan
