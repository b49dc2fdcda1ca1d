// Tests the power that tools/gpu/day_one reports, with a library that replaces NVML.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "power.h"

namespace tandem::day_one {
namespace {

std::string measured(const char* missing, const char* library = TANDEM_NVML_STUB) {
  setenv("STUB_NVML", missing, 1);
  const PowerMeter meter("0000:1B:00.0", library);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  return meter.average();
}

// The counter has whole millijoules, so 100 ms determine the average to 1 W.
TEST(DayOnePower, IsAveragedFromTheEnergy) {
  const int watts = std::atoi(measured("").c_str());
  EXPECT_NEAR(watts, 500, 5);
}

TEST(DayOnePower, NeverFails) {
  EXPECT_EQ(measured("", "libno-such-library.so"), "power not available (no libno-such-library.so)");
  EXPECT_EQ(measured("init"), "power not available (NVML does not start)");
  EXPECT_EQ(measured("gpu"), "power not available (NVML has no GPU 0000:1B:00.0)");
  EXPECT_EQ(measured("energy"), "power not available (NVML does not count this GPU's energy)");
  EXPECT_EQ(measured("still"), "power not available (NVML's counter of energy stands still)");
}

}  // namespace
}  // namespace tandem::day_one
