#include "cli/measure.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "cli/plain/rows.h"

namespace tandem::tool {
namespace {

using Clock = std::chrono::steady_clock;

double time_of(const std::function<void()>& run) {
  const auto start = Clock::now();
  run();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Returns a field of /proc/self/status in bytes, or -1.
int64_t process_status(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  return -1;
}

}  // namespace

double median_seconds(const std::function<void()>& run, double seconds) {
  std::vector<double> times = {time_of(run)};  // the first run also fills the caches
  double total = times[0];
  if (total < seconds) times.clear();
  while (total < seconds || (times.size() < 3 && total < 3 * seconds)) {
    times.push_back(time_of(run));
    total += times.back();
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

int64_t peak_growth(const std::function<void()>& run) {
#if defined(__GLIBC__)
  ::malloc_trim(0);  // free memory of the allocator would hide growth
#endif
  std::ofstream("/proc/self/clear_refs") << "5";  // resets the high-water mark
  const int64_t before = process_status("VmRSS");
  run();
  const int64_t peak = process_status("VmHWM");
  return before < 0 || peak < 0 ? 0 : std::max<int64_t>(0, peak - before);
}

double read_bandwidth(int threads) {
  constexpr int64_t count = int64_t{1} << 24;  // 64 MiB per thread, larger than any cache
  std::vector<std::vector<float>> memory(static_cast<size_t>(threads), std::vector<float>(count, 1.f));
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double seconds = time_of([&] {
      std::vector<std::jthread> readers;
      for (const auto& block : memory)
        readers.emplace_back([&block] {
          volatile float most = plain::row_max(block.data(), count);
          (void)most;
        });
    });
    best = std::max(best, static_cast<double>(threads) * count * sizeof(float) / seconds);
  }
  return best;
}

}  // namespace tandem::tool
