#include "vgpu/check/findings.h"

namespace tandem::vgpu::check {

bool Findings::wants(Rule rule, int32_t instruction, int32_t other) {
  const std::lock_guard lock(mutex_);
  auto& known = known_[is_warning(rule) ? 1 : 0];
  if (known.size() >= most_) return false;
  return known.emplace(rule, instruction, other).second;
}

void Findings::add(Finding finding) {
  const std::lock_guard lock(mutex_);
  findings_.push_back(std::move(finding));
}

void Findings::add(Rule rule, Party party, Party other, std::string subject, std::string message) {
  Finding finding;
  finding.rule = rule;
  finding.party = std::move(party);
  finding.other = std::move(other);
  finding.subject = std::move(subject);
  finding.message = std::move(message);
  add(std::move(finding));
}

std::vector<Finding> Findings::all() const {
  const std::lock_guard lock(mutex_);
  return findings_;
}

}  // namespace tandem::vgpu::check
