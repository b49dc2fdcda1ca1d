// The choice of a Blackwell forward kernel.
#pragma once

#include <cstdint>

#include "config/sm100_forward.h"
#include "gpu/device.h"
#include "plan/sm100/tuning.h"
#include "problem/problem.h"

namespace tandem::plan {

// rows: the queries of a sequence times the query heads that share a tile.
Sm100ForwardConfig select_sm100_forward(const Problem& p, const gpu::Properties& device, int64_t rows,
                                        const Sm100Switches& switches);

}  // namespace tandem::plan
