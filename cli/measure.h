// Time and memory of one function.
#pragma once

#include <cstdint>
#include <functional>

namespace tandem::tool {

// The median time of one run, over as many runs as fit into about `seconds` (at least 3, at least 1 when slower).
double median_seconds(const std::function<void()>& run, double seconds);

// How far the process's memory grew beyond what it held, while run() ran. 0 where the system has no such figure.
int64_t peak_growth(const std::function<void()>& run);

// Bytes per second at which all cores together read memory.
double read_bandwidth(int threads);

}  // namespace tandem::tool
