// Constants of the order in which tiles are scheduled. Each architecture has separate values.
#pragma once

#include <cstdint>
#include <optional>

namespace tandem::plan {

struct ForwardOrderTuning {
  // Heads whose tiles are scheduled together under a mask, for 16384 keys. The number falls with the square root of the
  // keys and of pack_gqa, and doubles at head_dim 64. More heads share the L2 cache better, and fewer heads balance
  // better.
  double l2_heads = 8;
  double l2_bias_heads = 8;  // heads that share a bias, without a mask
  double l2_waves = 6;       // varlen: tiles per SM that are scheduled together

  int64_t sms = 0;  // SMs of a whole GPU: bits must not depend on free SMs

  // Predicted times (plan/forward_time.h) in microseconds: the launch, the launch that combines splits, and what a
  // further split adds to it. Rates are in bytes per microsecond: keys and values, and the results of splits.
  double launch = 3, combine = 3, combine_split = 0.03, read_rate = 4.3e6, combine_rate = 1e6;
  double one_warpgroup = 0.7;  // share of an iteration's time if only one warpgroup has rows
  // The share of the shorter time, of a CTA's and memory's, that does not overlap the other.
  double both = 0.2;
  double worth = 0.97;  // the largest share of the time for another tile or splits

  int64_t combine_few_rows = 1 << 8;    // queries of all heads below which several CTAs share a row
  int64_t combine_many_rows = 1 << 14;  // queries of all heads from which on a row has few threads

  // batch_invariant: the least keys of a split with up to 16 rows, and the most splits of all heads of a sequence. The
  // numbers are part of a result's bits.
  int64_t invariant_split_keys = 512, invariant_splits = 128;
};

struct BackwardOrderTuning {
  int64_t sms = 0;  // SMs of a whole GPU: bits must not depend on free SMs

  // Windows: the number of key heads scheduled together is the most that keeps q, dout and dq_accum in the L2 cache.
  int64_t window_l2_bytes = 24 << 20, max_window_heads = 33, min_window_heads = 4;
  int64_t min_cluster_window_heads = 8;  // clusters: long iterations, so memory is the limit

  // Causal masks: the minimum number of key heads scheduled together, and larger minimums for packed sequences and for
  // short iterations.
  int64_t min_causal_heads = 8, packed_heads = 16, short_iteration_factor = 3;

  // Without a mask: heads whose q, dout and dq_accum take this many bytes are scheduled together, up to a number of
  // heads. Fewer n_blocks of a head then wait for each other.
  int64_t full_l2_bytes = 0, max_full_heads = 8;
  // Without a mask: from this number of n_blocks of a head on, at least two heads are scheduled together. An epilogue
  // costs as much as this number of iterations.
  int64_t long_head_n_blocks = 16, epilogue_iterations = 3;
  bool prefers_even_groups = false;  // heads are divided into groups of one size
  std::optional<int> l2_heads = {};  // bench/tune.py: the number of key heads scheduled together
};

}  // namespace tandem::plan
