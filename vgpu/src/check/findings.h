// Collects findings: one for each rule and line, with the number of violations there.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vgpu/src/machine/machine.h"
#include "vgpu/src/observer/finding.h"

namespace tandem::vgpu::check {

inline constexpr uint64_t kNoAddress = ~uint64_t{0};

// One violation of a rule.
struct Breach {
  Rule rule = Rule::trap;
  int32_t cta = -1, warp = -1, instruction = -1;
  int32_t other = -1;  // the other party's instruction; -1: none
  uint64_t address = kNoAddress;
};

// Any thread may use this class.
class Findings {
 public:
  // most: the limit for errors, and also for findings by the letter. letter: whether findings by the letter are
  // reported.
  Findings(const Program& program, size_t most, bool letter) : program_(program), most_(most), letter_(letter) {}

  // Counts the breach. Returns true if the breach is the first of its rule at its line and the limit is not reached.
  // The caller then passes its sentence to add().
  bool counts(const Breach& breach);
  void add(Finding finding);
  void add(Rule rule, Accessor party, Accessor other, std::string subject, std::string message);
  std::vector<Finding> all() const;

 private:
  using Key = std::pair<Rule, int32_t>;  // the rule and the source line
  struct FindingEntry {
    Finding finding;
    bool made = false;
    uint64_t times = 0;
    std::set<uint64_t> addresses;
    std::set<std::pair<int32_t, int32_t>> warps;  // warps with their blocks
    std::set<int32_t> other_lines;
  };
  int32_t line_of(int32_t instruction);

  const Program& program_;
  const size_t most_;
  const bool letter_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, int32_t> lines_;  // numbered, by their text
  std::unordered_map<int32_t, int32_t> line_of_;    // by instruction
  std::array<size_t, 2> counts_{};                  // entries by grade, so that no grade displaces the other
  std::map<Key, size_t> known_;                     // indices into entries_
  std::deque<FindingEntry> entries_;
};

}  // namespace tandem::vgpu::check
