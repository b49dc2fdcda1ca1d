// The state of the fake driver that tests set and read. fake_cuda.cpp is the driver, a library that tests load in place
// of libcuda.so.1.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "gpu/driver/api.h"

namespace tandem::test {

struct FakeCuda {
  // Set by tests:
  std::atomic<int> devices{2};
  std::atomic<int> init_result{0};
  std::atomic<int> capture_state{0};
  std::string missing;  // this driver lacks this function
  std::string failing;  // this function fails with `failure`
  int failure = 0;

  // Read by tests:
  std::atomic<int> asked_version{0};  // argument of cuGetProcAddress_v2
  std::atomic<int> retained[2] = {0, 0};
  std::atomic<int> encoded{0};
  std::atomic<int> pushes{0}, pops{0}, launches[2] = {0, 0}, unloads{0}, wrong_context{0}, allocated{0};
  std::mutex mutex;  // guards the last launch and the last tensor map below
  gpu::cuda::LaunchConfig config{};
  gpu::cuda::LaunchAttribute attributes[2]{};
  void* first_argument = nullptr;
  int map_type = -1, map_swizzle = -1, map_promotion = -1, map_fill = -1;
  uint32_t map_rank = 0, map_box[5] = {};
  uint64_t map_dims[5] = {}, map_byte_strides[4] = {};
};

// The calling thread's current context: 0 for none, else 1 + the device's ordinal.
extern "C" {
FakeCuda* fake_cuda_state();
int fake_cuda_current();
void fake_cuda_make_current(int context);
}

}  // namespace tandem::test
