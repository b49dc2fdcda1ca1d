// Common code of the file formats: a named tensor in memory, and the exception for refused input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::io {

// Element types of both formats. raw16 is .npy's "<V2": two bytes without a meaning, which is numpy's form of bfloat16.
enum class Element : uint8_t {
  boolean,
  u8,
  i8,
  f8_e4m3,
  f8_e5m2,
  u16,
  i16,
  f16,
  bf16,
  raw16,
  u32,
  i32,
  f32,
  u64,
  i64,
  f64
};

int64_t size_of(Element element);
const char* name_of(Element element);  // safetensors' names: "F32", "BF16", ...

// One tensor in row-major order. The tensor does not own its data, which need not be aligned.
struct FileTensor {
  std::string name;
  Element element = Element::f32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

// Refused input. what() is one sentence for the user: file, field, value, rule.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Returns "text" in quotes, shortened, with control characters escaped, so that any content of a file can be printed.
std::string in_quotes(std::string_view text);

std::string shape_text(std::span<const int64_t> shape);  // "(2, 3)", "(5,)", "()"

// Returns the bytes of a tensor of that shape, or nothing if the product does not fit into 63 bits.
std::optional<int64_t> byte_size(std::span<const int64_t> shape, Element element);

inline constexpr size_t max_dimensions = 64;  // numpy's limit, used for both formats

}  // namespace tandem::io
