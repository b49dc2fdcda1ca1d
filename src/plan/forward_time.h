// The predicted time of a forward, from measured constants. Predictions compare tiles and splits of one problem. The
// choice changes the order of sums, so that a prediction depends on no property of the device.
#pragma once

#include <cstdint>

#include "plan/order_tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

// Microseconds of a CTA's iteration, and the iterations that the begin and the end of a tile take together. load: the
// least microseconds in which a CTA loads an iteration's keys and values.
struct ForwardTimes {
  double iteration, tile, load = 0;
};

struct ForwardTiles {
  int64_t tiles;
  int tile_m, tile_n, pack_gqa, ctas;
};

struct PredictedSplits {
  int64_t splits = 1;
  double microseconds = 0;
};

// Returns the number of splits of the keys with the least predicted time.
PredictedSplits predict_splits(const Problem& p, const ForwardTiles& tiles, const ForwardTimes& times,
                               const ForwardOrderTuning& tuning);

}  // namespace tandem::plan
