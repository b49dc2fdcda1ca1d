// Structs of the C interface begin with their size in the version of the header that the caller was compiled with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/status.h"
#include "base/text.h"

namespace tandem {

// Fills *to with `from` in this version's form; members that an older version lacks are zero. Refuses a size that no
// version has had, and nonzero members that this version does not know. name: the argument's name; first: the size of
// the struct in its first version.
template <class T>
Status read_struct(const char* name, const char* type, const T* from, int64_t first, T* to) {
  constexpr int64_t known = sizeof(T);
  constexpr int64_t wild = 1 << 16;  // a size that no version will reach
  if (from == nullptr) return Status::invalid(str_cat(name, " (NULL) must point to a ", type, ": pass its address"));
  if (from->size < first || from->size > wild || from->size % 8 != 0) {
    return Status::invalid(str_cat(name, ".size (", from->size, ") must be sizeof(", type, "), ", known,
                                   " in this version: set the size before the call"));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (int64_t i = known; i < from->size; ++i) {
    if (bytes[i] == 0) continue;
    return Status::unsupported(str_cat(name, " byte ", i, " (", bytes[i], ") must be 0 beyond the ", known,
                                       " bytes of this version: zero the byte, or use a newer library"));
  }
  *to = {};
  std::memcpy(to, from, static_cast<size_t>(std::min(from->size, known)));
  to->size = known;
  return {};
}

}  // namespace tandem
