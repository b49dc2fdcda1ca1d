// Global memory: its buffers and their shadow.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "vgpu/src/check/shadow.h"
#include "vgpu/src/machine/machine.h"

namespace tandem::vgpu::check {

// Several host threads may use it at once.
class GlobalMemory {
 public:
  explicit GlobalMemory(std::span<const Buffer> buffers);

  // Returns true if all of these bytes lie in one buffer. Without buffers every address is accepted.
  bool contains(uint64_t address, uint64_t bytes, bool writes) const;
  // Returns the buffer that contains the address, or the nearest buffer; null: no buffers.
  const Buffer* nearest(uint64_t address) const;

  // Touches many ranges, one after the other. Adjacent ranges share a lock.
  class Toucher {
   public:
    Toucher(GlobalMemory* memory, PageCache* cache) : memory_(memory), cache_(cache) {}
    // The touch receives positions relative to this page.
    template <class F>
    void touch(uint64_t address, uint64_t bytes, Touch& touch, F&& enters_page);
    // The page is valid until the next call.
    Page& page(uint64_t number) { return number == number_ ? *page_ : other_page(number); }

   private:
    Page& other_page(uint64_t number);

    GlobalMemory* const memory_;
    PageCache* const cache_;
    std::unique_lock<std::mutex> lock_;
    uint64_t number_ = ~uint64_t{0};
    Page* page_ = nullptr;
  };

  // Sites of all clusters.
  const Sites& sites() const { return sites_; }
  uint32_t add_site(const Site& like);
  void set_done(uint32_t site, ClockEntry entry) { sites_[site].done.store(entry, std::memory_order_release); }

 private:
  struct PageStripe {
    std::mutex mutex;
    std::unordered_map<uint64_t, std::unique_ptr<Page>> pages;  // by number: address / kPageBytes
  };
  static constexpr size_t kStripes = 256;

  std::unique_ptr<Page> make_page(uint64_t number) const;

  std::vector<Buffer> buffers_;  // by address
  std::array<PageStripe, kStripes> stripes_;
  std::mutex sites_mutex_;
  Sites sites_;
};

template <class F>
void GlobalMemory::Toucher::touch(uint64_t address, uint64_t bytes, Touch& touch, F&& enters_page) {
  for (const uint64_t end = address + bytes; address < end;) {
    const uint64_t number = address / kPageBytes, begin = number * kPageBytes;
    const uint64_t last = end - begin < kPageBytes ? end - begin : kPageBytes;
    enters_page(begin);
    page(number).touch(static_cast<uint32_t>(address - begin), static_cast<uint32_t>(last), touch);
    address = begin + last;
  }
}

}  // namespace tandem::vgpu::check
