// Shadow memory: for every byte who wrote it last, who has accessed it since, and whether it was ever written.
//
// A page stands for 4096 bytes in granules of 16, the smallest thing that asynchronous operations move. A granule that
// one access after the other covers whole is one part; where accesses cover some of its bytes it falls into several.
// Tensor memory is shadowed alike, its "bytes" being the 32-bit cells of a column, lane by lane.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "vgpu/check/site.h"

namespace tandem::vgpu::check {

inline constexpr uint32_t kPageBytes = 4096, kGranule = 16;

// What an access, or an asynchronous operation's share of one, finds in a page. Made by the checker, which knows what
// has happened before it.
class Touch {
 public:
  virtual ~Touch() = default;
  enum class Verdict : uint8_t {
    ordered,  // x has happened before
    allowed,  // it has not, but both are atomic (or the hardware keeps them in order)
    unordered,
    unfenced,  // it has, but the async proxy does not see it
  };
  virtual Verdict judge(Epoch x) = 0;
  // Once for each x in a run of equal granules; at: in the page.
  virtual void conflict(Epoch x, Verdict verdict, uint32_t at) = 0;

  Epoch epoch;
  bool writes = false;           // else it reads
  bool met_initialised = false;  // some of what it touched had been written
};

class Page {
 public:
  explicit Page(bool initialised);

  // Bytes [begin, end) of the page.
  void touch(uint32_t begin, uint32_t end, Touch& touch);

  // What nobody has written yet: whole granules within [begin, end).
  void forget(uint32_t begin, uint32_t end);

  // Every epoch of bytes [begin, end) that may still matter: f(epoch, at).
  template <class F>
  void for_each(uint32_t begin, uint32_t end, F&& f) const;

 private:
  // Accesses since the last write, other than the first two. Shared by granules that look alike.
  struct Others {
    static constexpr size_t kMost = 256;  // beyond, the latest is left out: what races with it may go unnoticed
    int32_t users = 0;
    std::vector<Epoch> epochs;
  };

  // Some bytes of a granule that have the same past.
  struct Part {
    Epoch write;
    Epoch since[2];           // since the write: reads, and atomic updates that the write came behind
    uint32_t others = 0;      // index, 0: none. In a granule of several parts: of these
    uint16_t bytes = 0xffff;  // 0: in several parts
    bool initialised = false;

    bool same_past(const Part& x) const {
      return write == x.write && since[0] == x.since[0] && since[1] == x.since[1] && others == x.others &&
             initialised == x.initialised;
    }
  };
  static_assert(sizeof(Part) == 32);

  void apply(Part* part, Touch& touch, uint32_t at);
  void judge(Epoch x, Touch& touch, uint32_t at);
  void touch_some(Part* granule, uint16_t bytes, Touch& touch, uint32_t at);
  void add_since(Part* part, Epoch epoch);
  void drop_ordered(Part* part, Touch& touch);
  void release_others(Part* part);
  Others* own_others(Part* part);

  std::array<Part, kPageBytes / kGranule> granules_;
  // Granules that one access touches mostly look alike: what has become of the last one becomes of the next.
  Epoch last_touch_;
  Part before_, after_;
  std::vector<Others> others_;  // [0]: none
  std::vector<uint32_t> free_others_;
  std::vector<std::vector<Part>> several_;
  std::vector<uint32_t> free_several_;
};

template <class F>
void Page::for_each(uint32_t begin, uint32_t end, F&& f) const {
  const auto of_part = [&](const Part& part, uint32_t at) {
    if (part.write) f(part.write, at);
    for (const Epoch e : part.since)
      if (e) f(e, at);
    for (const Epoch e : others_[part.others].epochs) f(e, at);
  };
  for (uint32_t g = begin / kGranule; g < (end + kGranule - 1) / kGranule; ++g) {
    if (granules_[g].bytes) {
      of_part(granules_[g], g * kGranule);
    } else {
      for (const Part& part : several_[granules_[g].others]) of_part(part, g * kGranule + std::countr_zero(part.bytes));
    }
  }
}

}  // namespace tandem::vgpu::check
