#include "cli/io/npy.h"

#include <cstring>

#include "cli/io/file.h"

namespace tandem::io {
namespace {

constexpr std::string_view magic = "\x93NUMPY";
constexpr uint64_t max_header = 65536;  // headers of plain arrays are about 120 bytes

struct Descr {
  std::string_view text;
  Element element;
};
constexpr Descr descrs[] = {
    {"|b1", Element::boolean}, {"|u1", Element::u8},  {"|i1", Element::i8},    {"<u2", Element::u16},
    {"<i2", Element::i16},     {"<f2", Element::f16}, {"<V2", Element::raw16}, {"|V2", Element::raw16},
    {"<u4", Element::u32},     {"<i4", Element::i32}, {"<f4", Element::f32},   {"<u8", Element::u64},
    {"<i8", Element::i64},     {"<f8", Element::f64},
};

// Reads the dictionary literal: exactly the three keys, each once, in any order.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  void read() {
    expect('{');
    while (!accept('}')) {
      read_item();
      if (accept('}')) break;
      expect(',');
    }
    skip_space();
    if (at_ != text_.size()) syntax("the end of the header");
    if (!has_descr_) refuse("has no 'descr': save the array with numpy.save");
    if (!has_order_) refuse("has no 'fortran_order': save the array with numpy.save");
    if (!has_shape_) refuse("has no 'shape': save the array with numpy.save");
  }

  std::string descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;

  [[noreturn]] void refuse(const std::string& why) const { throw InputError(file_ + ": header: " + why); }

 private:
  void read_item() {
    const std::string key = read_string("a key in quotes");
    expect(':');
    if (key == "descr") {
      once(has_descr_, key);
      skip_space();
      if (at_ < text_.size() && text_[at_] == '[')
        refuse("'descr' must be one type, not a list of fields: save one field as an array");
      descr = read_string("a type in quotes");
    } else if (key == "fortran_order") {
      once(has_order_, key);
      fortran_order = read_bool();
    } else if (key == "shape") {
      once(has_shape_, key);
      read_shape();
    } else {
      refuse(in_quotes(key) + " must be descr, fortran_order or shape: save the array with numpy.save");
    }
  }

  void once(bool& seen, const std::string& key) const {
    if (seen) refuse("'" + key + "' must be given once: save the array with numpy.save");
    seen = true;
  }

  [[noreturn]] void syntax(const char* expected) const {
    const std::string found = at_ < text_.size() ? in_quotes(text_.substr(at_, 1)) : "the end";
    refuse(std::string("must be a dictionary of numpy: write ") + expected + " at byte " + std::to_string(at_) +
           ", not " + found);
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }

  bool accept(char c) {
    skip_space();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    const char what[] = {'\'', c, '\'', 0};
    if (!accept(c)) syntax(what);
  }

  std::string read_string(const char* what) {
    const char quote = accept('\'') ? '\'' : accept('"') ? '"' : 0;
    if (!quote) syntax(what);
    const size_t end = text_.find(quote, at_);
    if (end == std::string_view::npos) syntax("a closing quote");
    const std::string result(text_.substr(at_, end - at_));
    at_ = end + 1;
    return result;
  }

  bool read_bool() {
    skip_space();
    for (const auto& [word, value] : {std::pair{std::string_view("True"), true}, {std::string_view("False"), false}}) {
      if (text_.substr(at_).starts_with(word)) {
        at_ += word.size();
        return value;
      }
    }
    syntax("True or False");
  }

  void read_shape() {
    expect('(');
    bool comma = true;
    while (!accept(')')) {
      if (!comma) syntax("',' or ')'");
      if (shape.size() == max_dimensions) refuse("'shape' must have at most 64 dimensions: reshape the array");
      shape.push_back(read_extent());
      comma = accept(',');
    }
    if (shape.size() == 1 && !comma) refuse("'shape' must be a tuple, not a number in brackets: write (n,)");
  }

  int64_t read_extent() {
    skip_space();
    if (at_ < text_.size() && text_[at_] == '-') refuse("'shape' must have no negative number: correct the header");
    const size_t begin = at_;
    int64_t value = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
          __builtin_add_overflow(value, int64_t{text_[at_] - '0'}, &value))
        refuse("'shape' must have no number above 2^63 - 1: correct the header");
    }
    if (at_ == begin) syntax("a number");
    return value;
  }

  std::string_view text_;
  const std::string& file_;
  size_t at_ = 0;
  bool has_descr_ = false, has_order_ = false, has_shape_ = false;
};

Element element_of(const HeaderReader& header) {
  for (const Descr& known : descrs) {
    if (header.descr == known.text) return known.element;
  }
  if (header.descr.starts_with('>'))
    header.refuse("'descr' " + in_quotes(header.descr) +
                  " must be little-endian: convert the array with .astype('<f4')");
  header.refuse("'descr' " + in_quotes(header.descr) +
                " must be a boolean, an integer, <f2, <f4, <f8 or <V2 (bfloat16): convert the array");
}

}  // namespace

FileTensor parse_npy(std::span<const std::byte> bytes, const std::string& file) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with(magic)) throw InputError(file + ": must begin as a .npy file (\\x93NUMPY): pass a .npy file");
  if (bytes.size() < 10)
    throw InputError(file + ": must not be truncated within the first 10 bytes: write the file again");
  const int major = std::to_integer<int>(bytes[6]), minor = std::to_integer<int>(bytes[7]);
  if (major < 1 || major > 3 || minor != 0) {
    throw InputError(file + ": version " + std::to_string(major) + "." + std::to_string(minor) +
                     " must be 1.0, 2.0 or 3.0: save the array with numpy.save");
  }
  const size_t prefix = major == 1 ? 10 : 12;
  if (bytes.size() < prefix)
    throw InputError(file + ": must not be truncated within the first 12 bytes: write the file again");
  uint32_t length = 0;
  std::memcpy(&length, bytes.data() + 8, prefix - 8);
  const size_t rest = bytes.size() - prefix;
  if (length > max_header)
    throw InputError(file + ": header length " + std::to_string(length) +
                     " must be at most 65536: save one array per file");
  if (length > rest) {
    throw InputError(file + ": header length " + std::to_string(length) + " must be at most the " +
                     std::to_string(rest) + " bytes that follow: write the file again");
  }
  HeaderReader header(text.substr(prefix, length), file);
  header.read();

  const Element element = element_of(header);
  if (header.fortran_order && header.shape.size() > 1)
    header.refuse("'fortran_order' must be False: save the array with numpy.ascontiguousarray");
  const auto size = byte_size(header.shape, element);
  if (!size) header.refuse("'shape' " + shape_text(header.shape) + " must fit into 2^63 - 1 bytes: correct the header");
  const auto data = bytes.subspan(prefix + length);
  if (static_cast<int64_t>(data.size()) != *size) {
    const bool less = static_cast<int64_t>(data.size()) < *size;
    throw InputError(file + ": holds " + std::to_string(data.size()) + " bytes of data but " + header.descr + " " +
                     shape_text(header.shape) + " needs " + std::to_string(*size) +
                     (less ? ": write the file again" : ": save one array per file"));
  }
  return {"", element, header.shape, data};
}

void write_npy(const std::string& path, const FileTensor& tensor) {
  const Element element = tensor.element == Element::bf16 ? Element::raw16 : tensor.element;
  std::string_view descr;
  for (const Descr& known : descrs) {
    if (known.element == element && descr.empty()) descr = known.text;
  }
  if (descr.empty()) throw InputError(path + ": .npy has no type " + name_of(element) + ": write a .safetensors file");
  std::string shape = "(";
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    shape += std::to_string(tensor.shape[i]);
    if (i + 1 < tensor.shape.size() || i == 0) shape += i + 1 < tensor.shape.size() ? ", " : ",";
  }
  std::string header = "{'descr': '" + std::string(descr) + "', 'fortran_order': False, 'shape': " + shape + "), }";
  constexpr size_t prefix = 10, alignment = 64;
  header.resize((prefix + header.size() + 1 + alignment - 1) / alignment * alignment - prefix - 1, ' ');
  header += '\n';
  const auto length = static_cast<uint16_t>(header.size());

  AtomicFile out(path);
  out.write(magic);
  out.write(std::string_view("\x01\x00", 2));
  out.write(std::as_bytes(std::span(&length, 1)));
  out.write(header);
  out.write(tensor.data);
  out.commit();
}

}  // namespace tandem::io
