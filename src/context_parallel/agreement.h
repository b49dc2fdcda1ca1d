// The comparison of a call between the ranks, once for each new combination of plan, shapes and options.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>

#include "base/status.h"
#include "context_parallel/shard_call.h"

namespace tandem::context_parallel {

// The calls of one plan that all ranks have agreed on.
class Agreement {
 public:
  // own: the result of this rank's checks. Returns an error on all ranks if the checks of one rank fail or the ranks'
  // calls differ. A rank whose checks fail after an agreement returns alone, because its peers no more compare.
  Status agree(const ShardCall& call, int32_t execution, const Status& own);

 private:
  std::mutex mutex_;
  std::set<uint64_t> agreed_;
};

}  // namespace tandem::context_parallel
