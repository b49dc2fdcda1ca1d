// Merging parts of an attention on a GPU: one kernel for all of them, launched as often as its parameter has room for
// the parts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "gpu/device.h"
#include "problem/merge.h"
#include "shared/merge.h"

namespace tandem::plan {

inline constexpr const char* kMergeKernel = "merge";
std::string merge_translation_unit();

// Ok, or why this device does not serve the merge.
Status check_merge(const MergeProblem& problem, const gpu::Properties& device);

// A launch takes parts [first, first + count) and, but for the first launch, what those before it have left in the
// result.
class MergeLaunches {
 public:
  MergeLaunches(const MergeProblem& problem, const gpu::Properties& device);

  // The next launch's parameter and grid; false when there are no more.
  bool next(MergeParams* params, uint32_t* grid);
  // The tensors that the launch which next() has brought touches, for devices that watch every access.
  std::vector<gpu::NamedBuffer> tensors(const MergeParams& params) const;

 private:
  const MergeProblem& m_;
  const uint32_t most_blocks_;
  int64_t done_ = 0;
};

}  // namespace tandem::plan
