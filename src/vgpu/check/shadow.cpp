#include "vgpu/check/shadow.h"

#include <algorithm>

namespace tandem::vgpu::check {

Page::Page(bool initialised) : others_(1) {
  for (Part& granule : granules_) granule.initialised = initialised;
}

void Page::forget(uint32_t begin, uint32_t end) {
  for (uint32_t g = (begin + kGranule - 1) / kGranule; g < end / kGranule; ++g) granules_[g].initialised = false;
}

void Page::touch(uint32_t begin, uint32_t end, Touch& touch) {
  for (uint32_t g = begin / kGranule; g * kGranule < end; ++g) {
    const uint32_t at = g * kGranule;
    const uint32_t first = begin > at ? begin - at : 0, last = std::min(kGranule, end - at);
    const auto bytes = static_cast<uint16_t>((1u << last) - (1u << first));
    Part& granule = granules_[g];
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
  }
}

void Page::touch_some(Part* granule, uint16_t bytes, Touch& touch, uint32_t at) {
  if (granule->bytes) {  // whole so far
    uint32_t index = static_cast<uint32_t>(several_.size());
    if (free_several_.empty()) {
      several_.emplace_back().reserve(4);
    } else {
      index = free_several_.back();
      free_several_.pop_back();
    }
    several_[index].push_back(*granule);
    *granule = Part();
    granule->bytes = 0;
    granule->others = index;
  }
  std::vector<Part>& parts = several_[granule->others];
  for (size_t i = 0, count = parts.size(); i < count; ++i) {
    const auto common = static_cast<uint16_t>(parts[i].bytes & bytes);
    if (common == 0) continue;
    if (common == parts[i].bytes) {
      apply(&parts[i], touch, at);
      continue;
    }
    Part part = parts[i];
    parts[i].bytes = static_cast<uint16_t>(parts[i].bytes & ~common);
    part.bytes = common;
    if (part.others) ++others_[part.others].users;
    apply(&part, touch, at);
    parts.push_back(part);
  }
  if (bytes != 0xffff) return;
  for (const Part& part : parts)
    if (!part.same_past(parts[0])) return;
  for (size_t i = 1; i < parts.size(); ++i) release_others(&parts[i]);
  const uint32_t index = granule->others;
  *granule = parts[0];
  granule->bytes = 0xffff;
  parts.clear();
  free_several_.push_back(index);
}

void Page::apply(Part* part, Touch& touch, uint32_t at) {
  touch.met_initialised |= part->initialised;
  if (part->write && part->write != touch.epoch) judge(part->write, touch, at);
  if (!touch.writes) {
    for (const Epoch x : part->since) {
      if (x == touch.epoch) return;
      if (x.wrote()) judge(x, touch, at);
    }
    for (const Epoch x : others_[part->others].epochs) {
      if (x == touch.epoch) return;
      if (x.wrote()) judge(x, touch, at);
    }
    drop_ordered(part, touch);
    add_since(part, touch.epoch);
    return;
  }
  // Atomic accesses that nothing orders before an atomic write must still be before later ones that are not atomic.
  Part fresh;
  fresh.write = touch.epoch;
  fresh.bytes = part->bytes;
  fresh.initialised = true;
  const auto keep = [&](Epoch x) {
    if (x && x != touch.epoch && touch.judge(x) == Touch::Verdict::allowed) add_since(&fresh, x);
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

void Page::judge(Epoch x, Touch& touch, uint32_t at) {
  const Touch::Verdict verdict = touch.judge(x);
  if (verdict == Touch::Verdict::unordered || verdict == Touch::Verdict::unfenced) touch.conflict(x, verdict, at);
}

void Page::drop_ordered(Part* part, Touch& touch) {
  const auto ordered = [&](Epoch x) { return x && touch.judge(x) == Touch::Verdict::ordered; };
  for (Epoch& x : part->since)
    if (ordered(x)) x = Epoch();
  const std::vector<Epoch>& now = others_[part->others].epochs;
  if (std::none_of(now.begin(), now.end(), ordered)) return;
  std::erase_if(own_others(part)->epochs, ordered);
}

void Page::add_since(Part* part, Epoch epoch) {
  for (Epoch& x : part->since) {
    if (!x) {
      x = epoch;
      return;
    }
  }
  if (others_[part->others].epochs.size() < Others::kMost) own_others(part)->epochs.push_back(epoch);
}

Page::Others* Page::own_others(Part* part) {
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
  if (part->others) --others_[part->others].users;
  part->others = index;
  return &own;
}

void Page::release_others(Part* part) {
  if (part->others && --others_[part->others].users == 0) free_others_.push_back(part->others);
  part->others = 0;
}

}  // namespace tandem::vgpu::check
