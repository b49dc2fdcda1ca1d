// Shadow memory of words that plain loads and stores access one at a time, and of words with many readers.
#include <algorithm>

#include "vgpu/src/check/shadow.h"

namespace tandem::vgpu::check {
namespace {

// Returns true if only the new access must be recorded: the word had no access, or an access that happened before. A
// read after a write is recorded in addition, because a later access may know of the write but not of the read.
bool takes_place_of(Epoch x, Touch& touch) {
  if (!x || x == touch.epoch) return true;
  return (touch.writes || !x.wrote()) && touch.judge(x) == Touch::Verdict::ordered;
}

}  // namespace

// Handles bytes of a granule that is kept by words, or a plain access to some bytes of a granule in parts. Returns
// false if the granule is now in parts.
bool Page::touch_words(uint32_t granule, uint16_t bytes, Touch& touch) {
  Granule& g = granules_[granule];
  if (states_[granule].kind == Kind::parts) {
    if (!touch.is_plain || bytes == 0xffff || !is_by_words(bytes)) return false;
    if (!g.whole.bytes || g.whole.write || g.whole.since[0] || g.whole.others) return false;
    states_[granule].kind = g.whole.initialised ? Kind::words : Kind::unwritten_words;
    std::construct_at(&g.words);
  } else if (!touch.is_plain || !is_by_words(bytes)) {
    leave_words(granule);
    return false;
  }
  for (uint32_t i = 0; i < 4; ++i) {
    if (!(bytes >> 4 * i & 1) || takes_place_of(g.words[i], touch)) continue;
    leave_words(granule);
    return false;
  }
  if (bytes == 0xffff && (touch.writes || states_[granule].kind == Kind::words)) {
    become_whole(granule, touch);
    return true;
  }
  for (uint32_t i = 0; i < 4; ++i) {
    if (!(bytes >> 4 * i & 1)) continue;
    touch.met_initialised |= states_[granule].kind == Kind::words || g.words[i].wrote();
    g.words[i] = touch.epoch;
  }
  return true;
}

// The same for a run. Afterwards the granule is one part again.
bool Page::touch_words_by_run(uint32_t granule, Touch& touch) {
  const Words words = granules_[granule].words;
  const Epoch run = touch.epoch;
  bool takes = touch.is_plain && run.bytes_of_lane() == 4 && (touch.writes || states_[granule].kind == Kind::words);
  for (uint32_t i = 0; i < 4 && takes; ++i) {
    touch.narrow(run.at(4 * i));
    takes = takes_place_of(words[i], touch);
  }
  touch.narrow(run);
  if (!takes) {
    leave_words(granule);
    return false;
  }
  become_whole(granule, touch);
  return true;
}

void Page::become_whole(uint32_t granule, Touch& touch) {
  touch.met_initialised |= states_[granule].kind == Kind::words;
  states_[granule].kind = Kind::parts;
  GranulePart* const whole = std::construct_at(&granules_[granule].whole);
  (touch.writes ? whole->write : whole->since[0]) = touch.epoch;
  whole->initialised = true;
  whole->is_wide = false;
}

void Page::leave_words(uint32_t granule) {
  const Words words = granules_[granule].words;
  const bool initialised = states_[granule].kind == Kind::words;
  states_[granule].kind = Kind::parts;
  GranulePart* const whole = std::construct_at(&granules_[granule].whole);
  whole->bytes = 0;
  whole->others = new_several();
  Parts& parts = several_[whole->others];
  for (uint32_t i = 0; i < 4; ++i) {
    GranulePart& part = parts.add(GranulePart());
    part.bytes = static_cast<uint16_t>(0xf << 4 * i);
    (words[i].wrote() ? part.write : part.since[0]) = words[i];
    part.initialised = initialised || words[i].wrote();
    part.is_wide = !words[i];
  }
}

// Lets a read of a crowded granule pass. Every 256th read is examined, because later accesses may be ordered by then.
bool Page::let_by(GranuleState* state, Touch& touch) {
  uint8_t& left = state->let_by;
  if (touch.writes) {
    left = 0;
    return false;
  }
  if (--left == 0) return false;
  touch.met_initialised = true;
  return true;
}

// Marks a granule as crowded after a read, if it has no write and no free entry for another reader.
void Page::note_crowd(uint32_t granule) {
  const auto is_full = [&](const GranulePart& part) {
    if (part.others == 0) return false;
    const Others& others = others_[part.others];
    return others.epochs.size() == Others::kMax && !others.wrote && part.initialised && !part.write &&
           !part.since[0].wrote() && !part.since[1].wrote();
  };
  const GranulePart& whole = granules_[granule].whole;
  const auto let_many_by = [&](const GranulePart& part) { others_[part.others].untried = Others::kUntried; };
  if (whole.bytes) {
    if (!is_full(whole)) return;
    let_many_by(whole);
  } else {
    const Parts& parts = several_[whole.others];
    if (!std::all_of(parts.begin(), parts.end(), is_full)) return;
    std::for_each(parts.begin(), parts.end(), let_many_by);
  }
  states_[granule].let_by = 255;
}

}  // namespace tandem::vgpu::check
