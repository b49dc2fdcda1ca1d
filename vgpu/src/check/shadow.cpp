#include "vgpu/src/check/shadow.h"

#include <algorithm>
#include <utility>

namespace tandem::vgpu::check {

Page::Page(bool initialised) : others_(1), several_(1) {
  for (Granule& granule : granules_) granule.whole.initialised = initialised;
}

void Page::forget(uint32_t begin, uint32_t end) {
  for (uint32_t g = (begin + kGranule - 1) / kGranule; g < end / kGranule; ++g) {
    states_[g].let_by = 0;
    if (states_[g].kind != Kind::parts) leave_words(g);
    GranulePart& whole = granules_[g].whole;
    if (whole.bytes) {
      whole.initialised = false;
    } else {
      for (GranulePart& part : several_[whole.others]) part.initialised = false;
    }
  }
}

void Page::touch(uint32_t begin, uint32_t end, Touch& touch) {
  for (uint32_t g = begin / kGranule; g * kGranule < end; ++g) {
    const uint32_t at = g * kGranule;
    const uint32_t first = begin > at ? begin - at : 0, last = std::min(kGranule, end - at);
    const auto bytes = static_cast<uint16_t>((1u << last) - (1u << first));
    GranuleState& state = states_[g];
    if (!state.is_usual() || (touch.is_plain && bytes != 0xffff)) {
      if (state.let_by && let_by(&state, touch)) continue;
      if (touch_words(g, bytes, touch)) continue;
    }
    GranulePart& granule = granules_[g].whole;
    if (bytes != 0xffff || granule.bytes == 0) {
      last_touch_ = Epoch();
      touch_some(&granule, bytes, touch, at + first);
    } else if (last_touch_ == touch.epoch && granule.same_past(before_)) {
      touch.met_initialised |= before_.initialised;
      if (after_.others != before_.others) {
        release_others(&granule);
        if (after_.others) ++others_[after_.others].users;
      }
      granule = after_;
    } else {
      before_ = granule;
      apply(&granule, touch, at);
      after_ = granule;
      last_touch_ = touch.epoch;
    }
    if (!touch.writes && granule.others) note_crowd(g);
  }
}

void Page::touch_some(GranulePart* granule, uint16_t bytes, Touch& touch, uint32_t at) {
  Parts& parts = granule->bytes ? split(granule) : several_[granule->others];
  for (size_t i = 0, count = parts.size(); i < count; ++i) {
    const auto common = static_cast<uint16_t>(parts[i].bytes & bytes);
    if (common == 0) continue;
    if (common == parts[i].bytes) {
      apply(&parts[i], touch, at);
      continue;
    }
    GranulePart part = parts[i];
    parts[i].bytes = static_cast<uint16_t>(parts[i].bytes & ~common);
    part.bytes = common;
    if (part.others) ++others_[part.others].users;
    apply(&part, touch, at);
    parts.add(part);
  }
  if (bytes != 0xffff) return;
  for (const GranulePart& part : parts)
    if (!part.same_past(parts[0])) return;
  for (size_t i = 1; i < parts.size(); ++i) release_others(&parts[i]);
  const uint32_t index = granule->others;
  *granule = parts[0];
  granule->bytes = 0xffff;
  parts.clear();
  free_several_.push_back(index);
}

void Page::apply(GranulePart* part, Touch& touch, uint32_t at) {
  touch.met_initialised |= part->initialised;
  if (touch.writes && touch.is_wide && part->is_wide) {
    update(part, touch.epoch);
    return;
  }
  if (!touch.writes && reads_constant(*part, touch)) {
    add_read(part, touch);
    return;
  }
  if (part->write && part->write != touch.epoch) judge(part->write, touch, at);
  if (!touch.writes) {
    const auto judge_write = [&](Epoch x) {
      if (x.wrote() && x != touch.epoch) judge(x, touch, at);
    };
    for (const Epoch x : part->since) judge_write(x);
    const Others& others = others_[part->others];
    if (others.wrote)
      for (const Epoch x : others.epochs) judge_write(x);
    add_read(part, touch);
    return;
  }
  // Atomic accesses that nothing orders before an atomic write must still precede later accesses that are not atomic.
  GranulePart fresh;
  fresh.write = touch.epoch;
  fresh.is_wide = touch.is_wide;
  fresh.bytes = part->bytes;
  fresh.initialised = true;
  const auto keep = [&](Epoch x) {
    if (!x || x == touch.epoch || touch.judge(x) != Touch::Verdict::allowed) return;
    add_since(&fresh, x);
    fresh.is_wide &= is_wide(x);
  };
  const auto account = [&](Epoch x) {
    if (x && x != touch.epoch) judge(x, touch, at);
    keep(x);
  };
  keep(part->write);
  for (const Epoch x : part->since) account(x);
  for (size_t i = 0; i < others_[part->others].epochs.size(); ++i) account(others_[part->others].epochs[i]);
  release_others(part);
  *part = fresh;
}

// Returns true if several stores of one constant race, and one of them is ordered before this read. The read returns
// the constant in any case.
bool Page::reads_constant(const GranulePart& part, Touch& touch) const {
  const Others& others = others_[part.others];
  if (!part.since[0].wrote() && !part.since[1].wrote() && !others.wrote) return false;
  bool is_ordered = false;
  const auto accept = [&](Epoch x) {
    if (!x || !x.wrote()) return true;
    if (!touch.is_constant(x)) return false;
    is_ordered = is_ordered || touch.judge(x) == Touch::Verdict::ordered;
    return true;
  };
  if (!accept(part.write) || !accept(part.since[0]) || !accept(part.since[1])) return false;
  return std::all_of(others.epochs.begin(), others.epochs.end(), accept) && is_ordered;
}

void Page::judge(Epoch x, Touch& touch, uint32_t at) {
  const auto is_bad = [](Touch::Verdict v) { return v != Touch::Verdict::ordered && v != Touch::Verdict::allowed; };
  if (!is_bad(touch.judge(x))) return;
  const uint32_t step = x.is_run() ? x.bytes_of_lane() : kGranule;
  for (uint32_t byte = 0; byte < kGranule; byte += step) {
    const Epoch lane = x.at(byte);
    const Touch::Verdict verdict = touch.judge(lane);
    if (is_bad(verdict)) touch.conflict(lane, verdict, at + byte);
  }
}

bool Page::has(const Epochs& epochs, Epoch epoch) {
  bool found = false;
  for (const Epoch x : epochs) found |= x == epoch;  // no early exit: many at a time
  return found;
}

// Reads that are ordered before this one need not be kept, and are removed when there is no room. Many ordered reads
// are removed only now and then.
void Page::add_read(GranulePart* part, Touch& touch) {
  part->is_wide &= touch.is_wide;
  for (Epoch& x : part->since) {
    if (x == touch.epoch) return;
    if (x) continue;
    x = touch.epoch;
    return;
  }
  const auto ordered = [&](Epoch x) { return x && touch.judge(x) == Touch::Verdict::ordered; };
  if (part->others) {
    Others& others = others_[part->others];
    const size_t count = others.epochs.size();
    if (++others.untried <= (count < Others::kMax ? count : Others::kUntried)) {
      if (count < Others::kMax && !has(others.epochs, touch.epoch)) add_since(part, touch.epoch);
      return;
    }
    others.untried = 0;
    if (has(others.epochs, touch.epoch)) return;
    if (std::any_of(others.epochs.begin(), others.epochs.end(), ordered)) own_others(part)->epochs.erase_if(ordered);
  }
  for (Epoch& x : part->since)
    if (ordered(x)) x = Epoch();
  add_since(part, touch.epoch);
}

// Records an atomic update after other atomic updates, which is no race. All these updates are kept, but only the last
// of each thread.
void Page::update(GranulePart* part, Epoch epoch) {
  const Epoch before = std::exchange(part->write, epoch);
  part->initialised = true;
  if (!before || before == epoch) return;
  const auto is_later = [&](Epoch x) { return x.site() == before.site() && x.lane() == before.lane(); };
  for (Epoch& x : part->since) {
    if (x && !is_later(x)) continue;
    x = before;
    return;
  }
  add_since(part, before);
}

void Page::add_since(GranulePart* part, Epoch epoch) {
  for (Epoch& x : part->since) {
    if (!x) {
      x = epoch;
      return;
    }
  }
  if (others_[part->others].epochs.size() == Others::kMax) return;
  Others& others = *own_others(part);
  others.epochs.push_back(epoch);
  others.wrote |= epoch.wrote();
}

Page::Others* Page::own_others(GranulePart* part) {
  if (part->others && others_[part->others].users == 1) return &others_[part->others];
  uint32_t index = static_cast<uint32_t>(others_.size());
  if (free_others_.empty()) {
    others_.emplace_back();
  } else {
    index = free_others_.back();
    free_others_.pop_back();
  }
  Others& own = others_[index];
  own.users = 1;
  own.epochs = others_[part->others].epochs;
  own.wrote = others_[part->others].wrote;
  if (part->others) --others_[part->others].users;
  part->others = index;
  return &own;
}

void Page::release_others(GranulePart* part) {
  if (part->others && --others_[part->others].users == 0) free_others_.push_back(part->others);
  part->others = 0;
}

}  // namespace tandem::vgpu::check
