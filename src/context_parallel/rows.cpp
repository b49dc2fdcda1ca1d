#include "context_parallel/rows.h"

#include <algorithm>
#include <cstring>

#include "base/text.h"

namespace tandem::context_parallel {
namespace {

// A tensor of rows in the C interface's form: (1, rows, heads, dim).
struct RowTensor {
  RowTensor(const View& v, const RowShape& s) : shape{1, s.rows, s.heads, s.dim}, strides{0, v.row, v.head, 1} {
    tensor = {v.data, {TANDEM_CPU, 0}, 4, dtype_of(v.dtype), shape, strides, 0};
  }
  // The log-sum-exp: (1, heads, rows).
  static RowTensor of_lse(const View& v, const RowShape& s) {
    RowTensor t(v, s);
    t.shape[1] = s.heads, t.strides[1] = v.head;
    t.shape[2] = s.rows, t.strides[2] = v.row;
    t.tensor.ndim = 3;
    return t;
  }
  const tandem_tensor* get() {
    tensor.shape = shape;
    tensor.strides = strides;
    return &tensor;
  }

  static tandem_dtype dtype_of(DType t) {
    if (t == DType::boolean) return {TANDEM_BOOL, 8, 1};
    const auto bits = static_cast<uint8_t>(8 * size_of(t));
    return {static_cast<uint8_t>(t == DType::bf16 ? TANDEM_BFLOAT : TANDEM_FLOAT), bits, 1};
  }

  int64_t shape[4], strides[4];
  tandem_tensor tensor;
};

// lses: empty for a sum.
Status run(const RowEngine& engine, std::vector<RowTensor>& outs, std::vector<RowTensor>& lses, const OutPart& result,
           const RowShape& shape) {
  if (shape.rows == 0 || shape.heads == 0 || shape.dim == 0) return {};
  MergeProblem m;
  m.sum = lses.empty();
  m.parts = std::ssize(outs);
  m.batch = 1;
  m.seqlen = shape.rows;
  m.heads = shape.heads;
  m.head_dim = shape.dim;
  m.out = result.out;
  m.lse = result.lse;
  std::vector<const tandem_tensor*> out_list, lse_list;
  for (RowTensor& t : outs) out_list.push_back(t.get());
  for (RowTensor& t : lses) lse_list.push_back(t.get());
  m.part_out = out_list.data();
  m.part_lse = lse_list.data();
  return engine.engine->merge(m, engine.stream);
}

}  // namespace

View compact_view(std::byte* data, DType dtype, const RowShape& shape) {
  return {.data = data, .dtype = dtype, .batch = 0, .row = shape.heads * shape.dim, .head = shape.dim, .present = true};
}

Status RowEngine::sum(std::span<const View> parts, const View& result, const RowShape& shape) const {
  std::vector<RowTensor> outs, none;
  for (const View& part : parts) outs.emplace_back(part, shape);
  return run(*this, outs, none, {result, {}}, shape);
}

Status RowEngine::copy(const View& from, const View& to, const RowShape& shape) const {
  return to ? sum({&from, 1}, to, shape) : Status{};
}

Status RowEngine::add(const View& from, const View& to, const RowShape& shape) const {
  const View parts[] = {to, from};
  return sum(parts, to, shape);
}

Status RowEngine::write(void* to, const void* from, size_t bytes) const {
  if (pool != nullptr) return pool->device().copy_to_device(to, from, bytes, stream);
  std::memcpy(to, from, bytes);
  return {};
}

Status RowEngine::fill(const View& to, const RowShape& shape, float value) const {
  RowMemory memory(*this, sizeof value);
  TANDEM_TRY(memory.write(&value));
  View constant = compact_view(memory.data(), DType::f32, {1, 1, 1});
  constant.row = constant.head = 0;
  return copy(constant, to, shape);
}

Status RowEngine::clear(const View& to, const RowShape& shape) const {
  RowMemory memory(*this, RowShape{1, 1, shape.dim}.bytes(DType::f32));
  TANDEM_TRY(memory.clear());
  View zeros = compact_view(memory.data(), DType::f32, {1, 1, shape.dim});
  zeros.row = zeros.head = 0;
  return copy(zeros, to, shape);
}

Status RowEngine::merge(std::span<const OutPart> parts, const OutPart& result, const RowShape& shape) const {
  std::vector<RowTensor> outs, lses;
  for (const OutPart& part : parts) {
    outs.emplace_back(part.out, shape);
    lses.push_back(RowTensor::of_lse(part.lse, shape));
  }
  return run(*this, outs, lses, result, shape);
}

RowMemory::RowMemory(const RowEngine& engine, int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  if (engine.pool == nullptr) {
    host_.resize(static_cast<size_t>(bytes));
    return;
  }
  block_ = engine.pool->take(static_cast<size_t>(bytes), engine.stream);
  pool_ = engine.pool;
}

RowMemory::~RowMemory() {
  if (pool_ != nullptr) pool_->release(block_);
}

Status RowMemory::clear() {
  if (pool_ != nullptr) return pool_->device().fill(block_.address, 0, static_cast<size_t>(bytes_), block_.stream);
  std::fill(host_.begin(), host_.end(), std::byte{0});
  return {};
}

Status RowMemory::write(const void* from) {
  return RowEngine{nullptr, pool_, block_.stream}.write(data(), from, static_cast<size_t>(bytes_));
}

void RowMemory::swap(RowMemory& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(host_, other.host_);
  std::swap(pool_, other.pool_);
  std::swap(block_, other.block_);
}

}  // namespace tandem::context_parallel
