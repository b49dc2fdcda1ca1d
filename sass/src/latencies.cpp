#include "sass/src/latencies.h"

#include <algorithm>
#include <iterator>

namespace tandem::machine_code {
namespace {

constexpr std::string_view kChargeNames[] = {"bulk group",          "fence at GPU scope", "fence without writes",
                                             "fence at CTA scope",  "fence of proxies",   "invalidation of L1",
                                             "load of a semaphore", "copy between CTAs"};

// sass/docs/clocks.md has the source of each figure.
constexpr Latencies kHopper{
    .arch = "sm_90",
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
    .left_reads = 20,
    .spare_reads = 4,
    .fma = {.reads = 2.7, .unit = 0.7, .unit_beside_left = 0.7, .warp = 3},
    .alu = {.reads = 2, .unit = 2, .unit_beside_left = 2, .warp = 4},
    .exponentials = {.reads = 1, .unit = 2.8, .unit_beside_left = 4, .warp = 4},
    .copy = 400,
    .copy_bytes = 64,
    .charges = {{{906, 78}, {547, 0}, {283, 0}, {33, 0}, {13, 0}, {6, 0}, {487, 0}, {270, 20.3}}},
    .megahertz = 1805,
    .megahertz_lost = 600,
    .tile_bytes = 20};

constexpr Latencies blackwell(std::string_view arch) {
  Latencies l = kHopper;
  l.arch = arch;
  l.tensor_load = 100;
  l.tensor_store = 40;
  l.left_in_tensor_memory = 116;
  l.left_in_shared_memory = 148;
  l.by_a_pair = 182;
  l.copy = 600;
  l.copy_bytes = 58;
  l.megahertz = 1965;
  l.megahertz_lost = 0;
  return l;
}

constexpr Latencies kAll[] = {kHopper, blackwell("sm_100"), blackwell("sm_103")};

}  // namespace

std::string_view name_of(Charge charge) { return kChargeNames[static_cast<size_t>(charge)]; }

Latencies Latencies::with(Charge which, double factor) const {
  Latencies l = *this;
  ChargedWait& wait = l.charges[static_cast<size_t>(which)];
  wait.clocks *= factor;
  wait.bytes /= factor;
  return l;
}

const Latencies* latencies_of(std::string_view arch) {
  const auto* found =
      std::ranges::find(kAll, arch.substr(0, arch.find_first_not_of("0123456789", 3)), &Latencies::arch);
  return found == std::end(kAll) ? nullptr : found;
}

}  // namespace tandem::machine_code
