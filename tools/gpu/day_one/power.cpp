#include "power.h"

#include <dlfcn.h>

#include "base/text.h"
#include "driver_function.h"

namespace tandem::day_one {
namespace {

constexpr int kSuccess = 0;  // the value in NVML and in CUDA

}  // namespace

PowerMeter::PowerMeter(const std::string& bus_id, const char* library) {
  using Init = int (*)();
  using ByBusId = int (*)(const char*, void**);
  library_ = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) {
    missing_ = str_cat("no ", library);
    return;
  }
  const auto init = reinterpret_cast<Init>(find("nvmlInit_v2"));
  const auto by_bus_id = reinterpret_cast<ByBusId>(find("nvmlDeviceGetHandleByPciBusId_v2"));
  if (init == nullptr || by_bus_id == nullptr || init() != kSuccess) {
    missing_ = "NVML does not start";
  } else if (by_bus_id(bus_id.c_str(), &device_) != kSuccess) {
    missing_ = str_cat("NVML has no GPU ", bus_id);
  } else if (!read(&begin_)) {
    missing_ = "NVML does not count this GPU's energy";
  }
  from_ = std::chrono::steady_clock::now();
}

void* PowerMeter::find(const char* name) const { return dlsym(library_, name); }

bool PowerMeter::read(unsigned long long* millijoules) const {
  using Energy = int (*)(void*, unsigned long long*);
  const auto energy = reinterpret_cast<Energy>(find("nvmlDeviceGetTotalEnergyConsumption"));
  return energy != nullptr && energy(device_, millijoules) == kSuccess;
}

std::string PowerMeter::average() const {
  unsigned long long end = 0;
  if (!missing_.empty()) return str_cat("power not available (", missing_, ")");
  if (!read(&end) || end <= begin_) return "power not available (NVML's counter of energy stands still)";
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - from_;
  return str_cat(static_cast<int>(static_cast<double>(end - begin_) / elapsed.count() + 0.5), " W");
}

std::string current_bus_id() {
  using Current = int (*)(int*);
  using BusId = int (*)(char*, int, int);
  const auto current = reinterpret_cast<Current>(driver_function("cuCtxGetDevice"));
  const auto bus_id = reinterpret_cast<BusId>(driver_function("cuDeviceGetPCIBusId"));
  char text[32] = {};
  int device = 0;
  if (current == nullptr || bus_id == nullptr || current(&device) != kSuccess ||
      bus_id(text, sizeof text, device) != kSuccess)
    return "";
  return text;
}

}  // namespace tandem::day_one
