// Chooses the row functions for the machine that this process runs on.
#include <initializer_list>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/instruction_set.h"
#include "vgpu/src/machine/lanes/lanes.h"

namespace tandem::vgpu::machine {

extern const LaneTarget lanes_generic;
#if defined(__x86_64__)
extern const LaneTarget lanes_avx2, lanes_avx512;
#endif

namespace {

std::vector<const LaneTarget*> targets() {
#if defined(TANDEM_FEW_INSTRUCTION_SETS)
  const std::initializer_list<const LaneTarget*> all = {&lanes_avx512, &lanes_generic};
#elif defined(__x86_64__)
  const std::initializer_list<const LaneTarget*> all = {&lanes_avx512, &lanes_avx2, &lanes_generic};
#else
  const std::initializer_list<const LaneTarget*> all = {&lanes_generic};
#endif
  std::vector<const LaneTarget*> here;
  for (const LaneTarget* target : all)
    for (const std::string_view name : instruction_sets())
      if (name == target->name) here.push_back(target);
  return here;
}

using Table = std::unordered_map<std::string_view, Action>;

Table table_of(const LaneTarget& target) {
  Table table;
  for (const auto& family : target.families)
    for (const LaneEntry& entry : family) table.emplace(entry.name, entry.action);
  return table;
}

// The chosen instruction set may differ from the compiled one in features that this code does not use.
const LaneTarget& chosen() {
  for (const LaneTarget* target : lane_targets())
    if (target->name == instruction_set()) return *target;
  return *lane_targets().front();
}

}  // namespace

std::span<const LaneTarget* const> lane_targets() {
  static const std::vector<const LaneTarget*> all = targets();
  return all;
}

Action lane_function(const LaneTarget& target, const std::string& name) {
  const Table table = table_of(target);
  const auto found = table.find(name);
  return found == table.end() ? Action() : found->second;
}

Action lane_function(const std::string& name) {
  static const Table table = table_of(chosen());
  const auto found = table.find(name);
  return found == table.end() ? Action() : found->second;
}

}  // namespace tandem::vgpu::machine
