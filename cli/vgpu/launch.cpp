#include "cli/vgpu/launch.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>

#include "base/text.h"
#include "cli/io/file.h"
#include "cli/io/json.h"
#include "cli/io/npy.h"

namespace tandem::tool {
namespace {

using io::Element;
using io::InputError;
using io::Json;

struct TypeName {
  const char* name;
  Element element;
  gpu::TensorType map;
};
constexpr TypeName types[] = {
    {"u8", Element::u8, gpu::TensorType::u8},        {"i8", Element::i8, gpu::TensorType::u8},
    {"e4m3", Element::f8_e4m3, gpu::TensorType::u8}, {"e5m2", Element::f8_e5m2, gpu::TensorType::u8},
    {"u16", Element::u16, gpu::TensorType::u16},     {"i16", Element::i16, gpu::TensorType::u16},
    {"f16", Element::f16, gpu::TensorType::f16},     {"bf16", Element::bf16, gpu::TensorType::bf16},
    {"u32", Element::u32, gpu::TensorType::u32},     {"i32", Element::i32, gpu::TensorType::s32},
    {"f32", Element::f32, gpu::TensorType::f32},     {"u64", Element::u64, gpu::TensorType::u64},
    {"i64", Element::i64, gpu::TensorType::s64},     {"f64", Element::f64, gpu::TensorType::f64},
};

// Types that only tensor maps have.
constexpr TypeName map_types[] = {
    {"f32_ftz", Element::f32, gpu::TensorType::f32_ftz},      {"tf32", Element::f32, gpu::TensorType::tf32},
    {"tf32_ftz", Element::f32, gpu::TensorType::tf32_ftz},    {"u4_align8", Element::u8, gpu::TensorType::u4_align8},
    {"u4_align16", Element::u8, gpu::TensorType::u4_align16}, {"u6_align16", Element::u8, gpu::TensorType::u6_align16},
};

// Returns a member's value as T, or nothing if it has another type or does not fit into T.
template <class T>
std::optional<T> value_of(const Json& json) {
  if constexpr (std::is_same_v<T, std::string>) {
    return json.text();
  } else if constexpr (std::is_same_v<T, bool>) {
    return json.boolean();
  } else if constexpr (std::is_same_v<T, double>) {
    return json.real();
  } else {
    if (!json.is_list()) return std::nullopt;
    T values;
    for (const Json& item : json.items()) {
      std::optional<typename T::value_type> value;
      if constexpr (std::is_signed_v<typename T::value_type>) {
        if (const auto number = item.integer()) value = *number;
      } else {
        using Limits = std::numeric_limits<typename T::value_type>;
        const auto number = item.unsigned_integer();
        if (number && *number <= Limits::max()) value = static_cast<typename T::value_type>(*number);
      }
      if (!value) return std::nullopt;
      values.push_back(*value);
    }
    return values;
  }
}

// An object of the file. The object's keys are read one by one; an unread key is an error.
class Fields {
 public:
  Fields(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json_.is_object()) refuse("", "must be an object: write { }");
  }

  bool has(const char* key) {
    asked_.insert(key);
    return json_.find(key) != nullptr;
  }
  const Json& at(const char* key) {
    if (!has(key)) refuse(key, "must be given: add the key");
    return *json_.find(key);
  }
  template <class T>
  T get(const char* key) {
    if (std::optional<T> value = value_of<T>(at(key))) return *std::move(value);
    refuse(key, str_cat("(", at(key).dump(), ") must have another type: see vgpu/docs/virtual-gpu.md"));
  }
  template <class T>
  T get(const char* key, const T& otherwise) {
    return has(key) ? get<T>(key) : otherwise;
  }
  // Reads a whole number from 0 on, also as a string, "0xff".
  uint64_t count(const char* key) { return integer(key, at(key)); }
  uint64_t count(const char* key, uint64_t otherwise) { return has(key) ? count(key) : otherwise; }
  // value belongs to the key, or is in the key's list.
  uint64_t integer(const char* key, const Json& value) const {
    if (const auto number = value.integer()) return static_cast<uint64_t>(*number);
    if (const auto number = value.unsigned_integer()) return *number;
    if (value.text()) {
      const std::string text = *value.text();
      size_t used = 0;
      try {
        const uint64_t number = std::stoull(text, &used, 0);
        if (used == text.size()) return number;
      } catch (const std::exception&) {
        used = 0;
      }
    }
    refuse(key, str_cat("(", value.dump(),
                        ") must be a whole number: write digits, or a hexadecimal number in quotes such as \"0x1f\""));
  }
  // Returns the element of a list of names.
  template <class List>
  auto choice(const char* key, const List& list) {
    const auto name = get<std::string>(key);
    std::string known;
    for (const auto& one : list) {
      if (name == one.name) return one;
      known += str_cat(known.empty() ? "" : ", ", one.name);
    }
    refuse(key, str_cat("(", io::in_quotes(name), ") must be one of ", known, ": choose one"));
  }

  void finish() const {
    for (const auto& [key, value] : json_.members()) {
      if (!asked_.contains(key)) refuse(key, "must be a known field: see vgpu/docs/virtual-gpu.md");
    }
  }
  std::string place(const std::string& key) const {
    return key.empty() ? where_ : where_ + (where_.ends_with(' ') ? "" : ".") + key;
  }
  [[noreturn]] void refuse(const std::string& key, const std::string& why) const {
    throw InputError(place(key) + " " + why);
  }

 private:
  const Json& json_;
  const std::string where_;
  std::set<std::string> asked_;
};

gpu::Dim3 read_dim3(Fields& fields, const char* key, bool required) {
  if (!required && !fields.has(key)) return {};
  const auto sizes = fields.get<std::vector<uint32_t>>(key);
  if (sizes.empty() || sizes.size() > 3 || std::ranges::count(sizes, 0u) > 0)
    fields.refuse(key, "must be one to three numbers from 1 on: write [x, y, z]");
  return {sizes[0], sizes.size() > 1 ? sizes[1] : 1, sizes.size() > 2 ? sizes[2] : 1};
}

void read_size(Fields& fields, const LaunchFile& file, LaunchBuffer* buffer) {
  if (fields.has("shape")) {
    buffer->shape = fields.get<std::vector<int64_t>>("shape");
  } else if (fields.has("bytes")) {
    const auto bytes = static_cast<int64_t>(fields.count("bytes"));
    if (bytes % io::size_of(buffer->type) != 0)
      fields.refuse("bytes", "must be whole elements of the type: round the size up");
    buffer->shape = {bytes / io::size_of(buffer->type)};
  } else if (buffer->fill == LaunchBuffer::Fill::file) {
    const io::MappedFile mapped(file.beside(buffer->file));
    buffer->shape = io::parse_npy(mapped.bytes(), buffer->file).shape;
  } else {
    fields.refuse("bytes", "or shape must be given: add the size");
  }
  const bool negative = std::ranges::any_of(buffer->shape, [](int64_t size) { return size < 0; });
  const std::optional<int64_t> bytes = negative ? std::nullopt : io::byte_size(buffer->shape, buffer->type);
  if (!bytes)
    fields.refuse("shape", str_cat(io::shape_text(buffer->shape),
                                   " must have a size from 0 to 2^63 - 1 bytes: correct the shape"));
  buffer->bytes = static_cast<size_t>(*bytes);
}

LaunchBuffer read_buffer(const Json& json, const LaunchFile& file, const std::string& where) {
  using Fill = LaunchBuffer::Fill;
  struct FillName {
    const char* name;
    Fill fill;
  };
  constexpr FillName fills[] = {
      {"none", Fill::none}, {"zeros", Fill::zeros}, {"normal", Fill::normal}, {"iota", Fill::iota}};
  Fields fields(json, where);
  LaunchBuffer buffer;
  buffer.name = fields.get<std::string>("name");
  buffer.type = fields.has("type") ? fields.choice("type", types).element : Element::u8;
  if (fields.has("fill")) buffer.fill = fields.choice("fill", fills).fill;
  buffer.seed = fields.count("seed", 1);
  buffer.scale = fields.get<double>("scale", 1.0);
  buffer.file = fields.get<std::string>("file", "");
  if (!buffer.file.empty()) {
    if (buffer.fill != Fill::none) fields.refuse("file", "must not be given with fill: remove one of the two");
    buffer.fill = Fill::file;
  }
  buffer.read_only = fields.get<bool>("read_only", false);
  buffer.expected = fields.get<std::string>("expected", "");
  buffer.tolerance = fields.get<double>("tolerance", 0.0);
  read_size(fields, file, &buffer);
  fields.finish();
  return buffer;
}

int buffer_named(const std::string& name, const LaunchFile& file, const Fields& fields, const char* key) {
  const auto found = std::ranges::find(file.buffers, name, &LaunchBuffer::name);
  if (found == file.buffers.end())
    fields.refuse(key, str_cat("(", io::in_quotes(name), ") must name one of the buffers: correct the name"));
  return static_cast<int>(found - file.buffers.begin());
}

template <class T>
void append(std::vector<std::byte>& bytes, T value) {
  const auto* begin = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), begin, begin + sizeof value);
}

std::vector<std::byte> hex_bytes(Fields& fields) {
  std::string digits = fields.get<std::string>("hex");
  std::erase_if(digits, [](char c) { return c == ' ' || c == '_'; });
  const bool whole = digits.size() % 2 == 0 && digits.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
  if (!whole)
    fields.refuse("hex",
                  "must be two hexadecimal digits for each byte, the first byte first: write an even number of digits");
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < digits.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  return bytes;
}

gpu::TensorMapSpec read_map(Fields& fields, const LaunchFile& file, LaunchParameter* parameter) {
  struct SwizzleName {
    const char* name;
    gpu::Swizzle swizzle;
  };
  using gpu::Swizzle;
  constexpr SwizzleName swizzles[] = {{"none", Swizzle::none},
                                      {"32B", Swizzle::b32},
                                      {"64B", Swizzle::b64},
                                      {"128B", Swizzle::b128},
                                      {"128B_atom_32B", Swizzle::b128_atom_32b},
                                      {"128B_atom_32B_flip_8B", Swizzle::b128_atom_32b_flip_8b},
                                      {"128B_atom_64B", Swizzle::b128_atom_64b}};
  struct FillName {
    const char* name;
    gpu::OobFill fill;
  };
  constexpr FillName fills[] = {{"zero", gpu::OobFill::zero}, {"nan", gpu::OobFill::nan}};
  std::vector<TypeName> of_maps(std::begin(types), std::end(types));
  of_maps.insert(of_maps.end(), std::begin(map_types), std::end(map_types));
  gpu::TensorMapSpec spec;
  parameter->buffer = buffer_named(fields.get<std::string>("buffer"), file, fields, "buffer");
  parameter->offset = static_cast<int64_t>(fields.count("offset", 0));
  spec.type = fields.has("type") ? fields.choice("type", of_maps).map
                                 : std::ranges::find(types, file.buffers[static_cast<size_t>(parameter->buffer)].type,
                                                     &TypeName::element)
                                       ->map;
  const auto dims = fields.get<std::vector<uint64_t>>("dims");
  const auto strides = fields.get<std::vector<uint64_t>>("byte_strides", {});
  const auto box = fields.get<std::vector<uint32_t>>("box");
  const auto steps = fields.get<std::vector<uint32_t>>("element_strides", std::vector<uint32_t>(dims.size(), 1));
  if (dims.empty() || dims.size() > gpu::kMaxTensorRank)
    fields.refuse("dims", "must be one to five sizes: list the sizes");
  if (strides.size() + 1 != dims.size())
    fields.refuse("byte_strides", "must have one stride for each dimension but the first: list the strides");
  if (box.size() != dims.size()) fields.refuse("box", "must have one size for each dimension: list the sizes");
  if (steps.size() != dims.size())
    fields.refuse("element_strides", "must have one step for each dimension: list the steps");
  spec.rank = static_cast<int32_t>(dims.size());
  std::ranges::copy(dims, spec.dims);
  std::ranges::copy(strides, spec.byte_strides + 1);
  std::ranges::copy(box, spec.box);
  std::ranges::copy(steps, spec.element_strides);
  if (fields.has("swizzle")) spec.swizzle = fields.choice("swizzle", swizzles).swizzle;
  if (fields.has("out_of_bounds")) spec.oob_fill = fields.choice("out_of_bounds", fills).fill;
  fields.finish();
  return spec;
}

// Reads one number or a list of numbers, in any of the types. Returns the number of types in the file.
int read_numbers(Fields& fields, LaunchParameter* parameter) {
  int types_given = 0;
  const auto numbers = [&](const char* key, auto type, auto&& value_of) {
    if (!fields.has(key)) return;
    ++types_given;
    parameter->alignment = sizeof type;
    const Json& value = fields.at(key);
    for (const Json& one : value.is_list() ? value.items() : Json::List{value})
      append(parameter->bytes, static_cast<decltype(type)>(value_of(key, one)));
  };
  const auto integer = [&](const char* key, const Json& one) { return fields.integer(key, one); };
  const auto real = [&](const char* key, const Json& one) -> double {
    if (const auto number = one.real()) return *number;
    fields.refuse(key, str_cat("(", one.dump(), ") must be a number: write a number"));
  };
  numbers("i8", int8_t{}, integer), numbers("u8", uint8_t{}, integer);
  numbers("i16", int16_t{}, integer), numbers("u16", uint16_t{}, integer);
  numbers("i32", int32_t{}, integer), numbers("u32", uint32_t{}, integer);
  numbers("i64", int64_t{}, integer), numbers("u64", uint64_t{}, integer);
  numbers("f32", float{}, real), numbers("f64", double{}, real);
  return types_given;
}

LaunchParameter read_parameter(const Json& json, const LaunchFile& file, const std::string& where) {
  Fields fields(json, where);
  LaunchParameter parameter;
  constexpr uint64_t most = 32764;  // PTX's limit
  if (fields.has("at")) parameter.at = fields.count("at");
  if (parameter.at > most)
    fields.refuse("at", str_cat("(", *parameter.at, ") must be at most ", most, ": use a smaller offset"));
  int values = read_numbers(fields, &parameter);
  if (fields.has("hex")) ++values, parameter.bytes = hex_bytes(fields);
  if (fields.has("pointer")) {
    ++values;
    parameter.alignment = sizeof(void*);
    parameter.buffer = buffer_named(fields.get<std::string>("pointer"), file, fields, "pointer");
    parameter.offset = static_cast<int64_t>(fields.count("offset", 0));
  }
  if (fields.has("tensor_map")) {
    ++values;
    parameter.alignment = alignof(gpu::TensorMap);
    Fields map(fields.at("tensor_map"), fields.place("tensor_map"));
    parameter.map = read_map(map, file, &parameter);
  }
  if (fields.has("struct")) {
    ++values;
    const Json& parts = fields.at("struct");
    if (!parts.is_list() || parts.items().empty()) fields.refuse("struct", "must be a list: write the parts in [ ]");
    for (size_t n = 0; n < parts.items().size(); ++n)
      parameter.parts.push_back(read_parameter(parts.items()[n], file, str_cat(fields.place("struct"), "[", n, "]")));
  }
  constexpr const char* kinds = "i32, u32, i64, u64, f32, f64, hex, pointer, tensor_map, struct, ...";
  if (values == 0) fields.refuse("", str_cat("must have a value: add one of ", kinds));
  if (values > 1) fields.refuse("", str_cat("must have one value, not several: keep one of ", kinds));
  fields.finish();
  return parameter;
}

}  // namespace

std::string LaunchFile::beside(const std::string& file) const {
  return (std::filesystem::path(path).parent_path() / file).string();
}

LaunchFile read_launch(const std::string& path) {
  LaunchFile file;
  file.path = path;
  const io::MappedFile mapped(path);
  const auto* text = reinterpret_cast<const char*>(mapped.bytes().data());
  Json json;
  try {
    json = io::parse_json({text, mapped.bytes().size()});
  } catch (const io::JsonError& error) {
    throw InputError(path + ": must be JSON (" + error.what() + "): correct the file");
  }
  Fields fields(json, path + ": ");
  file.entry = fields.get<std::string>("entry", "");
  file.grid = read_dim3(fields, "grid", true);
  file.block = read_dim3(fields, "block", true);
  file.cluster = read_dim3(fields, "cluster", false);
  file.dynamic_shared_bytes = static_cast<uint32_t>(fields.count("dynamic_shared_bytes", 0));
  file.cooperative = fields.get<bool>("cooperative", false);
  const auto each = [&](const char* key, auto&& read) {
    if (!fields.has(key)) return;
    const Json& list = fields.at(key);
    if (!list.is_list()) fields.refuse(key, "must be a list: write [ ]");
    for (size_t n = 0; n < list.items().size(); ++n) read(list.items()[n], str_cat(fields.place(key), "[", n, "]"));
  };
  each("buffers",
       [&](const Json& one, const std::string& where) { file.buffers.push_back(read_buffer(one, file, where)); });
  each("parameters",
       [&](const Json& one, const std::string& where) { file.parameters.push_back(read_parameter(one, file, where)); });
  fields.finish();
  return file;
}

}  // namespace tandem::tool
