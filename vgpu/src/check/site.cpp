#include "vgpu/src/check/site.h"

namespace tandem::vgpu::check {

Sites::Sites(uint32_t most) : chunks_((most + kChunk - 1) / kChunk) {}

uint32_t Sites::add() {
  uint32_t site = 0;
  if (!free_.empty()) {
    site = free_.back();
    free_.pop_back();
  } else if (count_ < chunks_.size() * kChunk) {
    site = count_++;
    if (!chunks_[site / kChunk]) chunks_[site / kChunk] = std::make_unique<Site[]>(kChunk);
  } else {
    return count_ - 1;
  }
  Site& fresh = (*this)[site];
  fresh.done.store({}, std::memory_order_relaxed);
  fresh.lanes = 0;
  return site;
}

void Sites::keep(const std::vector<bool>& marked) {
  free_.clear();
  for (uint32_t site = 1; site < count_; ++site)
    if (!marked[site]) free_.push_back(site);
}

}  // namespace tandem::vgpu::check
