// A C function that forces choices of a context's plans, so that bench/tune.py can time the alternatives.
#include <cstdint>
#include <optional>
#include <string_view>

#include "engine/context.h"
#include "engine/gpu.h"
#include "plan/tuning.h"

namespace {

// Sets one choice of Hopper's tuning. Returns false for an unknown name.
bool set(tandem::plan::Sm90Tuning& tuning, std::string_view name, int64_t value) {
  tandem::plan::Sm90BackwardTuning& backward = tuning.backward;
  if (name == "unsplit_tiles") {
    backward.unsplit_tiles = static_cast<int>(value);
  } else if (name == "m_splits") {
    backward.m_splits = static_cast<int>(value);
  } else if (name == "dq_splits") {
    backward.dq_splits = static_cast<int>(value);
  } else if (name == "wraps") {
    backward.wraps = value != 0;
  } else if (name == "tile_heads") {
    backward.tile_heads = static_cast<int>(value);
  } else if (name == "part_n_blocks") {
    backward.part_n_blocks = static_cast<int>(value);
  } else if (name == "head_parts") {
    backward.head_parts = static_cast<int>(value);
  } else if (name == "dq_sum_n_blocks") {
    backward.dq_sum_n_blocks = static_cast<int>(value);
  } else if (name == "ds_chunk_tiles") {
    backward.ds_chunk_tiles = value;
  } else if (name == "two_head_tile_max_m_blocks") {
    backward.two_head_tile_max_m_blocks = value;
  } else if (name == "min_ds_bytes") {
    backward.min_ds_bytes = value;
  } else if (name == "spt") {
    backward.spt = value != 0;
  } else if (name == "l2_heads") {
    backward.order.l2_heads = static_cast<int>(value);
  } else if (name == "other_tile") {
    tuning.other_tile = static_cast<size_t>(value);
  } else {
    return false;
  }
  return true;
}

}  // namespace

// Forces the choices of a context of a Hopper GPU: `count` names and values. All other choices are the plan's own.
// Returns 0, or 1 if a name is unknown.
extern "C" __attribute__((visibility("default"))) int tandem_force_plan(tandem_context* context, int count,
                                                                        const char* const* names,
                                                                        const int64_t* values) {
  tandem::plan::Tuning tuning;
  for (int i = 0; i < count; ++i)
    if (!set(tuning.sm90, names[i], values[i])) return 1;
  static_cast<tandem::GpuEngine&>(*context->engine).set_tuning(tuning);
  return 0;
}
