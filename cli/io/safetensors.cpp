#include "cli/io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>

#include "cli/io/file.h"
#include "cli/io/json.h"

static_assert(std::endian::native == std::endian::little, "both formats are read as they lie in memory");

namespace tandem::io {
namespace {

constexpr uint64_t max_header = 100'000'000;  // limit of the format's reference library

std::optional<Element> element_of(std::string_view name) {
  for (const Element element : {Element::boolean, Element::u8, Element::i8, Element::f8_e4m3, Element::f8_e5m2,
                                Element::u16, Element::i16, Element::f16, Element::bf16, Element::u32, Element::i32,
                                Element::f32, Element::u64, Element::i64, Element::f64}) {
    if (name == name_of(element)) return element;
  }
  return std::nullopt;
}

struct TensorEntry {
  std::string name;
  std::optional<std::string> dtype;
  std::optional<std::vector<int64_t>> shape;
  std::optional<std::vector<int64_t>> offsets;
};

// Follows the parser's events through the three levels of a header, so that other values are never stored.
class HeaderReader : public JsonEvents {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  std::vector<TensorEntry> entries;
  std::map<std::string, std::string> metadata;

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_float(double, const std::string& text) override { return unexpected("the number " + text.substr(0, 30)); }
  bool number_integer(int64_t value) override { return unexpected("the number " + std::to_string(value)); }

  bool number_unsigned(uint64_t value) override {
    if (!numbers_) return unexpected("the number " + std::to_string(value));
    if (value > uint64_t{INT64_MAX})
      refuse("the number " + std::to_string(value) + " must be at most 2^63 - 1: correct the header");
    const size_t most = key_ == "shape" ? max_dimensions : 2;
    if (numbers_->size() == most) refuse("has more than " + std::to_string(most) + " numbers: correct the header");
    numbers_->push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(const std::string& text) override {
    if (depth_ == 2 && in_metadata_) {
      metadata[key_] = text;
      return true;
    }
    if (depth_ != 2 || numbers_ || key_ != "dtype") return unexpected("the text " + in_quotes(text));
    entries.back().dtype = text;
    return true;
  }

  bool start_object() override {
    if (depth_ == 2 || numbers_) return unexpected("an object");
    ++depth_;
    return true;
  }

  bool end_object() override {
    --depth_;
    in_metadata_ = false;
    key_.clear();
    return true;
  }

  bool key(const std::string& name) override {
    if (depth_ == 1) {
      if (!names_.insert(name).second)
        throw InputError(file_ + ": header: the key " + in_quotes(name) + " must be given once: rename one of the two");
      fields_.clear();
      in_metadata_ = name == "__metadata__";
      key_.clear();
      if (!in_metadata_) entries.push_back({name, {}, {}, {}});
      return true;
    }
    key_ = name;
    if (!fields_.insert(name).second) refuse("must be given once: remove one of the two");
    if (!in_metadata_ && name != "dtype" && name != "shape" && name != "data_offsets")
      refuse("must be dtype, shape or data_offsets: remove this field");
    return true;
  }

  bool start_array() override {
    if (depth_ != 2 || in_metadata_ || numbers_ || key_ == "dtype") return unexpected("an array");
    numbers_ = key_ == "shape" ? &entries.back().shape.emplace() : &entries.back().offsets.emplace();
    return true;
  }

  bool end_array() override {
    numbers_ = nullptr;
    return true;
  }

  bool parse_error(size_t position, const std::string& message) override {
    // message is "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error while ... - why; ..."
    std::string why = message;
    if (const size_t at = why.find(": "); at != std::string::npos) why.erase(0, at + 2);
    std::string clean;
    for (const char c : why.substr(0, 120)) clean += (c >= 0x20 && c < 0x7f) ? c : '?';
    throw InputError(file_ + ": header: must be valid JSON, but has an error at byte " + std::to_string(position) +
                     ": " + clean);
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    const std::string tensor = entries.empty() ? "" : entries.back().name;
    const std::string where = in_metadata_ ? "__metadata__" : "tensor " + in_quotes(tensor);
    throw InputError(file_ + ": " + where + ": " + (key_.empty() ? "" : in_quotes(key_) + " ") + why);
  }

  bool unexpected(const std::string& what) const {
    if (depth_ == 0)
      throw InputError(file_ + ": header: is " + what + " and must be an object of tensors: correct the header");
    if (in_metadata_) refuse("is " + what + ", but metadata must be an object of texts: correct the header");
    if (key_ == "dtype") refuse("is " + what + " and must be a text: correct the header");
    if (numbers_) refuse("contains " + what + " and must contain whole numbers of at least 0: correct the header");
    refuse("is " + what +
           (key_.empty() ? " and must be an object: correct the header"
                         : " and must be an array of numbers: correct the header"));
  }

  const std::string& file_;
  int depth_ = 0;
  bool in_metadata_ = false;
  std::string key_;
  std::vector<int64_t>* numbers_ = nullptr;
  std::set<std::string> names_, fields_;
};

FileTensor tensor_of(const TensorEntry& entry, std::span<const std::byte> data, const std::string& file) {
  const auto refuse = [&](const std::string& why) {
    throw InputError(file + ": tensor " + in_quotes(entry.name) + ": " + why);
  };
  if (!entry.dtype) refuse("has no \"dtype\": add the field");
  if (!entry.shape) refuse("has no \"shape\": add the field");
  if (!entry.offsets || entry.offsets->size() != 2) refuse("must have \"data_offsets\": add [begin, end]");
  const auto element = element_of(*entry.dtype);
  if (!element) {
    refuse("dtype " + in_quotes(*entry.dtype) +
           " must be one of BOOL, U8, I8, F8_E4M3, F8_E5M2, U16, I16, F16, BF16, U32, I32, F32, U64, I64, F64: convert "
           "the tensor");
  }
  const auto bytes = byte_size(*entry.shape, *element);
  if (!bytes) refuse("shape " + shape_text(*entry.shape) + " must fit into 2^63 - 1 bytes: correct the header");
  const int64_t begin = (*entry.offsets)[0], end = (*entry.offsets)[1];
  const std::string range = "data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) + "]";
  if (begin > end) refuse(range + " must have a begin of at most the end: correct the header");
  if (end > static_cast<int64_t>(data.size()))
    refuse(range + " must be at most the " + std::to_string(data.size()) + " bytes of data: write the file again");
  if (end - begin != *bytes) {
    refuse(range + " hold " + std::to_string(end - begin) + " bytes but " + *entry.dtype + " " +
           shape_text(*entry.shape) + " needs " + std::to_string(*bytes) + ": correct the header");
  }
  return {entry.name, *element, *entry.shape, data.subspan(static_cast<size_t>(begin), static_cast<size_t>(*bytes))};
}

// Every byte of data must belong to exactly one tensor, because other files hide content or share it.
void check_coverage(const Safetensors& result, std::span<const std::byte> data, const std::string& file) {
  size_t covered = 0;
  for (const FileTensor& tensor : result.tensors) {
    const auto begin = static_cast<size_t>(tensor.data.data() - data.data());
    if (begin == covered) {
      covered += tensor.data.size();
      continue;
    }
    const char* problem =
        begin < covered ? " overlaps the previous tensor" : " leaves a hole after the previous tensor";
    throw InputError(file + ": tensor " + in_quotes(tensor.name) + ": begins at byte " + std::to_string(begin) +
                     " and" + problem + ", which ends at " + std::to_string(covered) +
                     ": write the tensors one after another");
  }
  if (covered != data.size()) {
    throw InputError(file + ": " + std::to_string(data.size() - covered) +
                     " bytes after the last tensor belong to no tensor: remove these bytes");
  }
}

}  // namespace

const FileTensor* Safetensors::find(std::string_view name) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

Safetensors parse_safetensors(std::span<const std::byte> bytes, const std::string& file) {
  uint64_t length = 0;
  if (bytes.size() < sizeof length) {
    throw InputError(file + ": is " + std::to_string(bytes.size()) +
                     " bytes long and must begin with 8 bytes of header length: write the file again");
  }
  std::memcpy(&length, bytes.data(), sizeof length);
  const uint64_t rest = bytes.size() - sizeof length;
  if (length > max_header)
    throw InputError(file + ": header length " + std::to_string(length) +
                     " must be at most 100000000: write the file again");
  if (length > rest) {
    throw InputError(file + ": header length " + std::to_string(length) + " must be at most the " +
                     std::to_string(rest) + " bytes that follow: write the file again");
  }
  const auto* header = reinterpret_cast<const char*>(bytes.data()) + sizeof length;
  if (length == 0 || header[0] != '{') throw InputError(file + ": header: must begin with '{': write the file again");
  HeaderReader reader(file);
  read_json({header, length}, reader);

  const auto data = bytes.subspan(sizeof length + length);
  Safetensors result;
  result.metadata = std::move(reader.metadata);
  for (const TensorEntry& entry : reader.entries) result.tensors.push_back(tensor_of(entry, data, file));
  std::stable_sort(result.tensors.begin(), result.tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.data.data(), a.data.size()) < std::pair(b.data.data(), b.data.size());
  });
  check_coverage(result, data, file);
  return result;
}

void write_safetensors(const std::string& path, std::span<const FileTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const FileTensor& tensor : tensors) {
    const auto end = offset + static_cast<int64_t>(tensor.data.size());
    header[tensor.name] = {
        {"dtype", name_of(tensor.element)}, {"shape", tensor.shape}, {"data_offsets", std::vector{offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // aligns the tensors in a mapped file
  const uint64_t length = text.size();

  AtomicFile out(path);
  out.write(std::as_bytes(std::span(&length, 1)));
  out.write(text);
  for (const FileTensor& tensor : tensors) out.write(tensor.data);
  out.commit();
}

}  // namespace tandem::io
