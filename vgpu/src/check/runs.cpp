// Shadow memory of runs: adjacent lanes with one granule.
#include <algorithm>

#include "vgpu/src/check/shadow.h"

namespace tandem::vgpu::check {

// Returns true if every earlier access to the part's bytes happened before this access.
bool Page::is_behind(const GranulePart& part, Touch& touch) const {
  if (!(part.initialised || touch.writes)) return false;
  const auto behind = [&](Epoch x) { return !x || x == touch.epoch || touch.judge(x) == Touch::Verdict::ordered; };
  if (!behind(part.write)) return false;
  const auto is_fine = [&](Epoch x) { return !(touch.writes || x.wrote()) || behind(x); };
  if (!is_fine(part.since[0]) || !is_fine(part.since[1])) return false;
  const Others& others = others_[part.others];
  return !(touch.writes || others.wrote) || std::all_of(others.epochs.begin(), others.epochs.end(), is_fine);
}

// The state of a granule after such an access.
void Page::record(GranulePart* part, Touch& touch) {
  if (!touch.writes) return add_read(part, touch);
  release_others(part);
  GranulePart fresh;
  fresh.write = touch.epoch;
  fresh.bytes = part->bytes;
  fresh.initialised = true;
  fresh.is_wide = touch.is_wide;
  *part = fresh;
}

bool Page::touch_run(uint32_t granule, Touch& touch) {
  GranuleState& state = states_[granule];
  if (state.let_by && let_by(&state, touch)) return true;
  if (state.kind != Kind::parts && touch_words_by_run(granule, touch)) return true;
  GranulePart& whole = granules_[granule].whole;
  last_touch_ = Epoch();
  if (whole.bytes) {
    if (!is_behind(whole, touch)) return false;
    record(&whole, touch);
    if (!touch.writes && whole.others) note_crowd(granule);
    return true;
  }
  // Each lane has a separate part.
  Parts& parts = several_[whole.others];
  const Epoch run = touch.epoch;
  const uint32_t step = run.bytes_of_lane();
  const auto each_lane = [&](auto&& f) {
    for (GranulePart& part : parts) {
      const auto byte = static_cast<uint32_t>(std::countr_zero(part.bytes));
      if (byte % step != 0 || part.bytes != ((1u << step) - 1) << byte) return false;
      touch.narrow(run.at(byte));
      if (!f(part)) return false;
    }
    return true;
  };
  if (!each_lane([&](GranulePart& part) { return is_behind(part, touch); })) return false;
  each_lane([&](GranulePart& part) { return record(&part, touch), true; });
  join(granule);
  if (!touch.writes) note_crowd(granule);
  return true;
}

uint32_t Page::new_several() {
  if (free_several_.empty()) {
    several_.emplace_back();
    return static_cast<uint32_t>(several_.size() - 1);
  }
  const uint32_t index = free_several_.back();
  free_several_.pop_back();
  return index;
}

// Splits a granule of one part into as many parts as its runs have lanes.
Page::Parts& Page::split(GranulePart* granule) {
  uint32_t step = kGranule;
  const auto take_step = [&](Epoch x) {
    if (x.is_run()) step = std::min(step, x.bytes_of_lane());
  };
  take_step(granule->write);
  for (const Epoch x : granule->since) take_step(x);
  for (const Epoch x : others_[granule->others].epochs) take_step(x);

  const uint32_t index = new_several();
  Parts& parts = several_[index];
  for (uint32_t byte = 0; byte < kGranule; byte += step) {
    GranulePart& part = parts.add(*granule);
    if (step == kGranule) break;
    part.bytes = static_cast<uint16_t>(((1u << step) - 1) << byte);
    part.write = part.write.at(byte);
    for (Epoch& x : part.since) x = x.at(byte);
    if (part.others == 0) continue;
    ++others_[part.others].users;
    for (Epoch& x : own_others(&part)->epochs) x = x.at(byte);
  }
  if (step != kGranule) release_others(granule);
  *granule = GranulePart();
  granule->bytes = 0;
  granule->others = index;
  return parts;
}

void Page::join(uint32_t granule) {
  if (states_[granule].kind != Kind::parts) return;
  GranulePart& whole = granules_[granule].whole;
  if (whole.bytes) return;
  Parts& parts = several_[whole.others];
  const size_t count = parts.size();
  if (count < 2 || (count & (count - 1)) != 0) return;
  if (parts[0].others != 0) return;
  const auto step = static_cast<uint32_t>(kGranule / count);
  const auto first = std::find_if(parts.begin(), parts.end(), [](const GranulePart& part) { return part.bytes & 1; });
  // The run that the first part of the granule records.
  const auto run_of = [&](Epoch x) {
    if (!x || x.lane() == kTogether || x.lane() + static_cast<int>(parts.size()) > kLanes) return x;
    return Epoch::run(x.site(), x.time(), x.lane(), step, x.scope(), x.wrote());
  };
  GranulePart run = *first;
  run.bytes = 0xffff;
  run.write = run_of(run.write);
  for (Epoch& x : run.since) x = run_of(x);
  for (const GranulePart& part : parts) {
    const auto byte = static_cast<uint32_t>(std::countr_zero(part.bytes));
    if (byte % step != 0 || part.bytes != ((1u << step) - 1) << byte || part.others != 0 ||
        part.initialised != run.initialised || part.is_wide != run.is_wide || part.write != run.write.at(byte) ||
        part.since[0] != run.since[0].at(byte) || part.since[1] != run.since[1].at(byte))
      return;
  }
  const uint32_t index = whole.others;
  parts.clear();
  free_several_.push_back(index);
  whole = run;
}

}  // namespace tandem::vgpu::check
