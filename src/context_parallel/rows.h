// Rows of tensors: parts of a View, memory that an execution owns, and operations on rows.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/device_pool.h"
#include "engine/engine.h"
#include "problem/problem.h"

namespace tandem::context_parallel {

// The sizes of a tensor of rows. lse has dim 1.
struct RowShape {
  int64_t rows = 0, heads = 0, dim = 0;

  int64_t bytes(DType dtype) const { return rows * heads * dim * size_of(dtype); }
};

// Returns the view from a row or a head on. An absent view stays absent.
inline View from_row(View v, int64_t row) {
  if (v) v.data += row * v.row * size_of(v.dtype);
  return v;
}
inline View from_head(View v, int64_t head) {
  if (v) v.data += head * v.head * size_of(v.dtype);
  return v;
}
inline HeadView from_head(HeadView v, int64_t head) {
  if (v) v.data += head * v.head * size_of(v.dtype);
  return v;
}

// Lays a compact tensor over memory.
View compact_view(std::byte* data, DType dtype, const RowShape& shape);

// Rows of attention over some keys.
struct OutPart {
  View out, lse;
};

// The engine of a call and its stream. Operations on rows have the order of the stream.
struct RowEngine {
  Engine* engine = nullptr;
  DevicePool* pool = nullptr;  // null: memory is the host's
  gpu::Stream stream = nullptr;

  // Adds parts in order. result may be one of the parts, and may have another type.
  Status sum(std::span<const View> parts, const View& result, const RowShape& shape) const;
  // Copies rows and converts their type. Does nothing for an absent `to`.
  Status copy(const View& from, const View& to, const RowShape& shape) const;
  Status add(const View& from, const View& to, const RowShape& shape) const;
  Status write(void* to, const void* from, size_t bytes) const;           // from the host
  Status fill(const View& to, const RowShape& shape, float value) const;  // shape.dim is 1
  Status clear(const View& to, const RowShape& shape) const;              // sets the elements to 0
  // Merges parts in order. result may be one of the parts, and may have no lse.
  Status merge(std::span<const OutPart> parts, const OutPart& result, const RowShape& shape) const;
};

// Memory where a RowEngine works: of the host, or of its GPU.
class RowMemory {
 public:
  RowMemory() = default;
  RowMemory(const RowEngine& engine, int64_t bytes);
  RowMemory(RowMemory&& other) noexcept { swap(other); }
  RowMemory& operator=(RowMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~RowMemory();

  std::byte* data() { return pool_ != nullptr ? static_cast<std::byte*>(block_.address) : host_.data(); }
  int64_t size() const { return bytes_; }
  // Sets all bytes to 0.
  Status clear();
  // Copies values of the host to the memory.
  Status write(const void* from);

 private:
  void swap(RowMemory& other) noexcept;

  int64_t bytes_ = 0;
  std::vector<std::byte> host_;
  DevicePool* pool_ = nullptr;
  DevicePool::Block block_;
};

class RowBuffer {
 public:
  RowBuffer() = default;
  RowBuffer(const RowEngine& engine, DType dtype, const RowShape& shape)
      : shape_(shape), dtype_(dtype), memory_(engine, shape.bytes(dtype)) {}

  View view() { return compact_view(memory_.data(), dtype_, shape_); }
  const RowShape& shape() const { return shape_; }
  Status clear() { return memory_.clear(); }
  Status write(const void* from) { return memory_.write(from); }

 private:
  RowShape shape_;
  DType dtype_ = DType::f32;
  RowMemory memory_;
};

}  // namespace tandem::context_parallel
