// Every tuned constant of Blackwell (sm_100a), derived from counted clocks and not yet measured:
// docs/design/sm100_forward.md and sm100_backward.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "config/sm100_forward.h"
#include "config/sm90_forward.h"
#include "plan/fields.h"
#include "plan/order_tuning.h"

namespace tandem::plan {

enum class Cluster : uint8_t { one, two_cta_if_full, two_cta };  // two_cta_if_full: without a mask, if rows fill pairs

// A row of the table: the maximum sizes, and the pairs of 16 whose exponentials run on the FMA units. A row has four
// numbers of pairs. Three are for lazy iterations (Sm100ForwardConfig::lazy_max): one CTA, a CTA pair, a window. One is
// for iterations with a maximum.
struct Sm100TuningRow {
  int head_dim, head_dim_v;
  Cluster cluster;
  int ex2_emu_pairs_lazy, ex2_emu_pairs_two_cta, ex2_emu_pairs_window, ex2_emu_pairs_strict;
};

// The first row that serves a problem is selected.
inline constexpr Sm100TuningRow kSm100TuningRows[] = {
    {64, 64, Cluster::one, 6, 6, 6, 5},
    {128, 128, Cluster::two_cta_if_full, 2, 2, 4, 3},
    {192, 128, Cluster::two_cta_if_full, 3, 2, 3, 3},
    {256, 256, Cluster::two_cta, 0, 0, 0, 0},
};

inline constexpr int64_t kB200Sms = 148;

// Microseconds of a forward iteration, and iterations that the begin and the end of a tile take together: modelled.
inline constexpr double kForwardIteration = 0.8, kForwardIterationPerDim = 0.003, kForwardTile = 2;

struct Sm100BackwardTuning {
  // Clocks of an iteration of two CTAs, and of one CTA: head_dim_clocks * head_dim + head_dim_v_clocks * head_dim_v +
  // fixed_clocks.
  int64_t two_cta_clocks = 2816, head_dim_clocks = 16, head_dim_v_clocks = 6, fixed_clocks = 640;

  int64_t spt_l2_bytes = 32 << 20;  // bytes of q, dout and dq_accum of a group of heads

  // The maximum bytes of a chunk of dS: per element of the gradients, but at least min_ds_bytes. A chunk with fewer
  // tiles than SMs may have max_ds_bytes.
  int64_t ds_bytes_per_gradient = 6, min_ds_bytes = int64_t{1} << 30, max_ds_bytes = int64_t{4} << 30;
  std::optional<int64_t> ds_chunk_tiles;  // if set: the n_blocks of all key heads of a chunk

  BackwardOrderTuning order{.sms = kB200Sms, .prefers_even_groups = true};
};

// Forms of the kernels that are chosen for correctness, not for speed: TANDEM_SM100 (docs/environment.md).
struct Sm100Switches {
  bool two_cta = true;  // a forward with wide results has a CTA pair regardless
  bool clc = true;      // cluster launch control
  bool clc_b300 = false;
  bool overlap_launches = true;  // programmatic dependent launches
  bool exact_n = false;          // Sm100BackwardConfig::exact_n
  bool wait_products = false;    // Sm100BackwardConfig::wait_products
};

struct Sm100Tuning {
  ForwardOrderTuning forward_order{.sms = kB200Sms};
  Sm100BackwardTuning backward;
  Sm100Switches switches;
};

constexpr bool sm100_rows_fit() {
  for (const Sm100TuningRow& c : kSm100TuningRows) {
    for (const bool two_cta : {false, true}) {
      if (c.cluster == Cluster::two_cta && !two_cta) continue;
      const int max_ex2_emu_pairs =
          std::max({c.ex2_emu_pairs_lazy, c.ex2_emu_pairs_two_cta, c.ex2_emu_pairs_window, c.ex2_emu_pairs_strict});
      const Sm100ForwardConfig t{
          .head_dim = c.head_dim, .head_dim_v = c.head_dim_v, .ex2_emu_pairs = max_ex2_emu_pairs, .two_cta = two_cta};
      if (!t.fits() || !is_valid(t) || Sm100ForwardConfig::smem_bytes() > Sm90ForwardConfig::kMaxSmemBytes)
        return false;
    }
  }
  return true;
}
static_assert(
    sm100_rows_fit(),
    "a tile of the table needs more registers, shared or tensor memory than there are, or plan/fields.h does not "
    "know it");

}  // namespace tandem::plan
