// The knowledge that atomics in global memory publish to all clusters.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "vgpu/src/check/clock.h"

namespace tandem::vgpu::check {

// Several host threads may use it at once.
class GlobalSyncs {
 public:
  // A write of this cluster publishes. A later read of the address learns the knowledge if its order and scope allow. A
  // read of an older value learns too much. A race may then remain unreported, but no report is wrong.
  void tell(uint64_t address, const VectorClock& published, int32_t cluster);
  // Returns the version of the knowledge that an address publishes, or 0. Raises *known, unless that version is known.
  uint64_t learn(uint64_t address, uint64_t known_version, VectorClock* known, int32_t cluster);

 private:
  struct Told {
    ForeignRef seen;
    BySpace<ForeignRef> proxied;
    ForeignRef fenced;
    uint64_t version = 0;
  };
  struct SyncStripe {
    std::mutex mutex;
    std::unordered_map<uint64_t, Told> published;
  };
  std::array<SyncStripe, 64> stripes_;
  std::atomic<bool> anything_{false};  // a thread has published; most kernels never publish
};

}  // namespace tandem::vgpu::check
