#include "machine_code/latencies.h"

#include <algorithm>
#include <iterator>

namespace tandem::machine_code {
namespace {

// docs/clocks.md has the source of each figure.
constexpr Latencies kHopper{.arch = "sm_90",
                            .exponential = 18,
                            .shared = 29,
                            .memory = 600,
                            .uniform = 12,
                            .control = 24,
                            .look = 18,
                            .arrival = 29,
                            .remote = 180,
                            .named_barrier = 24,
                            .products_in_registers = 32,
                            .start_from_shared = 23,
                            .start_from_registers = 63,
                            .registers_beside = 3.75,
                            .copy = 600,
                            .copy_bytes = 64,
                            .megahertz = 1965,
                            .megahertz_lost = 730,
                            .tile_bytes = 20};

constexpr Latencies blackwell(std::string_view arch) {
  Latencies l = kHopper;
  l.arch = arch;
  l.tensor_load = 100;
  l.tensor_store = 40;
  l.left_in_tensor_memory = 116;
  l.left_in_shared_memory = 148;
  l.by_a_pair = 182;
  l.registers_beside = 1;
  l.copy_bytes = 58;
  l.megahertz_lost = 0;
  return l;
}

constexpr Latencies kAll[] = {kHopper, blackwell("sm_100"), blackwell("sm_103")};

}  // namespace

const Latencies* latencies_of(std::string_view arch) {
  const auto* found =
      std::ranges::find(kAll, arch.substr(0, arch.find_first_not_of("0123456789", 3)), &Latencies::arch);
  return found == std::end(kAll) ? nullptr : found;
}

}  // namespace tandem::machine_code
