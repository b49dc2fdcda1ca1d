#include "vgpu/src/check/findings.h"

#include <algorithm>

#include "vgpu/src/check/checker.h"

namespace tandem::vgpu::check {
namespace {

// Limits per finding. Further addresses, warps and lines are not counted separately.
constexpr size_t kMaxAddresses = 4096, kMaxWarps = 4096, kMaxOthers = 8;

template <class T>
bool insert(std::set<T>* into, const T& value, size_t most) {
  return into->size() < most && into->insert(value).second;
}

}  // namespace

int32_t Findings::line_of(int32_t instruction) {
  if (instruction < 0) return -1;
  const auto [at, fresh] = line_of_.try_emplace(instruction, 0);
  if (fresh) {
    at->second = lines_.try_emplace(place_of(program_, instruction), static_cast<int32_t>(lines_.size())).first->second;
  }
  return at->second;
}

bool Findings::counts(const Breach& breach) {
  const Grade grade = grade_of(breach.rule);
  if (grade == Grade::spec_only && !letter_) return false;
  const std::lock_guard lock(mutex_);
  const Key key(breach.rule, line_of(breach.instruction));
  const auto found = known_.find(key);
  const bool fresh = found == known_.end();
  if (fresh) {
    size_t& count = counts_[static_cast<size_t>(grade)];
    if (count >= most_) return false;
    ++count;
    known_.emplace(key, entries_.size());
    entries_.emplace_back();
  }
  FindingEntry& entry = fresh ? entries_.back() : entries_[found->second];
  ++entry.times;
  if (breach.address != kNoAddress) insert(&entry.addresses, breach.address, kMaxAddresses);
  if (breach.warp >= 0) insert(&entry.warps, {breach.cta, breach.warp}, kMaxWarps);
  if (breach.other >= 0 && insert(&entry.other_lines, line_of(breach.other), kMaxOthers) && !fresh)
    entry.finding.others.push_back(breach.other);
  return fresh;
}

void Findings::add(Finding finding) {
  if (grade_of(finding.rule) == Grade::spec_only && !letter_) return;
  const std::lock_guard lock(mutex_);
  const auto found = known_.find({finding.rule, line_of(finding.party.instruction)});
  FindingEntry& entry = found == known_.end() ? entries_.emplace_back() : entries_[found->second];
  finding.others = std::move(entry.finding.others);
  entry.finding = std::move(finding);
  entry.made = true;
}

void Findings::add(Rule rule, Accessor party, Accessor other, std::string subject, std::string message) {
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
  std::vector<Finding> findings;
  for (const FindingEntry& entry : entries_) {
    if (!entry.made) continue;
    Finding& finding = findings.emplace_back(entry.finding);
    finding.times = std::max<uint64_t>(entry.times, 1);
    finding.places = entry.addresses.size();
    finding.warps = entry.warps.size();
  }
  return findings;
}

}  // namespace tandem::vgpu::check
