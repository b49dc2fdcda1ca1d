#include "vgpu/src/check/memory.h"

#include <algorithm>

namespace tandem::vgpu::check {
namespace {

uint64_t begin_of(const Buffer& buffer) { return reinterpret_cast<uint64_t>(buffer.address); }
uint64_t end_of(const Buffer& buffer) { return begin_of(buffer) + buffer.bytes; }

uint64_t distance(const Buffer& buffer, uint64_t address) {
  if (address < begin_of(buffer)) return begin_of(buffer) - address;
  return address < end_of(buffer) ? 0 : address - end_of(buffer) + 1;
}

}  // namespace

GlobalMemory::GlobalMemory(std::span<const Buffer> buffers)
    : buffers_(buffers.begin(), buffers.end()), sites_(Epoch::kMaxSites) {
  std::stable_sort(buffers_.begin(), buffers_.end(),
                   [](const Buffer& a, const Buffer& b) { return begin_of(a) < begin_of(b); });
}

bool GlobalMemory::contains(uint64_t address, uint64_t bytes, bool writes) const {
  if (buffers_.empty()) return true;
  // Buffers may overlap. A few buffers before the last one that begins early enough may contain this address too.
  auto it = std::upper_bound(buffers_.begin(), buffers_.end(), address,
                             [](uint64_t a, const Buffer& buffer) { return a < begin_of(buffer); });
  while (it != buffers_.begin()) {
    --it;
    if (address + bytes <= end_of(*it) && (it->writable || !writes)) return true;
  }
  return false;
}

const Buffer* GlobalMemory::nearest(uint64_t address) const {
  const auto nearer = [&](const Buffer& a, const Buffer& b) { return distance(a, address) < distance(b, address); };
  const auto it = std::min_element(buffers_.begin(), buffers_.end(), nearer);
  return it == buffers_.end() ? nullptr : &*it;
}

std::unique_ptr<Page> GlobalMemory::make_page(uint64_t number) const {
  auto page = std::make_unique<Page>(true);
  const uint64_t begin = number * kPageBytes, end = begin + kPageBytes;
  for (const Buffer& buffer : buffers_) {
    if (buffer.initialised || begin_of(buffer) >= end || end_of(buffer) <= begin) continue;
    page->forget(static_cast<uint32_t>(std::max(begin_of(buffer), begin) - begin),
                 static_cast<uint32_t>(std::min(end_of(buffer), end) - begin));
  }
  return page;
}

Page& GlobalMemory::Toucher::other_page(uint64_t number) {
  if (lock_.owns_lock()) lock_.unlock();
  PageStripe& stripe = memory_->stripes_[number % kStripes];
  lock_ = std::unique_lock(stripe.mutex);
  PageCache::PageEntry& known = cache_->place(number);
  if (known.number != number) {
    std::unique_ptr<Page>& found = stripe.pages[number];
    if (!found) found = memory_->make_page(number);
    known = {number, found.get()};
  }
  page_ = known.page;
  number_ = number;
  return *page_;
}

uint32_t GlobalMemory::add_site(const Site& like) {
  const std::lock_guard lock(sites_mutex_);
  const uint32_t site = sites_.add();
  sites_[site].set(like);
  return site;
}

}  // namespace tandem::vgpu::check
