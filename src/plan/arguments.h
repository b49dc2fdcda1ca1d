// The parameters of a plan's kernels in one call, on the stack of that call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

#include "base/fixed_vector.h"
#include "config/backward.h"
#include "config/forward.h"
#include "gpu/device.h"
#include "problem/problem.h"

namespace tandem::plan {

// Dimensions of a tensor map, added in order from the contiguous dimension.
class MapDimensions {
 public:
  MapDimensions(gpu::TensorMapSpec& spec, int64_t element_bytes)
      : spec_(spec), element_(static_cast<uint64_t>(element_bytes)) {}

  // The columns of a TMA box: the swizzle's width, 128 bytes.
  int64_t columns() const { return static_cast<int64_t>(128 / element_); }

  // stride: in elements. A Problem has stride 0 for a dimension of size 1; the map needs a valid stride even there.
  const MapDimensions& add(int64_t size, int64_t stride, int64_t box) const {
    const int i = spec_.rank++;
    spec_.dims[i] = static_cast<uint64_t>(size);
    spec_.byte_strides[i] = size == 1 ? 16 : static_cast<uint64_t>(stride) * element_;
    spec_.box[i] = static_cast<uint32_t>(box);
    return *this;
  }
  // Sets what a miss of the L2 cache loads.
  MapDimensions& promote(gpu::L2Promotion bytes) {
    spec_.l2_promotion = bytes;
    return *this;
  }

 private:
  gpu::TensorMapSpec& spec_;
  uint64_t element_;
};

class Arguments {
 public:
  struct Map {
    gpu::TensorMapSpec spec;
    ::TensorMap* place = nullptr;  // destination within the parameters
  };

  Arguments() {}  // NOLINT(modernize-use-equals-default): the memory is left as it is, not zeroed
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  // Appends the zeroed parameter of the plan's next kernel.
  template <class Parameter>
  Parameter& add() {
    static_assert(std::is_trivially_copyable_v<Parameter> && std::is_trivially_default_constructible_v<Parameter>);
    static_assert(alignof(Parameter) <= kAlignment);
    return *std::launder(static_cast<Parameter*>(zeroed(sizeof(Parameter))));
  }
  // Lets the plan's next kernel share the last parameter.
  template <class Parameter>
  void share(Parameter& parameter) {
    of_kernel_.push_back(&parameter);
  }
  // Adds the map of a tensor of float16, bfloat16 or float32, which is encoded at `place`.
  MapDimensions add_map(::TensorMap* place, const void* address, DType dtype,
                        gpu::Swizzle swizzle = gpu::Swizzle::b128) {
    static constexpr Map kEmpty;
    Map& map = maps_.push_back(kEmpty);
    map.place = place;
    map.spec.address = const_cast<void*>(address);
    map.spec.type = dtype == DType::f32   ? gpu::TensorType::f32
                    : dtype == DType::f16 ? gpu::TensorType::f16
                                          : gpu::TensorType::bf16;
    map.spec.swizzle = swizzle;
    map.spec.l2_promotion = gpu::L2Promotion::b256;
    return {map.spec, size_of(dtype)};
  }

  void* of_kernel(size_t kernel) const { return of_kernel_[kernel]; }
  const auto& maps() const { return maps_; }

 private:
  static constexpr size_t kBytes = 4096, kAlignment = 64;

  // Reserves zeroed memory for the next parameter.
  void* zeroed(size_t bytes);

  size_t used_ = 0;
  FixedVector<void*, 4> of_kernel_;
  FixedVector<Map, 16> maps_;
  alignas(kAlignment) std::byte memory_[kBytes];
};

}  // namespace tandem::plan
