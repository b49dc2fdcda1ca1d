// A tensor that an expression names. The struct has a separate header, because loops compiled per instruction set must
// include little.
#pragma once

#include <cstddef>
#include <cstdint>

#include "score_mod/op.h"

namespace tandem::score_mod {

enum class Element : uint8_t { f64, f32, bf16, f16, i64, i32, boolean };
inline constexpr int kElements = 7;

struct TensorView {
  const std::byte* data = nullptr;
  Element element = Element::f32;
  int32_t rank = 0;
  int32_t size[kMaxRank] = {1, 1, 1, 1};
  int64_t stride[kMaxRank] = {0, 0, 0, 0};  // in elements
};

}  // namespace tandem::score_mod
