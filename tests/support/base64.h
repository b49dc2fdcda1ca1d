// Bytes as text, for files of expected results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::test {

inline constexpr std::string_view kBase64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

// Omits the "=" at the end, because the length implies it.
inline std::string to_base64(std::span<const std::byte> bytes) {
  std::string text;
  uint32_t bits = 0;
  int count = 0;  // bits not yet written
  for (const std::byte b : bytes) {
    bits = bits << 8 | std::to_integer<uint32_t>(b);
    for (count += 8; count >= 6; count -= 6) text += kBase64[bits >> (count - 6) & 63];
  }
  if (count > 0) text += kBase64[bits << (6 - count) & 63];
  return text;
}

// Throws std::runtime_error with a sentence.
inline std::vector<std::byte> from_base64(std::string_view text) {
  std::vector<std::byte> bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const size_t digit = kBase64.find(c);
    if (digit == std::string_view::npos) throw std::runtime_error(std::string("'") + c + "' is no digit of base64");
    bits = bits << 6 | static_cast<uint32_t>(digit);
    count += 6;
    if (count < 8) continue;
    count -= 8;
    bytes.push_back(static_cast<std::byte>(bits >> count & 0xff));
  }
  return bytes;
}

}  // namespace tandem::test
