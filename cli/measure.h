// Time and memory of one function.
#pragma once

#include <cstdint>
#include <functional>

namespace tandem::tool {

// Returns the median time of one run over about `seconds`. At least 3 runs count, or at least 1 if runs are slower.
double median_seconds(const std::function<void()>& run, double seconds);

// Returns the growth of the process's memory while run() ran. 0 if the system has no such figure.
int64_t peak_growth(const std::function<void()>& run);

// Returns the bytes per second at which all cores together read memory.
double read_bandwidth(int threads);

}  // namespace tandem::tool
