#include "vgpu/src/check/syncs.h"

namespace tandem::vgpu::check {

void GlobalSyncs::tell(uint64_t address, const VectorClock& published, int32_t cluster) {
  if (!published.seen) return;
  const Told all{export_clock(published.seen, cluster),
                 {export_clock(published.proxied.shared, cluster), export_clock(published.proxied.global, cluster)},
                 export_clock(published.fenced, cluster),
                 0};
  SyncStripe& stripe = stripes_[address / 4 % stripes_.size()];
  const std::lock_guard lock(stripe.mutex);
  anything_.store(true, std::memory_order_release);
  Told& there = stripe.published[address];
  join(&there.seen, all.seen);
  join(&there.proxied.shared, all.proxied.shared);
  join(&there.proxied.global, all.proxied.global);
  join(&there.fenced, all.fenced);
  ++there.version;
}

uint64_t GlobalSyncs::learn(uint64_t address, uint64_t known_version, VectorClock* known, int32_t cluster) {
  if (!anything_.load(std::memory_order_acquire)) return 0;
  Told there;
  {
    SyncStripe& stripe = stripes_[address / 4 % stripes_.size()];
    const std::lock_guard lock(stripe.mutex);
    const auto found = stripe.published.find(address);
    if (found == stripe.published.end()) return 0;
    if (found->second.version == known_version) return known_version;
    there = found->second;
  }
  import_clock(&known->seen, there.seen, cluster);
  import_clock(&known->proxied.shared, there.proxied.shared, cluster);
  import_clock(&known->proxied.global, there.proxied.global, cluster);
  import_clock(&known->fenced, there.fenced, cluster);
  return there.version;
}

}  // namespace tandem::vgpu::check
