// Shadow memory: the last write to every byte, the accesses since then, and whether the byte is initialised.
//
// A page covers 4096 bytes in granules of 16, the smallest unit of asynchronous operations. A granule whose accesses
// cover it whole is one part. Accesses to some of its bytes split it into several parts. Adjacent lanes that cover a
// granule together form a run. If plain loads and stores access whole words, and each word needs only one epoch, the
// granule is four epochs. A granule with more readers than the limit is crowded: most of its reads are not checked.
// Tensor memory has the same shadow: its "bytes" are the 32-bit cells of a column, lane by lane.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "vgpu/src/check/site.h"

namespace tandem::vgpu::check {

inline constexpr uint32_t kPageBytes = 4096;

// Returns true for an atomic access of GPU scope.
inline bool is_wide(Epoch x) { return x.scope() >= scope_code(Scope::gpu); }

// An access, or the part of an asynchronous operation, that touches a page. The checker derives this class, because it
// knows the happens-before order.
class Touch {
 public:
  virtual ~Touch() = default;
  enum class Verdict : uint8_t {
    ordered,  // x has happened before
    allowed,  // unordered, but both are atomic or in hardware order
    relaxed,  // x has happened before, by relaxed operations only
    narrow,   // ordered only for threads of another block
    unordered,
    unfenced,  // ordered, but no proxy fence separates the two proxies
  };
  virtual Verdict judge(Epoch x) = 0;
  // Returns true if x is a weak store of a constant.
  virtual bool is_constant(Epoch x) const = 0;
  // The function is called once for each x in a run of equal granules. at: the position in the page.
  virtual void conflict(Epoch x, Verdict verdict, uint32_t at) = 0;
  // Narrows a run to the access of one of its lanes.
  virtual void narrow(Epoch lane) = 0;

  Epoch epoch;
  bool writes = false;           // else it reads
  bool is_wide = false;          // a thread's atomic access of GPU scope, see is_wide()
  bool is_plain = false;         // a thread's load or store that is neither atomic nor strong
  bool met_initialised = false;  // some of the accessed bytes had been written
};

class Page {
 public:
  explicit Page(bool initialised);

  // Touches bytes [begin, end) of the page.
  void touch(uint32_t begin, uint32_t end, Touch& touch);

  // Touches a whole granule by the run touch.epoch. Usually the whole granule is ordered and stays one part. Returns
  // false if nothing has changed and each lane must touch its bytes separately.
  bool touch_run(uint32_t granule, Touch& touch);
  // Merges a granule into one part again if its lanes have formed a run.
  void join(uint32_t granule);

  // Marks whole granules within [begin, end) as uninitialised.
  void forget(uint32_t begin, uint32_t end);

  // Calls f(epoch, at) for every epoch of bytes [begin, end) that may still matter.
  template <class F>
  void for_each(uint32_t begin, uint32_t end, F&& f) const;

 private:
  // A small list of epochs that needs no allocation.
  class Epochs {
   public:
    static constexpr size_t kMax = 64;
    Epochs() = default;
    Epochs(Epochs&&) noexcept = default;
    Epochs& operator=(const Epochs& x) {
      if (this == &x) return *this;
      clear();
      for (const Epoch epoch : x) push_back(epoch);
      return *this;
    }
    size_t size() const { return size_; }
    Epoch* begin() { return more_ ? more_.get() : few_; }
    Epoch* end() { return begin() + size_; }
    const Epoch* begin() const { return more_ ? more_.get() : few_; }
    const Epoch* end() const { return begin() + size_; }
    Epoch& operator[](size_t i) { return begin()[i]; }
    void push_back(Epoch epoch) {
      if (size_ == kFew && !more_) {
        more_ = std::make_unique<Epoch[]>(kMax);
        std::copy_n(few_, kFew, more_.get());
      }
      begin()[size_++] = epoch;
    }
    template <class F>
    void erase_if(F&& f) {
      size_ = static_cast<size_t>(std::remove_if(begin(), end(), f) - begin());
    }
    void clear() { size_ = 0; }

   private:
    static constexpr size_t kFew = 3;
    Epoch few_[kFew];
    size_t size_ = 0;
    std::unique_ptr<Epoch[]> more_;
  };

  // Accesses since the last write, except the first two. Granules with equal accesses share one Others.
  struct Others {
    static constexpr size_t kMax = Epochs::kMax;  // beyond kMax the latest access and its races are lost
    static constexpr size_t kUntried = 4 * kMax;
    int32_t users = 0;
    uint32_t untried = 0;  // additions since the last removal of ordered epochs
    bool wrote = false;    // some of these accesses wrote
    Epochs epochs;
  };

  // Some bytes of a granule that have the same past.
  struct GranulePart {
    Epoch write;
    Epoch since[2];           // reads since the write, and atomic updates before it
    uint32_t others = 0;      // index; 0: none. If split: index of the parts
    uint16_t bytes = 0xffff;  // 0: in several parts
    bool initialised = false;
    bool is_wide = true;  // all accesses since the last ordinary write are wide

    bool same_past(const GranulePart& x) const {
      return write == x.write && since[0] == x.since[0] && since[1] == x.since[1] && others == x.others &&
             initialised == x.initialised && is_wide == x.is_wide;
    }
  };
  static_assert(sizeof(GranulePart) == 32);

  // The last access to each word. Earlier accesses happened before this access.
  using Words = std::array<Epoch, kGranule / 4>;
  union Granule {
    Granule() : whole() {}
    GranulePart whole;
    Words words;
  };
  // unwritten_words: no word is initialised, except words whose epoch is a write.
  enum class Kind : uint8_t { parts, words, unwritten_words };
  struct GranuleState {
    Kind kind = Kind::parts;
    uint8_t let_by = 0;  // unchecked reads that remain for a crowded granule

    bool is_usual() const { return kind == Kind::parts && let_by == 0; }
  };

  // The parts of a granule, usually four words.
  class Parts {
   public:
    size_t size() const { return size_; }
    GranulePart* begin() { return more_ ? more_.get() : few_; }
    GranulePart* end() { return begin() + size_; }
    const GranulePart* begin() const { return more_ ? more_.get() : few_; }
    const GranulePart* end() const { return begin() + size_; }
    GranulePart& operator[](size_t i) { return begin()[i]; }
    GranulePart& add(const GranulePart& part) {
      if (size_ == kFew && !more_) {
        more_ = std::make_unique<GranulePart[]>(kGranule);
        std::copy_n(few_, kFew, more_.get());
      }
      return begin()[size_++] = part;
    }
    void clear() { size_ = 0; }

   private:
    static constexpr size_t kFew = 4;
    GranulePart few_[kFew];
    size_t size_ = 0;
    std::unique_ptr<GranulePart[]> more_;
  };

  static bool is_by_words(uint16_t bytes) { return (bytes & 0x1111) * 15 == bytes; }
  bool touch_words(uint32_t granule, uint16_t bytes, Touch& touch);
  bool touch_words_by_run(uint32_t granule, Touch& touch);
  void become_whole(uint32_t granule, Touch& touch);
  void leave_words(uint32_t granule);
  static bool let_by(GranuleState* state, Touch& touch);
  void note_crowd(uint32_t granule);

  void apply(GranulePart* part, Touch& touch, uint32_t at);
  static void judge(Epoch x, Touch& touch, uint32_t at);
  bool reads_constant(const GranulePart& part, Touch& touch) const;
  static bool has(const Epochs& epochs, Epoch epoch);
  uint32_t new_several();  // from 1 on
  Parts& split(GranulePart* granule);
  bool is_behind(const GranulePart& part, Touch& touch) const;
  void record(GranulePart* part, Touch& touch);
  void touch_some(GranulePart* granule, uint16_t bytes, Touch& touch, uint32_t at);
  void add_since(GranulePart* part, Epoch epoch);
  void add_read(GranulePart* part, Touch& touch);
  void update(GranulePart* part, Epoch epoch);
  void release_others(GranulePart* part);
  Others* own_others(GranulePart* part);

  static constexpr uint32_t kGranules = kPageBytes / kGranule;
  std::array<Granule, kGranules> granules_;
  std::array<GranuleState, kGranules> states_;
  // Granules that one access touches mostly look alike: so the outcome for the last granule is reused for the next.
  Epoch last_touch_;
  GranulePart before_, after_;
  std::vector<Others> others_;  // [0]: none
  std::vector<uint32_t> free_others_;
  std::vector<Parts> several_;
  std::vector<uint32_t> free_several_;
};

// Pages of global memory that a cluster has accessed recently. The addresses of these pages stay valid until the launch
// has ended.
class PageCache {
 public:
  struct PageEntry {
    uint64_t number = ~uint64_t{0};
    Page* page = nullptr;
  };
  // The distance of buffers may be a power of two. Corresponding pages of such buffers must not share an entry.
  PageEntry& place(uint64_t number) { return entries_[number * 0x9e3779b97f4a7c15 >> 56]; }

 private:
  std::array<PageEntry, 256> entries_;
};

template <class F>
void Page::for_each(uint32_t begin, uint32_t end, F&& f) const {
  const auto of_epoch = [&](Epoch e, uint32_t at) {
    if (!e) return;
    const uint32_t step = e.is_run() ? e.bytes_of_lane() : kGranule;
    for (uint32_t byte = 0; byte < kGranule; byte += step) f(e.at(byte), at + byte);
  };
  const auto of_part = [&](const GranulePart& part, uint32_t at) {
    of_epoch(part.write, at);
    for (const Epoch e : part.since) of_epoch(e, at);
    for (const Epoch e : others_[part.others].epochs) of_epoch(e, at);
  };
  for (uint32_t g = begin / kGranule; g < (end + kGranule - 1) / kGranule; ++g) {
    if (states_[g].kind != Kind::parts) {
      for (uint32_t i = 0; i < 4; ++i)
        if (granules_[g].words[i]) f(granules_[g].words[i], g * kGranule + 4 * i);
    } else if (granules_[g].whole.bytes) {
      of_part(granules_[g].whole, g * kGranule);
    } else {
      for (const GranulePart& part : several_[granules_[g].whole.others])
        of_part(part, g * kGranule + std::countr_zero(part.bytes));
    }
  }
}

}  // namespace tandem::vgpu::check
