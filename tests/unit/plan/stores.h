// The stores of a plan's launches, as byte ranges. The address functions are the kernels' own (kernels/config).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "config/backward_addresses.h"
#include "config/forward_addresses.h"
#include "plan/arguments.h"
#include "plan/plan.h"

namespace tandem::test {

// Byte ranges of the workspace and of a launch's tensors, and the first store that is outside its own range.
class StoreRanges {
 public:
  StoreRanges(const plan::Plan& plan, const std::byte* workspace) : workspace_(workspace) {
    for (const plan::Region& region : plan.regions) add(region.name, workspace + region.offset, region.bytes);
    regions_ = ranges_.size();
  }
  // The tensors that the next stores belong to.
  void set_tensors(const std::vector<gpu::NamedBuffer>& tensors) {
    ranges_.resize(regions_);
    for (const gpu::NamedBuffer& tensor : tensors)
      if (tensor.writable) add(tensor.name, static_cast<const std::byte*>(tensor.address), tensor.bytes);
  }

  // The kernel stores bytes [first, first + bytes) after `at`, and they belong to the buffer of this name.
  void store(const char* name, const void* at, int64_t first, int64_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(at) + static_cast<uintptr_t>(first), end = begin + bytes;
    if (bytes <= 0) return;
    ++stores_;
    for (const Range& range : ranges_) {
      if (range.name != name && std::strcmp(range.name, name) != 0) continue;
      if (begin >= range.begin && end <= range.end) return;
    }
    if (failure_ != nullptr) return;
    failure_ = name;
    failed_ = {name, begin, end};
  }

  bool ok() const { return failure_ == nullptr; }
  int64_t stores() const { return stores_; }
  // The first store outside its buffer, in bytes from the workspace and from the buffer.
  std::string failure() const {
    const auto from = [](uintptr_t a, uintptr_t b) { return std::to_string(static_cast<int64_t>(a - b)); };
    std::string text = std::string(failed_.name) + ": bytes " +
                       from(failed_.begin, reinterpret_cast<uintptr_t>(workspace_)) + " to " +
                       from(failed_.end, reinterpret_cast<uintptr_t>(workspace_)) + " of the workspace";
    bool exists = false;
    for (const Range& range : ranges_) {
      if (std::strcmp(range.name, failed_.name) != 0) continue;
      exists = true;
      text += ", " + from(failed_.begin, range.begin) + " to " + from(failed_.end, range.begin) + " of a buffer of " +
              from(range.end, range.begin) + " bytes";
    }
    return exists ? text : text + ", and there is no such buffer";
  }

 private:
  struct Range {
    const char* name;
    uintptr_t begin, end;
  };
  void add(const char* name, const std::byte* data, size_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    ranges_.push_back({name, begin, begin + bytes});
  }

  std::vector<Range> ranges_;
  size_t regions_ = 0;
  const std::byte* workspace_;
  const char* failure_ = nullptr;
  Range failed_{};
  int64_t stores_ = 0;
};

// Calls visit(i) for the first, the last and some other indices below `count`.
template <class Visit>
void for_extremes(int64_t count, const Visit& visit) {
  const int64_t indices[] = {0, count - 1, count / 2, count - 2, count / 3};
  for (int64_t n = 0; n < std::min<int64_t>(count, 5); ++n) visit(indices[n]);
}

// Evaluates the stores of every launch of a plan, for extreme indices of each dimension.
void walk_forward(const Problem& p, const plan::Plan& plan, const plan::Arguments& arguments, StoreRanges* ranges);
void walk_backward(const Problem& p, const plan::Plan& plan, const plan::Arguments& arguments, StoreRanges* ranges);
// Tensors that TMA stores: the map of each must lie within its tensor.
void walk_maps(const plan::Arguments& arguments, const std::vector<gpu::NamedBuffer>& tensors, StoreRanges* ranges);

}  // namespace tandem::test
