#include "vgpu/src/trace/roles.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <set>

#include "vgpu/src/ptx/inlining.h"

namespace tandem::vgpu {
namespace {

bool is_lambda(const std::string& function) { return function.ends_with("lambda"); }

using Times = std::map<std::string, uint64_t>;  // how often a warp executes an instruction of each function

Times times_of(const std::vector<uint32_t>& counts, const std::vector<std::vector<std::string>>& around, size_t level) {
  Times times;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0 && around[i].size() > level) times[around[i][level]] += counts[i];
  }
  return times;
}

std::string longest(const Times& times) {
  const auto most = std::ranges::max_element(times, {}, &Times::value_type::second);
  return most == times.end() ? "" : most->first;
}

// The instructions that every active warp executes, each counted as often as the warp that executes it least.
uint64_t count_shared(const std::vector<std::vector<uint32_t>>& warps, const std::vector<uint64_t>& totals) {
  uint64_t shared = 0;
  for (size_t i = 0; !warps.empty() && i < warps.front().size(); ++i) {
    uint32_t least = UINT32_MAX;
    for (size_t warp = 0; warp < warps.size(); ++warp)
      if (totals[warp] > 0) least = std::min(least, warps[warp][i]);
    if (least < UINT32_MAX) shared += least;
  }
  return shared;
}

// The function in which each warp spends most of its time, if it spends more there than another warp does. Code that
// all warps execute, or that the compiler moved before the branch to the roles, belongs to no role. totals:
// instructions of each warp. shared: how many of them every warp executes.
std::vector<std::string> own_functions(const std::vector<Times>& warps, const std::vector<uint64_t>& totals,
                                       uint64_t shared) {
  std::map<std::string, uint64_t> least;
  for (size_t warp = 0; warp < warps.size(); ++warp) {
    if (totals[warp] == 0) continue;
    for (const Times& other : warps) {
      for (const auto& [function, count] : other) {
        const auto here = warps[warp].find(function);
        uint64_t& fewest = least.try_emplace(function, count).first->second;
        fewest = std::min(fewest, here == warps[warp].end() ? 0 : here->second);
      }
    }
  }
  std::vector<std::string> names;
  for (size_t warp = 0; warp < warps.size(); ++warp) {
    const std::string name = longest(warps[warp]);
    const uint64_t count = name.empty() ? 0 : warps[warp].at(name);
    names.push_back(count > 2 * least[name] && 2 * (count - least[name]) + shared > totals[warp] ? name : "");
  }
  return names;
}

}  // namespace

std::vector<std::string> Roles::of_warps(const std::vector<std::vector<uint32_t>>& counts) {
  std::vector<std::vector<std::string>> around;
  size_t deepest = 0;
  const size_t instructions = counts.empty() ? 0 : counts.front().size();
  for (size_t i = 0; i < instructions; ++i) {
    around.push_back(ptx::functions_around(program_.module(), program_.source(static_cast<int32_t>(i)).location));
    deepest = std::max(deepest, around.back().size());
  }
  std::vector<std::string> common(counts.size());
  std::vector<uint64_t> totals;
  for (const std::vector<uint32_t>& warp : counts)
    totals.push_back(std::accumulate(warp.begin(), warp.end(), uint64_t{0}));
  const uint64_t shared = count_shared(counts, totals);
  for (level_ = 0; level_ < deepest; ++level_) {
    std::vector<Times> times;
    for (const std::vector<uint32_t>& warp : counts) times.push_back(times_of(warp, around, level_));
    const std::vector<std::string> own = own_functions(times, totals, shared);
    std::set<std::string> roles(own.begin(), own.end());
    roles.erase("");
    if (roles.size() > 1) return own;
    for (size_t warp = 0; warp < counts.size(); ++warp) common[warp] = longest(times[warp]);
  }
  level_ = 0;  // all warps do the same
  return common;
}

std::string Roles::activity_at(int32_t instruction) const {
  const ptx::Instruction& source = program_.source(instruction);
  const std::vector<std::string> functions = ptx::functions_around(program_.module(), source.location);
  for (size_t level = level_ + 1; level < functions.size(); ++level) {
    if (!is_lambda(functions[level])) return functions[level];
  }
  if (functions.size() > level_) return functions[level_];
  if (!functions.empty()) return functions.back();
  constexpr std::string_view told_apart[] = {"bar", "barrier", "cp", "mbarrier", "tcgen05", "wgmma"};
  if (std::ranges::find(told_apart, source.opcode) == std::end(told_apart) || source.modifiers.empty()) return "code";
  return source.opcode + "." + source.modifiers.front();
}

}  // namespace tandem::vgpu
