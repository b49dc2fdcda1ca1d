// A kernel: its configuration and everything that follows from it, derived from fields.h.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "base/fixed_vector.h"
#include "config/sm100_backward.h"
#include "config/sm100_forward.h"
#include "config/sm90_backward.h"
#include "config/sm90_forward.h"

namespace tandem::plan {

// A new kernel adds its type here, and its list of fields.
using Configuration = std::variant<Sm90ForwardConfig, Sm100ForwardConfig, Sm90BackwardConfig, Sm100BackwardConfig>;

// The parts of a configuration that are compiled together; the units of a backward compile in parallel. `prepost` has
// the first and last kernels of a backward. `dbias` has the gradient of a bias, which few calls need.
enum class Unit : uint8_t { main, prepost, dbias };

// The id and the name of a configuration, such as "forward_bf16_d128_128x128x2_pingpong_right".
uint64_t id_of(const Configuration& configuration);
std::string name_of(const Configuration& configuration);

// The entry points of all kernels. A unit has some of the entries, and launches name entries by these ids.
enum class EntryId : uint8_t {
  main,      // the forward or the backward itself
  schedule,  // forward, varlen: one CTA lists the tiles first
  list_n_blocks,
  order_tiles,  // forward, block mask: before the main kernel
  max_scores,   // forward: after the main kernel
  combine_splits,
  preprocess,  // backward: before the main kernel
  postprocess,
  dsink,  // backward: after the main kernel
  dbias,  // backward: an entry of Unit::dbias
  captured,
  postprocess_captured,  // backward, gradients of score_mod's tensors: last
  mark_n_blocks,
  list_m_blocks,  // backward, block mask: before the main kernel
  dq,             // backward, ds_gmem: after each launch of the main kernel
  merge,
  classify_blocks,
  list_blocks,  // make_blocks
  append_kv,
};
inline constexpr size_t kEntryIds = 19;

struct KernelEntry {
  EntryId id;
  const char* name;
  int shared_bytes;
};
inline constexpr size_t kMaxEntries = 8;
FixedVector<KernelEntry, kMaxEntries> entries_of(const Configuration& configuration, Unit unit = Unit::main);
// Returns the entry of a unit with this id. The unit must have one.
KernelEntry find_entry(const Configuration& configuration, Unit unit, EntryId id);
inline constexpr uint32_t kScheduleThreads = 1024;
inline constexpr int kCombineSmemBytes = 112 << 10;  // the most; see combine_smem_bytes()

// functions: score_mod() and mask_mod(), if the configuration has them.
std::string translation_unit(const Configuration& configuration, const std::string& functions = "",
                             Unit unit = Unit::main);

}  // namespace tandem::plan
