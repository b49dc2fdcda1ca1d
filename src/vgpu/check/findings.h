// Collects findings: one of a kind at a place.
#pragma once

#include <array>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "vgpu/check/finding.h"

namespace tandem::vgpu::check {

// From any thread.
class Findings {
 public:
  explicit Findings(size_t most) : most_(most) {}

  // Whether such a finding is new and has room; its sentence is worth making only then.
  bool wants(Rule rule, int32_t instruction, int32_t other);
  void add(Finding finding);
  void add(Rule rule, Party party, Party other, std::string subject, std::string message);
  std::vector<Finding> all() const;

 private:
  const size_t most_;
  mutable std::mutex mutex_;
  std::array<std::set<std::tuple<Rule, int32_t, int32_t>>, 2> known_;  // errors, warnings: neither crowds out the other
  std::vector<Finding> findings_;
};

}  // namespace tandem::vgpu::check
