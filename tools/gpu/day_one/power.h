// The power of a GPU, which NVML reports if its library is installed.
#pragma once

#include <chrono>
#include <string>

namespace tandem::day_one {

// Averages power from construction on. The energy counter of NVML needs no samples. The library stays loaded.
class PowerMeter {
 public:
  // bus_id: of the GPU, "00000000:1B:00.0". No error is thrown if the library or the counter is missing.
  explicit PowerMeter(const std::string& bus_id, const char* library = "libnvidia-ml.so.1");

  // Returns "512 W", or "power not available (reason)".
  std::string average() const;

 private:
  void* find(const char* name) const;
  bool read(unsigned long long* millijoules) const;

  void* library_ = nullptr;
  void* device_ = nullptr;
  std::string missing_;
  unsigned long long begin_ = 0;
  std::chrono::steady_clock::time_point from_;
};

// Returns the bus id of the GPU of the current CUDA context; empty if the driver does not report one.
std::string current_bus_id();

}  // namespace tandem::day_one
