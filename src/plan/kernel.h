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

// Another kernel adds a type here, and its list of fields.
using Configuration = std::variant<Sm90ForwardConfig, Sm100ForwardConfig, Sm90BackwardConfig, Sm100BackwardConfig>;

// The parts of a configuration that are compiled together; the units of a backward compile in parallel. `ends` has the
// first and last kernels of a backward. `dbias` has the gradient of a bias, which few calls need.
enum class Unit : uint8_t { main, prepost, dbias };

// The id and the name of a configuration: "forward_bf16_d128_128x128x2_pingpong_right".
uint64_t id_of(const Configuration& configuration);
std::string name_of(const Configuration& configuration);

// The entry points of a unit, in order:
//
//   forward         the kernel itself; varlen: "schedule", one CTA of kScheduleThreads threads that builds the tile
//                   list first; block mask: "list_n_blocks", "order_tiles"; largest scores: "max_scores", last
//   backward, ends  "delta", before the main kernel; "convert" and "dsink", after it
//   backward, dbias "dbias", after these; gradients of score_mod's tensors: "captured", "postprocess_captured", last
struct KernelEntry {
  const char* name;
  int shared_bytes;
};
inline constexpr size_t kMaxEntries = 8;
FixedVector<KernelEntry, kMaxEntries> entries_of(const Configuration& configuration, Unit unit = Unit::main);
inline constexpr uint8_t kMainEntry = 0, kScheduleEntry = 1, kListNBlocksEntry = 1, kOrderTilesEntry = 2,
                         kCapturedEntry = 1;
inline constexpr uint8_t kPreprocessEntry = 0, kPostprocessEntry = 1, kDsinkEntry = 2;  // in Unit::ends
inline constexpr uint8_t kDbiasEntry = 0;                                               // in Unit::dbias
inline constexpr uint32_t kScheduleThreads = 1024;

// With a block mask "mark_n_blocks" and "list_m_blocks" are listed last and launched before the main kernel. With dS in
// global memory "dq" is launched after each launch of the main kernel.
template <class T>
constexpr uint8_t mark_n_blocks_entry(const T& backward) {
  return kCapturedEntry + (backward.captured ? 2 : 0);
}

inline uint8_t dq_entry(const Sm90BackwardConfig& t) { return mark_n_blocks_entry(t); }

// functions: score_mod() and mask_mod(), if the configuration has them.
std::string translation_unit(const Configuration& configuration, const std::string& functions = "",
                             Unit unit = Unit::main);

}  // namespace tandem::plan
