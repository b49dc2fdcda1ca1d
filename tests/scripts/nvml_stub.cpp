// Replaces libnvidia-ml.so.1 in day_one_power_test: one GPU whose counter of energy advances by 500 W. The variable
// STUB_NVML removes a part: "init", "gpu", "energy", "still".
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kUnsupported = 3, kNotFound = 6;
constexpr double kWatts = 500;
constexpr const char* kVariable = "STUB_NVML";

bool lacks(const char* part) {
  const char* const missing = std::getenv(kVariable);
  return missing != nullptr && std::strcmp(missing, part) == 0;
}

}  // namespace

extern "C" {
int nvmlInit_v2() { return lacks("init") ? kUnsupported : 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  static int gpu = 0;
  *device = &gpu;
  return lacks("gpu") || std::strcmp(bus_id, "0000:1B:00.0") != 0 ? kNotFound : 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void* device, unsigned long long* millijoules) {
  const std::chrono::duration<double, std::milli> now = std::chrono::steady_clock::now().time_since_epoch();
  *millijoules = lacks("still") ? 1 : static_cast<unsigned long long>(kWatts * now.count());
  return lacks("energy") || device == nullptr ? kUnsupported : 0;
}
}
