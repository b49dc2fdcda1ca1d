#include "vgpu/src/check/clock.h"

#include <algorithm>

namespace tandem::vgpu::check {
namespace {

// Returns true if some entry of b is later than the same entry of a.
bool exceeds(const Times& b, const Times& a) {
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= b[i] > a[i];
  return any != 0;
}

void take_later(Times* a, const Times& b) {
  for (int i = 0; i < kLanes; ++i) (*a)[i] = b[i] > (*a)[i] ? b[i] : (*a)[i];
}

Clock* writable(ClockRef* clock) {
  if (!*clock) {
    *clock = ClockRef(new Clock);
  } else if (!clock->unique()) {
    auto* const copy = new Clock;
    copy->rows = (*clock)->rows;
    copy->foreign = (*clock)->foreign;
    *clock = ClockRef(copy);
  }
  return clock->get();
}

Times* writable(Clock* clock, size_t row) {
  if (clock->rows.size() <= row) clock->rows.resize(row + 1);
  Ref<Row>& ref = clock->rows[row];
  if (!ref) {
    ref = Ref<Row>(new Row);
  } else if (!ref.unique()) {
    auto* const copy = new Row;
    copy->times = ref->times;
    ref = Ref<Row>(copy);
  }
  return &ref->times;
}

// Returns true if some entry of b is later than the same entry of a.
bool exceeds(const Rows& b, const Rows& a) {
  static constexpr Times kNothing{};
  for (size_t i = 0; i < b.size(); ++i)
    if (exceeds(b[i], i < a.size() ? a[i] : kNothing)) return true;
  return false;
}

Foreign::const_iterator find(const Foreign& foreign, int32_t cluster) {
  const auto at = std::ranges::lower_bound(foreign, cluster, {}, &ClusterRows::cluster);
  return at != foreign.end() && at->cluster == cluster ? at : foreign.end();
}

// Most entries of two clusters share their rows.
bool exceeds(const Foreign& b, const Foreign& a) {
  auto at = a.begin();
  for (const ClusterRows& entry : b) {
    while (at != a.end() && at->cluster < entry.cluster) ++at;
    if (at == a.end() || at->cluster != entry.cluster) return true;
    if (at->rows != entry.rows && exceeds(*entry.rows, *at->rows)) return true;
  }
  return false;
}

std::shared_ptr<const Rows> joined(const std::shared_ptr<const Rows>& a, const std::shared_ptr<const Rows>& b) {
  if (a == b || !exceeds(*b, *a)) return a;
  if (!exceeds(*a, *b)) return b;
  auto both = std::make_shared<Rows>(*a);
  both->resize(std::max(a->size(), b->size()));
  for (size_t i = 0; i < b->size(); ++i) take_later(&(*both)[i], (*b)[i]);
  return both;
}

}  // namespace

void join(ForeignRef* foreign, const ForeignRef& other) {
  if (!other || *foreign == other) return;
  if (!*foreign || !exceeds(**foreign, *other)) {
    *foreign = other;
    return;
  }
  if (!exceeds(*other, **foreign)) return;
  auto both = std::make_shared<Foreign>();
  both->reserve((*foreign)->size() + other->size());
  auto a = (*foreign)->begin(), b = other->begin();
  while (a != (*foreign)->end() || b != other->end()) {
    if (b == other->end() || (a != (*foreign)->end() && a->cluster < b->cluster)) {
      both->push_back(*a++);
    } else if (a == (*foreign)->end() || b->cluster < a->cluster) {
      both->push_back(*b++);
    } else {
      both->push_back({a->cluster, joined(a->rows, b->rows)});
      ++a, ++b;
    }
  }
  *foreign = std::move(both);
}

namespace {

// Determines which of two clocks has entries that the other lacks.
struct Difference {
  bool a_more = false, b_more = false;
};
Difference compare(const Clock& a, const Clock& b) {
  Difference d;
  const size_t size = std::max(a.rows.size(), b.rows.size());
  for (size_t i = 0; i < size; ++i) {
    const Row* const x = i < a.rows.size() ? a.rows[i].get() : nullptr;
    const Row* const y = i < b.rows.size() ? b.rows[i].get() : nullptr;
    if (x == y) continue;
    d.a_more |= x && (!y || exceeds(x->times, y->times));
    d.b_more |= y && (!x || exceeds(y->times, x->times));
  }
  if (a.foreign != b.foreign) {
    d.a_more |= a.foreign != nullptr;
    d.b_more |= b.foreign != nullptr;
  }
  return d;
}

}  // namespace

bool knows(const ClockRef& clock, uint16_t row, uint32_t lanes, int32_t time) {
  if (!clock || row >= clock->rows.size() || !clock->rows[row]) return lanes == 0 || time <= 0;
  const Times& times = clock->rows[row]->times;
  for (; lanes; lanes &= lanes - 1)
    if (times[first_of(lanes)] < time) return false;
  return true;
}

bool knows(const ClockRef& clock, int32_t cluster, uint16_t row, uint32_t lanes, int32_t time) {
  if (!clock || !clock->foreign) return lanes == 0;
  const auto found = find(*clock->foreign, cluster);
  if (found == clock->foreign->end() || row >= found->rows->size()) return lanes == 0;
  const Times& times = (*found->rows)[row];
  for (; lanes; lanes &= lanes - 1)
    if (times[first_of(lanes)] < time) return false;
  return true;
}

void join(ClockRef* clock, const ClockRef& other) {
  if (!other || *clock == other) return;
  if (!*clock) {
    *clock = other;
    return;
  }
  const Difference difference = compare(**clock, *other);
  if (!difference.b_more) return;
  if (!difference.a_more) {
    *clock = other;
    return;
  }
  Clock* const to = writable(clock);
  if (to->rows.size() < other->rows.size()) to->rows.resize(other->rows.size());
  for (size_t i = 0; i < other->rows.size(); ++i) {
    const Ref<Row>& theirs = other->rows[i];
    if (!theirs || theirs == to->rows[i]) continue;
    if (!to->rows[i] || !exceeds(to->rows[i]->times, theirs->times)) {
      to->rows[i] = theirs;
    } else if (exceeds(theirs->times, to->rows[i]->times)) {
      take_later(writable(to, i), theirs->times);
    }
  }
  join(&to->foreign, other->foreign);
}

void raise(ClockRef* clock, uint16_t row, uint32_t lanes, const Times& times) {
  uint32_t later = 0;
  for (; lanes; lanes &= lanes - 1) {
    const int lane = first_of(lanes);
    if (!knows(*clock, row, 1u << lane, times[lane])) later |= 1u << lane;
  }
  if (later == 0) return;
  lanes = later;
  Times* const to = writable(writable(clock), row);
  for (; lanes; lanes &= lanes - 1) {
    const int lane = first_of(lanes);
    (*to)[lane] = times[lane];
  }
}

void raise(ClockRef* clock, uint16_t row, int lane, int32_t time) {
  if (knows(*clock, row, 1u << lane, time)) return;
  (*writable(writable(clock), row))[lane] = time;
}

ForeignRef export_clock(const ClockRef& clock, int32_t cluster) {
  if (!clock) return nullptr;
  auto rows = std::make_shared<Rows>(clock->rows.size());
  for (size_t i = 0; i < rows->size(); ++i)
    if (clock->rows[i]) (*rows)[i] = clock->rows[i]->times;
  auto all = clock->foreign ? std::make_shared<Foreign>(*clock->foreign) : std::make_shared<Foreign>();
  const auto at = std::ranges::lower_bound(*all, cluster, {}, &ClusterRows::cluster);
  if (at != all->end() && at->cluster == cluster) {
    at->rows = std::move(rows);
  } else {
    all->insert(at, {cluster, std::move(rows)});
  }
  return all;
}

void import_clock(ClockRef* clock, const ForeignRef& foreign, int32_t cluster) {
  if (!foreign) return;
  const auto own = find(*foreign, cluster);
  for (size_t i = 0; own != foreign->end() && i < own->rows->size(); ++i) {
    static constexpr Times kNothing{};
    const bool has_row = *clock && i < (*clock)->rows.size() && (*clock)->rows[i];
    const Times& learnt = (*own->rows)[i];
    if (exceeds(learnt, has_row ? (*clock)->rows[i]->times : kNothing))
      take_later(writable(writable(clock), i), learnt);
  }
  ForeignRef known = *clock ? (*clock)->foreign : nullptr;
  join(&known, foreign);
  if (!*clock || known != (*clock)->foreign) writable(clock)->foreign = std::move(known);
}

}  // namespace tandem::vgpu::check
