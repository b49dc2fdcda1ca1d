#include "cli/buffer.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <new>
#include <numbers>

#include "cli/plain/rows.h"
#include "problem/convert.h"

namespace tandem::tool {
namespace {

constexpr std::align_val_t alignment{64};

tandem_dtype dtype_code(DType dtype) {
  switch (dtype) {
    case DType::f64: return float64;
    case DType::f32: return float32;
    case DType::bf16: return bfloat16;
    case DType::f16: return float16;
    case DType::boolean: return boolean;
    case DType::i32: return int32;
    case DType::i64: return int64;
  }
  return float32;
}

struct Kind {
  io::Element element;
  DType dtype;
};
constexpr Kind kinds[] = {{io::Element::f64, DType::f64},         {io::Element::f32, DType::f32},
                          {io::Element::bf16, DType::bf16},       {io::Element::f16, DType::f16},
                          {io::Element::boolean, DType::boolean}, {io::Element::i32, DType::i32}};

// Refuses a tensor larger than this host's memory. An overcommitting kernel or a sanitizer would end the process
// instead of throwing bad_alloc.
void check_host_memory(size_t bytes) {
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (memory > 0 && static_cast<double>(bytes) > memory) throw std::bad_alloc();
}

double uniform(Random& random) { return (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53; }

}  // namespace

void Buffer::Free::operator()(std::byte* memory) const { ::operator delete[](memory, alignment); }

void Buffer::set_shape(DType dtype, std::vector<int64_t> shape) {
  dtype_ = dtype;
  shape_ = std::move(shape);
  count_ = 1;
  for (const int64_t extent : shape_) {
    if (extent < 0 || __builtin_mul_overflow(count_, extent, &count_) || count_ > INT64_MAX / 8)
      throw io::InputError("a tensor of shape " + io::shape_text(shape_) + " is too large: choose smaller sizes");
  }
}

Buffer Buffer::without_memory(DType dtype, std::vector<int64_t> shape) {
  Buffer buffer;
  buffer.set_shape(dtype, std::move(shape));
  return buffer;
}

Buffer::Buffer(DType dtype, std::vector<int64_t> shape) {
  set_shape(dtype, std::move(shape));
  const size_t size = std::max<size_t>(1, static_cast<size_t>(bytes()));
  check_host_memory(size);
  data_.reset(static_cast<std::byte*>(::operator new[](size, alignment)));
}

double Buffer::get(int64_t i) const { return load(dtype_, data_.get() + i * size_of(dtype_)); }
void Buffer::set(int64_t i, double value) const { store(dtype_, data_.get() + i * size_of(dtype_), value); }

Tensor Buffer::tensor() const {
  return *this ? Tensor(dtype_code(dtype_), static_cast<void*>(data_.get()), Sizes(std::span(shape_))) : Tensor();
}

io::FileTensor Buffer::view(const std::string& name) const {
  io::Element element = io::Element::f32;
  for (const Kind& kind : kinds) {
    if (kind.dtype == dtype_) element = kind.element;
  }
  return {name, element, shape_, {data_.get(), static_cast<size_t>(bytes())}};
}

Buffer Buffer::converted(DType dtype) const {
  Buffer result(dtype, shape_);
  for (int64_t i = 0; i < count_; ++i) result.set(i, get(i));
  return result;
}

Buffer random_buffer(Random& random, DType dtype, std::vector<int64_t> shape, double scale) {
  Buffer result(dtype, std::move(shape));
  float block[256];
  for (int64_t begin = 0; begin < result.count(); begin += 256) {
    const int64_t n = std::min<int64_t>(256, result.count() - begin);
    for (int64_t i = 0; i < n; i += 2) {  // Box and Muller's pairs
      const double radius = std::sqrt(-2 * std::log(uniform(random))) * scale;
      const double angle = 2 * std::numbers::pi * uniform(random);
      block[i] = static_cast<float>(radius * std::cos(angle));
      if (i + 1 < n) block[i + 1] = static_cast<float>(radius * std::sin(angle));
    }
    plain::store_row(dtype, block, n, result.data() + begin * size_of(dtype));
  }
  return result;
}

Buffer buffer_from(const io::FileTensor& view, const std::string& what, bool raw16_is_bf16) {
  io::Element element = view.element;
  if (element == io::Element::raw16) {
    if (!raw16_is_bf16)
      throw io::InputError(what + ": the type V2 has no meaning: pass --dtype bf16 if the elements are bfloat16");
    element = io::Element::bf16;
  }
  for (const Kind& kind : kinds) {
    if (kind.element != element) continue;
    Buffer result(kind.dtype, view.shape);
    std::memcpy(result.data(), view.data.data(), view.data.size());
    return result;
  }
  throw io::InputError(what + ": is " + io::name_of(element) +
                       " and must be F32, BF16, F16 or F64: convert the tensor");
}

DType dtype_from(const std::string& name) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    if (short_name(dtype) == name) return dtype;
  }
  throw io::InputError("dtype \"" + name + "\" must be f32, bf16, f16 or f64: choose one of them");
}

std::string short_name(DType dtype) {
  switch (dtype) {
    case DType::f64: return "f64";
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::boolean: return "bool";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
  }
  return "?";
}

}  // namespace tandem::tool
