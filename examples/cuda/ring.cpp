// Attention over keys that arrive in parts, as in a ring of GPUs, in C++ on one GPU. Each part's float32 result is
// merged into the result of the earlier parts. One call with all keys must give the same result.
//
//   ./tandem_example_cuda_cpp [cuda:0 | vgpu:h200 | vgpu:b200]
//
// needle.c explains how to build it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "driver.h"
#include "tandem/tandem.hpp"

namespace {

constexpr int64_t kQueries = 192, kPart = 192, kParts = 3, kKeys = kParts * kPart, kHeads = 2, kDim = 64;

// An array on the GPU.
class Array {
 public:
  Array(const gpu_memory& gpu, tandem_dtype type, tandem::Sizes shape, tandem_device place)
      : gpu_(gpu), type_(type), shape_(shape), place_(place) {
    bytes_ = type.bits / 8u;
    for (int32_t i = 0; i < shape.count(); ++i) bytes_ *= static_cast<size_t>(shape[i]);
    data_ = gpu_allocate(&gpu_, bytes_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { gpu_release(&gpu_, data_); }

  tandem::Tensor tensor() const { return tandem::Tensor(type_, data_, shape_).on(place_); }
  // Keys [first, first + count) of an array of (1, keys, heads, dim).
  tandem::Tensor keys(int64_t first, int64_t count) const {
    auto* at = static_cast<std::byte*>(data_) + first * kHeads * kDim * type_.bits / 8;
    return tandem::Tensor(type_, at, {1, count, kHeads, kDim}).on(place_);
  }
  void fill(uint32_t seed, void* stream) {
    std::vector<uint16_t> numbers(bytes_ / 2);  // bfloat16, from -2 to 2
    for (uint16_t& x : numbers) {
      seed = seed * 1664525u + 1013904223u;
      const float number = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-30f;
      uint32_t bits;
      std::memcpy(&bits, &number, sizeof bits);
      x = static_cast<uint16_t>(bits >> 16);
    }
    gpu_copy_to(&gpu_, data_, numbers.data(), bytes_, stream);
    if (gpu_.synchronize != nullptr) gpu_must(gpu_.synchronize(stream), "cuStreamSynchronize");
  }
  std::vector<float> floats(void* stream) const {
    std::vector<float> numbers(bytes_ / sizeof(float));
    gpu_copy_back(&gpu_, numbers.data(), data_, bytes_, stream);
    return numbers;
  }

 private:
  const gpu_memory& gpu_;
  tandem_dtype type_;
  tandem::Sizes shape_;
  tandem_device place_;
  size_t bytes_;
  void* data_;
};

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (size_t n = 0; n < a.size(); ++n) largest = std::fmax(largest, std::fabs(a[n] - b[n]));
  return largest;
}

int run(const std::string& device) {
  const gpu_memory gpu = gpu_open_named(device.c_str());
  const tandem::Context context({.device = device});
  const tandem_device place =
      context.on_host() ? tandem::host() : tandem::cuda(device.size() > 5 ? std::atoi(device.c_str() + 5) : 0);
  std::printf("Tandem %s on: %s\n", tandem_version(), context.description().c_str());
  tandem::Workspace workspace([&gpu](size_t bytes) { return gpu_allocate(&gpu, bytes); },
                              [&gpu](void* memory) { gpu_release(&gpu, memory); });
  void* const stream = gpu_stream(&gpu);

  const auto array = [&](tandem_dtype type, tandem::Sizes shape) { return Array(gpu, type, shape, place); };
  Array q = array(tandem::bfloat16, {1, kQueries, kHeads, kDim}), k = array(tandem::bfloat16, {1, kKeys, kHeads, kDim});
  Array v = array(tandem::bfloat16, {1, kKeys, kHeads, kDim});
  const Array out = array(tandem::float32, {1, kQueries, kHeads, kDim}),
              lse = array(tandem::float32, {1, kHeads, kQueries});
  const Array part = array(tandem::float32, {1, kQueries, kHeads, kDim});
  const Array part_lse = array(tandem::float32, {1, kHeads, kQueries});
  q.fill(1, stream), k.fill(2, stream), v.fill(3, stream);

  // The queries belong to the last part of the sequence: the first of them is number kKeys - kQueries.
  tandem::Attention attention{.q = q.tensor(), .causal = true, .alignment = tandem::Alignment::explicit_offset};
  for (int64_t n = 0; n < kParts; ++n) {
    attention.k = k.keys(n * kPart, kPart);
    attention.v = v.keys(n * kPart, kPart);
    attention.out = n == 0 ? out.tensor() : part.tensor();
    attention.lse = n == 0 ? lse.tensor() : part_lse.tensor();
    attention.diagonal_offset = kKeys - kQueries - n * kPart;
    tandem::forward(attention, context, workspace, stream);
    const tandem::Part sum{out.tensor(), lse.tensor()};
    if (n > 0) tandem::merge({sum, {part.tensor(), part_lse.tensor()}}, sum, context, stream);
  }
  const std::vector<float> merged = out.floats(stream), merged_lse = lse.floats(stream);

  // All keys in one call: the bottom-right diagonal is the same.
  tandem::forward(
      {.q = q.tensor(), .k = k.tensor(), .v = v.tensor(), .out = out.tensor(), .lse = lse.tensor(), .causal = true},
      context, workspace, stream);
  const double of_out = largest_difference(merged, out.floats(stream));
  const double of_lse = largest_difference(merged_lse, lse.floats(stream));
  std::printf("%lld parts merged differ from the whole by %.2g at most, their log-sum-exp by %.2g\n",
              static_cast<long long>(kParts), of_out, of_lse);
  return of_out < 0.02 && of_lse < 1e-3 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "cuda:0");
  } catch (const tandem::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return error.code() == TANDEM_NO_COMPILER ? 77 : 1;
  }
}
