// A kernel: the configuration that it is compiled for, and what follows from it. All of this derives from fields.h.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "base/fixed_vector.h"
#include "shared/sm100_backward.h"
#include "shared/sm100_forward.h"
#include "shared/sm90_backward.h"
#include "shared/sm90_forward.h"

namespace tandem::plan {

// Another kernel is one more type here, and its list of fields.
using Configuration = std::variant<Sm90ForwardConfig, Sm100ForwardConfig, Sm90BackwardConfig, Sm100BackwardConfig>;

// What of a configuration is compiled at once; units of a backward are compiled beside each other. `ends` is what a
// backward begins and ends with, `dbias` the gradient of a bias, which not everybody asks for.
enum class Unit : uint8_t { main, ends, dbias };

// All of a configuration in one number, and in one word: "forward_bf16_d128_128x128x2_pingpong_right".
uint64_t id_of(const Configuration& configuration);
std::string name_of(const Configuration& configuration);

// What its source has for launches. The first is the kernel itself. Of a varlen forward the second is "schedule", one
// block of kScheduleThreads threads that makes the work list and comes first; with a block mask it is "list_steps", and
// the third "order_tiles"; where largest scores are asked for the last is "max_scores", which comes after it. Of a
// backward Unit::ends has "delta", which comes before the kernel itself, "convert" and "dsink", which come after; then
// comes "dbias", which Unit::dbias has alone. Gradients of what a score_mod reads have "captured" and
// "convert_captured", which come last of all.
struct Entry {
  const char* name;
  int shared_bytes;
};
inline constexpr size_t kMostEntries = 8;
FixedVector<Entry, kMostEntries> entries_of(const Configuration& configuration, Unit unit = Unit::main);
inline constexpr uint8_t kMainEntry = 0, kScheduleEntry = 1, kListStepsEntry = 1, kOrderTilesEntry = 2,
                         kCapturedEntry = 1;
inline constexpr uint8_t kDeltaEntry = 0, kConvertEntry = 1, kDsinkEntry = 2;  // of Unit::ends
inline constexpr uint8_t kDbiasEntry = 0;                                      // of Unit::dbias
inline constexpr uint32_t kScheduleThreads = 1024;

// With a block mask "mark_steps" and "list_key_steps" come last, and are launched before the main one; where dS goes
// to memory "dq" does, launched after each launch of the main one.
template <class T>
constexpr uint8_t mark_steps_entry(const T& backward) {
  return kCapturedEntry + (backward.captured ? 2 : 0);
}

inline uint8_t dq_entry(const Sm90BackwardConfig& t) { return mark_steps_entry(t); }

// functions: score_mod() and mask_mod(), where the configuration has them.
std::string translation_unit(const Configuration& configuration, const std::string& functions = "",
                             Unit unit = Unit::main);

}  // namespace tandem::plan
