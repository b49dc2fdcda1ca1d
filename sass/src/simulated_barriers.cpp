#include "sass/src/simulated_barriers.h"

#include <algorithm>
#include <cmath>

namespace tandem::machine_code {

bool is_copy(const Instruction& i) {
  return i.base() == "UTMALDG" || (i.base() == "UBLKCP" && !i.opcode.starts_with("UBLKCP.G"));
}
bool is_copy_to_block(const Instruction& i) { return i.opcode.starts_with("UBLKCP.S.S"); }
bool arrives(const Instruction& i) { return (i.base() == "SYNCS" && i.has("ARRIVE")) || arrives_after_loads(i); }
bool arrives_after_loads(const Instruction& i) { return i.base() == "ARRIVES" && i.has("LDGSTSBAR"); }

Barriers::Barriers(const std::vector<Instruction>& code, const Latencies& latencies, Simulation& run,
                   std::vector<SimulatedWarp>& warps)
    : code_(code), latencies_(latencies), run_(run), warps_(warps) {
  find_streams();
}

// Returns the addresses. A commit to several blocks arrives at the same offset in each block.
std::vector<uint32_t> Barriers::addresses(const Event& e) const {
  if (e.barrier == Event::kUnknown) return {};
  if (!at(e).has("MULTICAST")) return {e.barrier};
  const uint32_t offset = e.barrier & ((1u << kBlockBits) - 1);
  return {offset, offset | 1u << kBlockBits};
}

void Barriers::find_streams() {
  std::map<uint32_t, Expected> expected;
  for (size_t w = 0; w < run_.warps.size(); ++w) {
    for (const Event& e : run_.warps[w].events) {
      const Instruction& i = at(e);
      if (!arrives(i) && !is_copy(i) && i.base() != "UTCBAR") continue;
      for (const uint32_t address : addresses(e)) {
        ++barriers_[address].streams[2 * w + is_copy(i)].total;
        expected[address].copies += is_copy(i);
        if (!arrives(i) || e.amount == 0 || e.amount == Event::kUnknown) continue;
        ++expected[address].phases;
        expected[address].bytes = e.amount;
      }
    }
  }
  for (auto& [address, barrier] : barriers_) set_shares(expected[address], &barrier);
}

void Barriers::set_shares(const Expected& x, Mbarrier* barrier) {
  const double copies = x.phases > 0 ? std::max(1.0, std::round(1.0 * x.copies / x.phases)) : 1;
  barrier->bytes = x.bytes / copies;
  int writers = 0;
  for (const auto& [key, stream] : barrier->streams) writers += key % 2;
  double most = 0;
  for (auto& [key, stream] : barrier->streams) {
    if (key % 2 == 1) stream.share = std::max(1.0, copies / writers);
    most = std::max(most, stream.total / stream.share);
  }
  constexpr double of_turns = 4;
  if (most < of_turns) barrier->max_phases = static_cast<int>(most);
  // A warp that arrives only in the prologue replaces another warp's first arrival.
  std::erase_if(barrier->streams, [&](const auto& s) { return s.second.total / s.second.share < most / 3; });
}

void Barriers::arrive(const Event& e, size_t warp, double time, const Cause& cause) {
  const bool copies = is_copy(at(e));
  for (const uint32_t address : copies ? std::vector{e.barrier} : addresses(e)) {
    Mbarrier& barrier = barriers_[address];
    const auto found = barrier.streams.find(2 * warp + copies);
    if (found == barrier.streams.end()) continue;
    ++found->second.arrived;
    double phases = kNever;
    for (const auto& [key, s] : barrier.streams) phases = std::min(phases, std::floor(s.arrived / s.share));
    barrier.latest = std::max(barrier.latest, time);
    phases += barrier.assumed;
    while (static_cast<double>(barrier.phases.size()) < phases) barrier.phases.push_back({barrier.latest, cause});
    std::erase_if(barrier.waiting, [&](const Waiter& w) { return release(barrier, w); });
  }
}

bool Barriers::release(const Mbarrier& barrier, const Waiter& w) {
  if (static_cast<int>(barrier.phases.size()) < w.phases) return false;
  Release done{.time = w.issue + latencies_.look,
               .cause = {.delay = Delay::latency, .warp = static_cast<int>(w.warp), .event = w.event}};
  if (w.phases > 0) {
    const Release& phase = barrier.phases[static_cast<size_t>(w.phases) - 1];
    if (phase.time + latencies_.arrival > done.time) done = {phase.time + latencies_.arrival, phase.cause};
  }
  (w.scoreboard < 0 ? warps_[w.warp].ready : warps_[w.warp].scoreboards[w.scoreboard]) = done;
  return true;
}

void Barriers::wait(size_t warp, const Event& e, double time) {
  const std::optional<Control>& control = at(e).control;
  Waiter w{
      .warp = warp, .event = warps_[warp].next, .scoreboard = control ? control->write_barrier : -1, .issue = time};
  const auto found = barriers_.find(e.barrier);
  run_.unknown += e.barrier == Event::kUnknown;
  if (found == barriers_.end() || found->second.streams.empty()) {
    const WarpTrace& trace = run_.warps[warp];
    run_.unanswered += e.barrier != Event::kUnknown && !trace.turns.empty() && w.event >= trace.turns.front();
    return;
  }
  // The phase before the first phase is complete. Two tests of one parity in a row wait for the same phase.
  const auto [tested, first] = warps_[warp].tested.try_emplace(e.barrier);
  SimulatedWarp::Tested& before = tested->second;
  const bool known = e.amount != Event::kUnknown;
  const bool fills = run_.warps[warp].role == Role::load;  // a ring that is empty at first
  const bool passed = first && (known ? e.amount != 0 : fills);
  if (!passed && !(known && !first && before.parity == e.amount)) ++before.phases;
  before.parity = e.amount;
  w.phases = before.phases;
  if (found->second.max_phases > 0) w.phases = std::min(w.phases, found->second.max_phases);
  if (release(found->second, w)) return;
  found->second.waiting.push_back(w);
  Release& pending = w.scoreboard < 0 ? warps_[warp].ready : warps_[warp].scoreboards[w.scoreboard];
  pending.time = kNever;
}

void Barriers::arrive_named(size_t warp, const Event& e, double time) {
  constexpr uint32_t lanes = 32;
  if (e.amount == Event::kUnknown || e.barrier == Event::kUnknown) return;  // the whole block, before its work
  NamedBarrier& barrier = named_[run_.warps[warp].block << 8 | static_cast<int>(e.barrier)];
  if (at(e).has("SYNC")) {
    barrier.waiting.push_back(warp);
    warps_[warp].ready.time = kNever;
  }
  if (++barrier.arrived < static_cast<int>(e.amount / lanes)) return;
  const Cause cause{.delay = Delay::barrier, .warp = static_cast<int>(warp), .event = warps_[warp].next};
  for (const size_t other : barrier.waiting) warps_[other].ready = {time + latencies_.named_barrier, cause};
  barrier = {};
}

std::optional<double> Barriers::bytes_of_copy(const Event& e) const {
  const auto found = barriers_.find(e.barrier);
  if (found == barriers_.end()) return std::nullopt;
  return found->second.bytes;
}

double Barriers::progress(size_t warp) const {
  return static_cast<double>(warps_[warp].next) / static_cast<double>(run_.warps[warp].events.size());
}

bool Barriers::assume_arrival(double time) {
  constexpr double done = 0.8;  // a later waiter may wait for a warp that has ended
  Mbarrier* late = nullptr;
  double least = kNever;
  for (auto& [address, barrier] : barriers_) {
    for (const Waiter& w : barrier.waiting) {
      if (progress(w.warp) >= least) continue;
      least = progress(w.warp);
      late = &barrier;
    }
  }
  NamedBarrier* named = nullptr;
  for (auto& [key, barrier] : named_) {
    for (const size_t w : barrier.waiting) {
      if (progress(w) >= least) continue;
      least = progress(w);
      named = &barrier;
    }
  }
  if (least > done) return false;
  ++run_.assumed;
  constexpr size_t settled = 4;
  const auto recurs = [&](size_t w, size_t event) {
    const std::vector<size_t>& turns = run_.warps[w].turns;
    return turns.size() > settled && event >= turns[settled];
  };
  if (named != nullptr) run_.recurring += recurs(named->waiting.front(), warps_[named->waiting.front()].next);
  if (named == nullptr) run_.recurring += recurs(late->waiting.front().warp, late->waiting.front().event);
  if (named != nullptr) {
    for (const size_t w : named->waiting) warps_[w].ready = {time, {}};
    *named = {};
  } else {
    ++late->assumed;
    late->phases.push_back({time, {}});
    std::erase_if(late->waiting, [&](const Waiter& w) { return release(*late, w); });
  }
  return true;
}

}  // namespace tandem::machine_code
