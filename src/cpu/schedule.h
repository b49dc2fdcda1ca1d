// The common code of forward.cpp and backward.cpp: it divides the caller's workspace, and its threads take items in
// order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace tandem::cpu {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns 64-byte aligned parts of the workspace. With a null base this class only counts.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(base == nullptr ? nullptr : aligned(base)) {}

  template <class T>
  T* take(int64_t count) {
    const size_t at = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }

  // Bytes that the caller must provide: the used bytes, and enough to align an arbitrary pointer.
  size_t bytes() const { return used_ + 64; }

 private:
  static std::byte* aligned(void* p) {
    return reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64);
  }
  std::byte* base_;
  size_t used_ = 0;
};

// Multiply-adds that justify waking one more thread (about 20 microseconds of a small problem).
constexpr double kWorkPerThread = 1e5;

// Multiply-adds that a thread takes at once. Small items are taken in runs, which are contiguous in memory.
constexpr double kWorkPerGrab = 2.5e5;

// Assignment of items to threads. In order: longest-first schedules and the backward's ordered sums rely on this order.
// In sections: each thread begins with its section of similar items, like the neighbouring layers of a model, so that
// its cache has the data. Then the thread takes items of other sections.
enum class Take { kInOrder, kInSections };

struct Items {
  Take take;
  int64_t count;
  double work;  // multiply-adds of all items
};

// body(item, scratch) for every item in [0, count). scratch: one part of scratch_bytes per thread.
template <class F>
void for_each_item(Threads& threads, const Items& items, std::byte* scratch, size_t scratch_bytes, F&& body) {
  const auto [take, count, work] = items;
  if (count == 0) return;
  const int64_t most = std::min<int64_t>(count, threads.count());
  const auto tasks = static_cast<int32_t>(std::min(1 + work / kWorkPerThread, static_cast<double>(most)));

  constexpr int32_t kMaxSections = 64;
  struct alignas(64) Section {
    std::atomic<int64_t> next;
    int64_t end;
  } sections[kMaxSections];
  const int32_t parts = take == Take::kInSections ? std::min(tasks, kMaxSections) : 1;
  for (int32_t i = 0; i < parts; ++i) {
    sections[i].next.store(count * i / parts, std::memory_order_relaxed);
    sections[i].end = count * (i + 1) / parts;
  }
  const int64_t small = static_cast<int64_t>(static_cast<double>(count) * kWorkPerGrab / (work + 1));
  const int64_t grab = std::max<int64_t>(1, std::min(count / (4 * tasks), small));

  threads.run(tasks, [&](int32_t task) {
    std::byte* mine = scratch + static_cast<size_t>(task) * scratch_bytes;
    for (int32_t s = 0; s < parts; ++s) {
      Section& section = sections[(task + s) % parts];
      for (int64_t i; (i = section.next.fetch_add(grab, std::memory_order_relaxed)) < section.end;)
        for (const int64_t end = std::min(section.end, i + grab); i < end; ++i) body(i, mine);
    }
  });
}

inline size_t scratch_stride(size_t bytes) { return (bytes + 127) / 64 * 64; }

// The keys that rows [begin, end) of a sequence may see, all query heads of a key head being neighbours.
inline KeySpan keys_of_rows(const Problem& p, const Sequence& s, int64_t heads, int64_t begin, int64_t end) {
  const KeySpan first = visible_keys(p, s, begin / heads), last = visible_keys(p, s, (end - 1) / heads);
  return {first.begin, last.end > first.begin ? last.end : first.begin};
}

// The number of query rows if they are few enough to be streamed: keys are then read without packing (cpu/decode.h).
inline int64_t streamed_rows(const Problem& p, const Sequence& s) {
  const int64_t rows = s.q_len * p.group();
  return rows <= kernels().panel / 2 ? rows : 0;
}

inline Piece whole_piece(const Problem& p, const Sequence& s, int64_t number, int64_t head_k) {
  return {.problem = &p,
          .sequence = s,
          .sequence_number = number,
          .head_k = head_k,
          .head_first = head_k * p.group(),
          .heads = p.group(),
          .streamed_rows = streamed_rows(p, s),
          .row_begin = 0,
          .row_end = s.q_len * p.group(),
          .key_begin = 0,
          .key_end = s.k_len};
}

// Fills rows of a (batch, row, head) output beyond the used lengths with zero bytes (lse: with -inf).
void clear_unused_rows(const Problem& p, const View& view, bool queries, int64_t heads, int64_t dim, bool lse = false);

}  // namespace tandem::cpu
