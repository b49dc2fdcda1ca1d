// Builds error messages: str_cat("k.head_dim (", 64, ") must equal ...").
#pragma once

#include <concepts>
#include <cstdio>
#include <string>
#include <string_view>

namespace tandem {

inline void append_to(std::string& text, std::string_view part) { text += part; }
inline void append_to(std::string& text, std::integral auto part) { text += std::to_string(part); }
inline void append_to(std::string& text, double part) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", part);
  text += digits;
}

template <class... Parts>
std::string str_cat(const Parts&... parts) {
  std::string text;
  (append_to(text, parts), ...);
  return text;
}

}  // namespace tandem

// Returns from the enclosing function with the first Status that is not ok.
#define TANDEM_TRY(expression)                                                  \
  do {                                                                          \
    if (::tandem::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)
