#include "cli/vgpu/element.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#include "problem/convert.h"
#include "vgpu/src/units/numbers.h"

namespace tandem::tool {
namespace {

using io::Element;
using vgpu::units::Format;

template <class T>
double as_number(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return static_cast<double>(value);
}

template <class T>
void put(std::byte* to, double value) {
  const T converted = static_cast<T>(static_cast<int64_t>(std::nearbyint(value)));
  std::memcpy(to, &converted, sizeof converted);
}

double decoded(Format format, const std::byte* from) {
  return static_cast<double>(vgpu::units::decode(std::to_integer<uint32_t>(*from), format));
}
void encode(Format format, std::byte* to, double value) {
  *to = static_cast<std::byte>(vgpu::units::encode(static_cast<float>(value), format));
}

}  // namespace

double get_element(Element type, const std::byte* from) {
  switch (type) {
    case Element::boolean:
    case Element::u8: return as_number<uint8_t>(from);
    case Element::i8: return as_number<int8_t>(from);
    case Element::f8_e4m3: return decoded(Format::e4m3, from);
    case Element::f8_e5m2: return decoded(Format::e5m2, from);
    case Element::raw16:
    case Element::u16: return as_number<uint16_t>(from);
    case Element::i16: return as_number<int16_t>(from);
    case Element::f16: return load(DType::f16, from);
    case Element::bf16: return load(DType::bf16, from);
    case Element::u32: return as_number<uint32_t>(from);
    case Element::i32: return as_number<int32_t>(from);
    case Element::f32: return as_number<float>(from);
    case Element::u64: return as_number<uint64_t>(from);
    case Element::i64: return as_number<int64_t>(from);
    case Element::f64: return as_number<double>(from);
  }
  return 0;
}

void set_element(Element type, std::byte* to, double value) {
  switch (type) {
    case Element::boolean: return put<uint8_t>(to, value != 0);
    case Element::u8: return put<uint8_t>(to, value);
    case Element::i8: return put<int8_t>(to, value);
    case Element::f8_e4m3: return encode(Format::e4m3, to, value);
    case Element::f8_e5m2: return encode(Format::e5m2, to, value);
    case Element::raw16:
    case Element::u16: return put<uint16_t>(to, value);
    case Element::i16: return put<int16_t>(to, value);
    case Element::f16: return store(DType::f16, to, value);
    case Element::bf16: return store(DType::bf16, to, value);
    case Element::u32: return put<uint32_t>(to, value);
    case Element::i32: return put<int32_t>(to, value);
    case Element::f32: return store(DType::f32, to, value);
    case Element::u64: return put<uint64_t>(to, value);
    case Element::i64: return put<int64_t>(to, value);
    case Element::f64: return store(DType::f64, to, value);
  }
}

}  // namespace tandem::tool
