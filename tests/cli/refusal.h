// Common code of the tests of both parsers: bytes from text, and the message of a refusal.
#pragma once

#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "cli/io/tensor.h"

namespace tandem::io {

using namespace std::string_literals;

inline std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

template <class Integer>
std::string little_endian(Integer value) {
  std::string text(sizeof value, '\0');
  std::memcpy(text.data(), &value, sizeof value);
  return text;
}

// Returns the message of parse(bytes, "file"), or "accepted".
template <class Parse>
std::string refusal(Parse parse, const std::string& text) {
  // A copy of exactly this size on the heap, so that the address sanitizer sees a read beyond it.
  const auto view = bytes_of(text);
  const std::vector<std::byte> exact(view.begin(), view.end());
  try {
    parse(std::span<const std::byte>(exact), "file");
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace tandem::io
