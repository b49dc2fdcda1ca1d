// Common code of the programs in this folder: JSON output, and the offsets of a kernel parameter's members.
#pragma once

#include <string>
#include <type_traits>

#include "base/text.h"
#include "config/forward.h"

inline std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text)
    json += c == '"' || c == '\\' ? std::string("\\") + c : c == '\n' ? "\\n" : std::string(1, c);
  return json + "\"";
}

// Returns ctypes' name of a member's type; "map" for a tensor map.
template <class T>
const char* c_type(const T&) {
  if constexpr (std::is_same_v<T, TensorMap>) return "map";
  if constexpr (std::is_pointer_v<T>) return "c_void_p";
  if constexpr (std::is_same_v<T, long long>) return "c_longlong";
  if constexpr (std::is_same_v<T, float>) return "c_float";
  if constexpr (std::is_same_v<T, int>) return "c_int";
  return "";
}

// Prints "name": [offset, type] of the members of p in order.
template <class Parameter>
struct Members {
  const Parameter p{};
  std::string json{};

  template <class T>
  void add(const char* name, const T& member) {
    const auto offset = reinterpret_cast<const char*>(&member) - reinterpret_cast<const char*>(&p);
    json += tandem::str_cat(json.empty() ? "" : ", ", quoted(name), ": [", offset, ", ", quoted(c_type(member)), "]");
  }
};
