// What is told through atomics in global memory, to all clusters.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "vgpu/src/check/clock.h"

namespace tandem::vgpu::check {

// May be used by several host threads at once.
class GlobalSyncs {
 public:
  // A write of this cluster tells; whoever reads the address later with the right to know learns it. (One who reads an
  // older value learns too much: a race may go unnoticed, none is made up.)
  void tell(uint64_t address, const VectorClock& published, int32_t cluster);
  void learn(uint64_t address, VectorClock* known, int32_t cluster);

 private:
  struct Told {
    ForeignRef seen;
    BySpace<ForeignRef> proxied;
    ForeignRef fenced;
  };
  struct Stripe {
    std::mutex mutex;
    std::unordered_map<uint64_t, Told> published;
  };
  std::array<Stripe, 64> stripes_;
  std::atomic<bool> anything_{false};  // has been told: most kernels never do
};

}  // namespace tandem::vgpu::check
