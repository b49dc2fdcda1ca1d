// Merges parts of an attention on a GPU with one kernel, launched once per group of parts. A group is the number of
// parts that fits in the kernel's parameter.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "config/merge.h"
#include "gpu/device.h"
#include "plan/kernel.h"
#include "problem/merge.h"

namespace tandem::plan {

inline constexpr const char* kMergeKernel = "merge";
inline constexpr KernelEntry kMergeEntries[] = {{EntryId::merge, kMergeKernel, 0}};
std::string merge_translation_unit();

// Returns ok, or the reason why this device does not serve the merge.
Status check_merge(const MergeProblem& problem, const gpu::Properties& device);

// Each launch reads parts [first, first + count). Each launch after the first also reads the previous launch's result.
class MergeLaunches {
 public:
  MergeLaunches(const MergeProblem& problem, const gpu::Properties& device);

  // Computes the next launch's parameter and grid. Returns false after the last launch.
  bool next(MergeParams* params, uint32_t* grid);
  // Returns the tensors that the launch of the last next() accesses, for devices that check every access.
  std::vector<gpu::NamedBuffer> tensors(const MergeParams& params) const;

 private:
  const MergeProblem& m_;
  const uint32_t most_blocks_;
  int64_t done_ = 0;
};

}  // namespace tandem::plan
