// A number as an element of a type holds it.
#pragma once

#include <cstddef>

#include "problem/convert.h"

namespace tandem::test {

inline double rounded(DType type, double x) {
  std::byte bytes[8];
  store(type, bytes, x);
  return load(type, bytes);
}

}  // namespace tandem::test
