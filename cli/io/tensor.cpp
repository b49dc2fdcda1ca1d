#include "cli/io/tensor.h"

#include <cstdio>

namespace tandem::io {

int64_t size_of(Element element) {
  switch (element) {
    case Element::boolean:
    case Element::u8:
    case Element::i8:
    case Element::f8_e4m3:
    case Element::f8_e5m2: return 1;
    case Element::u16:
    case Element::i16:
    case Element::f16:
    case Element::bf16:
    case Element::raw16: return 2;
    case Element::u32:
    case Element::i32:
    case Element::f32: return 4;
    case Element::u64:
    case Element::i64:
    case Element::f64: return 8;
  }
  return 0;
}

const char* name_of(Element element) {
  switch (element) {
    case Element::boolean: return "BOOL";
    case Element::u8: return "U8";
    case Element::i8: return "I8";
    case Element::f8_e4m3: return "F8_E4M3";
    case Element::f8_e5m2: return "F8_E5M2";
    case Element::u16: return "U16";
    case Element::i16: return "I16";
    case Element::f16: return "F16";
    case Element::bf16: return "BF16";
    case Element::raw16: return "V2";
    case Element::u32: return "U32";
    case Element::i32: return "I32";
    case Element::f32: return "F32";
    case Element::u64: return "U64";
    case Element::i64: return "I64";
    case Element::f64: return "F64";
  }
  return "?";
}

std::string in_quotes(std::string_view text) {
  constexpr size_t longest = 60;
  std::string result = "\"";
  for (const char c : text.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (byte < 0x20 || byte >= 0x7f) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\x%02x", byte);
      result += escape;
    } else {
      result += c;
    }
  }
  if (text.size() > longest) result += "...";
  return result + "\"";
}

std::string shape_text(std::span<const int64_t> shape) {
  constexpr size_t longest = 8;
  std::string result = "(";
  for (size_t i = 0; i < shape.size() && i < longest; ++i) {
    if (i > 0) result += ", ";
    result += std::to_string(shape[i]);
  }
  if (shape.size() > longest) result += ", ...";
  if (shape.size() == 1) result += ",";
  return result + ")";
}

std::optional<int64_t> byte_size(std::span<const int64_t> shape, Element element) {
  int64_t bytes = size_of(element);
  for (const int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes;
}

}  // namespace tandem::io
