#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "sass/src/clocks.h"

namespace tandem::machine_code {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int kSchedulers = 4, kScoreboards = 6;
constexpr size_t kQueue = 8;         // products that wait for a tensor core, of all its warps, as they were issued
constexpr uint32_t kBlockBits = 24;  // of a cluster's shared addresses

struct Release {
  double time = 0;
  Cause cause;
};

struct SimulatedWarp {
  size_t next = 0;
  double late = 0;  // clocks that it loses in its second turn
  Release ready;
  Release scoreboards[kScoreboards];
  double issued_last = -1;
  std::vector<int> open, committed;  // products: of the group that is open; the last of each committed group
  int last_product = -1;
  int awaited = -1;  // a product, whose end others' instructions may still put off
  Cause awaits;
  struct Looked {
    int phases = 0;  // that it has waited for
    uint32_t parity = Event::kUnknown;
  };
  std::map<uint32_t, Looked> looked;  // at each barrier
};

// Who waits, and which scoreboard tells; -1: the warp stands.
struct Waiting {
  size_t warp = 0;
  size_t event = 0;
  int scoreboard = -1;
  int phases = 0;  // that must be completed
  double issue = 0;
};

// Arrivals of one warp at a barrier, or of its copies.
struct Stream {
  int arrived = 0, total = 0;
  double share = 1;  // arrivals that make one phase
};

struct Barrier {
  std::map<size_t, Stream> streams;
  std::vector<Release> phases;  // that are completed
  int assumed = 0;              // of these
  std::vector<Waiting> waiting;
  double bytes = 0;  // of one copy
  int most = 0;      // phases that there will be, where arrivals are the prologue's
};

struct NamedBarrier {
  int arrived = 0;
  std::vector<size_t> waiting;
};

class Machine {
 public:
  Machine(const Kernel& kernel, std::vector<WarpTrace> traces, const Rates& rates, const Latencies& latencies,
          double apart)
      : code_(kernel.code), rates_(rates), l_(latencies) {
    run_.warps = std::move(traces);
    run_.issues.resize(run_.warps.size());
    warps_.resize(run_.warps.size());
    for (const Instruction& i : code_) units_.push_back(unit_of(i));
    find_streams();
    int before[2 * kSchedulers] = {};
    for (size_t w = 0; w < warps_.size(); ++w) {
      if (computes(run_.warps[w])) warps_[w].late = apart * before[scheduler_of(w)]++;
    }
  }

  Simulation go() {
    for (double time = 0;;) {
      double next = kNever;
      bool issued = false;
      for (int s = 0; s < 2 * kSchedulers; ++s) {
        const std::optional<size_t> warp = choose(s, time, &next);
        if (!warp) continue;
        issue(*warp, time);
        issued = true;
      }
      if (over()) break;
      if (issued) {
        time += 1;
      } else if (next < kNever) {
        time = std::max(time + 1, std::ceil(next));
      } else if (!assume_arrival(time)) {
        break;
      }
    }
    return std::move(run_);
  }

 private:
  struct Scheduler {
    double units[kUnits] = {};  // when each is free
    double tensor = 0;          // the tensor core, where sums are in registers
    int last_product = -1;
    std::vector<int> queue;            // its products so far, as they were issued
    double spare = 0, counted_at = 0;  // reads of registers that products have left over; until when they are counted
  };
  struct Multiprocessor {
    double shared = 0;    // warps' own reads and writes
    double operands = 0;  // those, what products read, and what copies write
    double copies = 0, tensor = 0;
    int last_product = -1;
  };

  const Event& event(size_t warp) const { return run_.warps[warp].events[warps_[warp].next]; }
  const Instruction& at(const Event& e) const { return code_[static_cast<size_t>(e.instruction)]; }
  Product& product(int number) { return run_.products[static_cast<size_t>(number)]; }
  int scheduler_of(size_t warp) const {
    return run_.warps[warp].block * kSchedulers + run_.warps[warp].warp % kSchedulers;
  }
  Scheduler& scheduler(size_t warp) { return schedulers_[scheduler_of(warp)]; }
  Multiprocessor& multiprocessor(size_t warp) { return multiprocessors_[run_.warps[warp].block]; }
  static bool computes(const WarpTrace& w) { return w.role == Role::computing || w.role == Role::softmax; }

  // ---- Barriers ----

  static bool is_copy(const Instruction& i) { return i.base() == "UTMALDG" || i.base() == "UBLKCP"; }
  static bool arrives(const Instruction& i) { return i.base() == "SYNCS" && i.has("ARRIVE"); }

  // A commit to several blocks arrives at the same place in each.
  std::vector<uint32_t> addresses(const Event& e) const {
    if (e.barrier == Event::kUnknown) return {};
    if (!at(e).has("MULTICAST")) return {e.barrier};
    const uint32_t place = e.barrier & ((1u << kBlockBits) - 1);
    return {place, place | 1u << kBlockBits};
  }

  void find_streams() {
    struct Expected {
      int copies = 0, phases = 0;
      double bytes = 0;
    };
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
    for (auto& [address, barrier] : barriers_) {
      const Expected& x = expected[address];
      const double copies = x.phases > 0 ? std::max(1.0, std::round(1.0 * x.copies / x.phases)) : 1;
      barrier.bytes = x.bytes / copies;
      int writers = 0;
      for (const auto& [key, stream] : barrier.streams) writers += key % 2;
      double most = 0;
      for (auto& [key, stream] : barrier.streams) {
        if (key % 2 == 1) stream.share = std::max(1.0, copies / writers);
        most = std::max(most, stream.total / stream.share);
      }
      constexpr double of_turns = 4;
      if (most < of_turns) barrier.most = static_cast<int>(most);
      // Who arrives at the beginning alone stands in for another.
      std::erase_if(barrier.streams, [&](const auto& s) { return s.second.total / s.second.share < most / 3; });
    }
  }

  void arrive(uint32_t address, size_t stream, double time, const Cause& cause) {
    Barrier& barrier = barriers_[address];
    const auto found = barrier.streams.find(stream);
    if (found == barrier.streams.end()) return;
    ++found->second.arrived;
    double phases = kNever;
    for (const auto& [key, s] : barrier.streams) phases = std::min(phases, std::floor(s.arrived / s.share));
    latest_[address] = std::max(latest_[address], time);
    phases += barrier.assumed;
    while (static_cast<double>(barrier.phases.size()) < phases) barrier.phases.push_back({latest_[address], cause});
    std::erase_if(barrier.waiting, [&](const Waiting& w) { return release(barrier, w); });
  }

  bool release(const Barrier& barrier, const Waiting& w) {
    if (static_cast<int>(barrier.phases.size()) < w.phases) return false;
    Release done{.time = w.issue + l_.look,
                 .cause = {.delay = Delay::latency, .warp = static_cast<int>(w.warp), .event = w.event}};
    if (w.phases > 0) {
      const Release& phase = barrier.phases[static_cast<size_t>(w.phases) - 1];
      if (phase.time + l_.arrival > done.time) done = {phase.time + l_.arrival, phase.cause};
    }
    (w.scoreboard < 0 ? warps_[w.warp].ready : warps_[w.warp].scoreboards[w.scoreboard]) = done;
    return true;
  }

  void wait(size_t warp, const Event& e, double time) {
    const std::optional<Control>& control = at(e).control;
    Waiting w{
        .warp = warp, .event = warps_[warp].next, .scoreboard = control ? control->write_barrier : -1, .issue = time};
    const auto found = barriers_.find(e.barrier);
    run_.unknown += e.barrier == Event::kUnknown;
    if (found == barriers_.end() || found->second.streams.empty()) return;
    // The phase before the first one counts as completed for those who ask for it. Who asks for a parity again asks for
    // the same phase.
    const auto [looked, first] = warps_[warp].looked.try_emplace(e.barrier);
    SimulatedWarp::Looked& before = looked->second;
    const bool known = e.amount != Event::kUnknown;
    const bool fills = run_.warps[warp].role == Role::load;  // a ring, which is empty at first
    const bool passed = first && (known ? e.amount != 0 : fills);
    if (!passed && !(known && !first && before.parity == e.amount)) ++before.phases;
    before.parity = e.amount;
    w.phases = before.phases;
    if (found->second.most > 0) w.phases = std::min(w.phases, found->second.most);
    if (release(found->second, w)) return;
    found->second.waiting.push_back(w);
    Release& held = w.scoreboard < 0 ? warps_[warp].ready : warps_[warp].scoreboards[w.scoreboard];
    held.time = kNever;
  }

  void meet(size_t warp, const Event& e, double time) {
    constexpr uint32_t lanes = 32;
    if (e.amount == Event::kUnknown || e.barrier == Event::kUnknown) return;  // the whole block, before its work
    NamedBarrier& barrier = named_[run_.warps[warp].block << 8 | static_cast<int>(e.barrier)];
    const bool stands = at(e).has("SYNC");
    if (stands) {
      barrier.waiting.push_back(warp);
      warps_[warp].ready.time = kNever;
    }
    if (++barrier.arrived < static_cast<int>(e.amount / lanes)) return;
    const Cause cause{.delay = Delay::barrier, .warp = static_cast<int>(warp), .event = warps_[warp].next};
    for (const size_t other : barrier.waiting) warps_[other].ready = {time + l_.named_barrier, cause};
    barrier = {};
  }

  // All wait: the warp that is behind the others most goes on as if somebody had arrived.
  bool assume_arrival(double time) {
    const auto progress = [&](size_t w) {
      return static_cast<double>(warps_[w].next) / static_cast<double>(run_.warps[w].events.size());
    };
    Barrier* behind = nullptr;
    Waiting least;
    double least_progress = kNever;
    for (auto& [address, barrier] : barriers_) {
      for (const Waiting& w : barrier.waiting) {
        if (progress(w.warp) >= least_progress) continue;
        least_progress = progress(w.warp);
        least = w;
        behind = &barrier;
      }
    }
    NamedBarrier* named = nullptr;
    for (auto& [key, barrier] : named_) {
      for (const size_t w : barrier.waiting) {
        if (progress(w) >= least_progress) continue;
        least_progress = progress(w);
        named = &barrier;
      }
    }
    if (least_progress > kDone) return false;
    ++run_.assumed;
    if (named != nullptr) {
      for (const size_t w : named->waiting) warps_[w].ready = {time, {}};
      *named = {};
    } else {
      ++behind->assumed;
      behind->phases.push_back({time, {}});
      std::erase_if(behind->waiting, [&](const Waiting& w) { return release(*behind, w); });
    }
    return true;
  }

  // ---- Products and copies ----

  // may_start: when its operands can be there.
  int add_product(size_t warp, double time, double may_start, double clocks, double bytes, double flops,
                  int multiprocessor, double* free, int* last) {
    Product p{.warp = static_cast<int>(warp),
              .event = warps_[warp].next,
              .multiprocessor = multiprocessor,
              .issue = time,
              .flops = flops,
              .before = *last};
    double& operands = multiprocessors_[multiprocessor].operands;
    p.start = std::max(may_start, *free);
    operands = std::max(operands, time) + bytes / rates_.shared_bytes;
    p.finish = std::max(p.start + clocks, operands);
    *free = p.finish;
    run_.products.push_back(p);
    return *last = static_cast<int>(run_.products.size()) - 1;
  }

  // From a product until its warp issues the next one, measured.
  static double issue_clocks(double columns) { return (columns - 32) / 8; }

  // A warp's quarter of a warpgroup's product of 64 rows, on its scheduler's tensor core.
  void multiply_in_registers(size_t warp, const Instruction& i, double time) {
    constexpr double rows = 64, quarter = 0.25, depth = 32;
    const double columns = columns_of(i);
    const double bytes = depth * (columns + (left_in_shared_memory(i) ? rows : 0)) * quarter;
    Scheduler& s = scheduler(warp);
    SimulatedWarp& w = warps_[warp];
    // Of the first, the left operand is read before the warp goes on; of those behind it, meanwhile.
    const bool first = w.last_product < 0 || product(w.last_product).finish <= time;
    const bool reads_left = first && !left_in_shared_memory(i);
    const double ahead = reads_left ? l_.start_from_registers : l_.start_from_shared;
    w.last_product =
        add_product(warp, time, time + ahead, columns / rates_.mma_columns, bytes,
                    2 * rows * columns * depth_of(i) * quarter, run_.warps[warp].block, &s.tensor, &s.last_product);
    s.queue.push_back(w.last_product);
    w.open.push_back(w.last_product);
    w.ready.time = std::max(w.ready.time, time + (reads_left ? ahead : issue_clocks(columns)));
    if (i.last() != "gsb0") return;
    w.committed.push_back(w.open.back());
    w.open.clear();
  }

  // The place in the queue of the product that runs; the queue's end: none does.
  size_t running(const Scheduler& s, double time) {
    size_t k = s.queue.size();
    while (k > 0 && product(s.queue[k - 1]).start > time) --k;
    return k > 0 && product(s.queue[k - 1]).finish > time ? k - 1 : s.queue.size();
  }

  // An instruction reads registers beside the running product, whose sums go through the same ports and which comes
  // last: what it has not left over before, it now waits for.
  void read_registers(Scheduler& s, size_t place, double reads, double time) {
    const Product& p = product(s.queue[place]);
    const Instruction& i = at(run_.warps[static_cast<size_t>(p.warp)].events[p.event]);
    const double clocks = columns_of(i) / rates_.mma_columns;
    const double left = left_in_shared_memory(i) ? 0 : l_.left_reads;
    const double spare_a_clock = l_.port_reads - 1 - left / clocks;
    s.spare = std::min(l_.spare_reads, s.spare + std::max(0.0, time - s.counted_at) * spare_a_clock) - reads;
    s.counted_at = std::max(s.counted_at, time);
    if (s.spare >= 0) return;
    const double waits = -s.spare / l_.port_reads;
    s.spare = 0;
    s.counted_at += waits;
    hold_up(s, place, waits);
  }

  void hold_up(Scheduler& s, size_t place, double clocks) {
    s.tensor = product(s.queue[place]).finish += clocks;
    for (size_t k = place + 1; k < s.queue.size(); ++k) {
      Product& p = product(s.queue[k]);
      const double late = std::max(0.0, s.tensor - p.start);
      p.start += late;
      s.tensor = p.finish += late;
    }
  }

  void multiply_in_tensor_memory(size_t warp, const Event& e, double time) {
    constexpr double depth = 32, lanes = 128, usual = 128;
    const Instruction& i = at(e);
    const double columns = e.amount == Event::kUnknown ? usual : 8 * (e.amount >> 17 & 63);
    const bool pair = by_a_pair(i);
    // A pair's product of 128 rows has 64 in each block, half of the columns in lanes of their own: half of the clocks.
    const bool halves = pair && e.amount != Event::kUnknown && 16 * (e.amount >> 24 & 31) == lanes;
    const double rows = halves ? lanes / 2 : lanes;
    const double bytes = depth * (columns / (pair ? 2 : 1) + (left_in_shared_memory(i) ? rows : 0));
    for (int m = 0; m < (pair ? 2 : 1); ++m) {
      const int where = pair ? m : run_.warps[warp].block;
      Multiprocessor& sm = multiprocessors_[where];
      warps_[warp].last_product = add_product(warp, time, time, rows / lanes * columns / rates_.mma_columns, bytes,
                                              2 * rows * columns * depth_of(i), where, &sm.tensor, &sm.last_product);
    }
  }

  void commit(size_t warp, const Event& e, double time) {
    const int last = warps_[warp].last_product;
    Cause cause{.delay = Delay::products, .warp = static_cast<int>(warp), .event = warps_[warp].next, .product = last};
    if (last >= 0) {
      const Product& p = run_.products[static_cast<size_t>(last)];
      const Instruction& i = at(run_.warps[warp].events[p.event]);
      const double tail = by_a_pair(i)               ? l_.by_a_pair
                          : left_in_shared_memory(i) ? l_.left_in_shared_memory
                                                     : l_.left_in_tensor_memory;
      // Bursts were timed until somebody who waits went on.
      time = std::max(time, p.finish + tail - l_.arrival);
    }
    for (const uint32_t address : addresses(e)) arrive(address, 2 * warp, time, cause);
  }

  void copy(size_t warp, const Event& e, double time) {
    const auto found = barriers_.find(e.barrier);
    if (found == barriers_.end()) return;
    Multiprocessor& sm = multiprocessor(warp);
    const double bytes = found->second.bytes;
    sm.copies = std::max(sm.copies, time) + bytes / l_.copy_bytes;
    sm.operands = std::max(sm.operands, time) + bytes / rates_.shared_bytes;
    arrive(e.barrier, 2 * warp + 1, sm.copies + l_.copy,
           {.delay = Delay::copies, .warp = static_cast<int>(warp), .event = warps_[warp].next});
  }

  // ---- Issue ----

  static bool reads_registers(Unit unit) {
    return unit == Unit::fma || unit == Unit::alu || unit == Unit::conversion || unit == Unit::exponential;
  }

  // When a warp may issue its next event, for all that it waits for itself.
  Release ready_for(size_t warp) const {
    const SimulatedWarp& w = warps_[warp];
    const Instruction& i = at(event(warp));
    Release found = w.ready;
    const auto later = [&](double time, const Cause& cause) {
      if (time > found.time) found = {time, cause};
    };
    if (w.awaited >= 0)
      later(run_.products[static_cast<size_t>(w.awaited)].finish + l_.products_in_registers, w.awaits);
    const uint32_t waits = i.control ? i.control->waits : 0;
    for (int k = 0; k < kScoreboards; ++k) {
      if ((waits >> k & 1) != 0) later(w.scoreboards[k].time, w.scoreboards[k].cause);
    }
    return found;
  }

  // When what it needs beside that is free.
  Release free_for(size_t warp) {
    const Event& e = event(warp);
    const Instruction& i = at(e);
    const Unit unit = units_[static_cast<size_t>(e.instruction)];
    const Scheduler& s = scheduler(warp);
    Release found{s.units[static_cast<size_t>(unit)], {.delay = Delay::unit}};
    if (unit == Unit::shared_memory) found.time = std::max(found.time, multiprocessor(warp).shared - l_.shared);
    if (unit == Unit::mma && !in_tensor_memory(i) && s.queue.size() >= kQueue) {
      const int first = s.queue[s.queue.size() - kQueue];  // of those in the queue, which is full until it starts
      const double start = product(first).start;
      if (start > found.time) found = {start, {.delay = Delay::products, .product = first}};
    }
    return found;
  }

  std::optional<size_t> choose(int s, double time, double* next) {
    std::optional<size_t> chosen;
    for (size_t w = 0; w < warps_.size(); ++w) {
      if (scheduler_of(w) != s) continue;
      if (warps_[w].next >= run_.warps[w].events.size()) continue;
      const double when = std::max(ready_for(w).time, free_for(w).time);
      if (when > time) {
        *next = std::min(*next, when);
      } else if (!chosen || warps_[w].issued_last < warps_[*chosen].issued_last) {
        chosen = w;
      }
    }
    return chosen;
  }

  double latency_of(const Instruction& i, Unit unit) const {
    switch (unit) {
      case Unit::exponential: return l_.exponential;
      case Unit::shared_memory: return l_.shared;
      case Unit::memory: return l_.memory;
      case Unit::uniform: return l_.uniform;
      case Unit::tensor_memory: return i.base() == "STTM" ? l_.tensor_store : l_.tensor_load;
      default: return l_.control;
    }
  }

  // Clocks that a unit's part in one scheduler takes.
  double clocks_of(const Instruction& i, Unit unit) const {
    switch (unit) {
      case Unit::exponential: return kSchedulers * lanes_of(i) / rates_.exponentials;
      case Unit::fma: return kSchedulers * lanes_of(i) / rates_.fma;
      case Unit::alu:
      case Unit::conversion: return kSchedulers * lanes_of(i) / rates_.alu;
      case Unit::tensor_memory: return rates_.tensor_bytes > 0 ? kSchedulers * bytes_of(i) / rates_.tensor_bytes : 1;
      default: return 1;
    }
  }

  void issue(size_t warp, double time) {
    SimulatedWarp& w = warps_[warp];
    const Event& e = event(warp);
    const Instruction& i = at(e);
    const Unit unit = units_[static_cast<size_t>(e.instruction)];
    const Release ready = ready_for(warp), free = free_for(warp);
    const bool by_others = std::max(ready.time, free.time) < time - 0.5;
    run_.issues[warp].push_back({.time = time,
                                 .ready = std::min(time, ready.time),
                                 .cause = ready.cause,
                                 .busy = by_others ? Delay::turn : free.cause.delay,
                                 .product = by_others ? -1 : free.cause.product});
    w.issued_last = time;
    const Cause self{.delay = Delay::order, .warp = static_cast<int>(warp), .event = w.next};
    const bool second_turn = run_.warps[warp].turns.size() > 1 && w.next == run_.warps[warp].turns[1];
    w.ready = {time + std::max(1, i.control ? i.control->stall : 2) + (second_turn ? w.late : 0), self};
    w.awaited = -1;
    take_units(warp, i, unit, time);
    if (i.control) set_scoreboards(warp, *i.control, i, unit, time);
    if (i.base() == "SYNCS" && i.has("PHASECHK")) wait(warp, e, time);
    if (arrives(i) && e.barrier != Event::kUnknown) {
      Cause cause = self;
      cause.delay = Delay::barrier;
      const bool remote = static_cast<int>(e.barrier >> kBlockBits) != run_.warps[warp].block;
      arrive(e.barrier, 2 * warp, time + (remote ? l_.remote : 0), cause);
    }
    if (i.base() == "BAR") meet(warp, e, time);
    if (i.base() == "UTCBAR") commit(warp, e, time);
    if (is_copy(i)) copy(warp, e, time);
    if (unit == Unit::mma && in_tensor_memory(i)) multiply_in_tensor_memory(warp, e, time);
    if (unit == Unit::mma && !in_tensor_memory(i)) multiply_in_registers(warp, i, time);
    if (i.base() == "WARPGROUP" && i.has("DEPBAR")) wait_for_products(warp, i);
    ++w.next;
  }

  void take_units(size_t warp, const Instruction& i, Unit unit, double time) {
    Scheduler& s = scheduler(warp);
    double clocks = clocks_of(i, unit);
    const size_t place = running(s, time);
    if (reads_registers(unit) && place < s.queue.size()) {
      const Beside& beside = unit == Unit::fma ? l_.fma : unit == Unit::exponential ? l_.exponentials : l_.alu;
      const Product& p = product(s.queue[place]);
      const bool shared = left_in_shared_memory(at(run_.warps[static_cast<size_t>(p.warp)].events[p.event]));
      clocks += shared ? beside.unit : beside.unit_beside_left;
      warps_[warp].ready.time = std::max(warps_[warp].ready.time, time + beside.warp);
      read_registers(s, place, beside.reads, time);
    }
    double& busy = s.units[static_cast<size_t>(unit)];
    busy = (busy > time - 1 ? busy : time) + clocks;  // parts of a clock count
    // Conversions are on the ALU's path.
    if (unit == Unit::conversion) s.units[static_cast<size_t>(Unit::alu)] = busy;
    if (unit == Unit::alu) s.units[static_cast<size_t>(Unit::conversion)] = busy;
    if (unit == Unit::shared_memory) {
      Multiprocessor& sm = multiprocessor(warp);
      for (double* free : {&sm.shared, &sm.operands}) *free = std::max(*free, time) + bytes_of(i) / rates_.shared_bytes;
    }
  }

  void set_scoreboards(size_t warp, const Control& control, const Instruction& i, Unit unit, double time) {
    const Cause cause{.delay = Delay::latency, .warp = static_cast<int>(warp), .event = warps_[warp].next};
    const auto set = [&](int scoreboard, double until) {
      if (scoreboard < 0) return;
      Release& r = warps_[warp].scoreboards[scoreboard];
      if (until > r.time) r = {until, cause};
    };
    const double work = clocks_of(i, unit);
    set(control.write_barrier, time + latency_of(i, unit) + (unit == Unit::tensor_memory ? work : 0));
    set(control.read_barrier, time + work + l_.uniform);
  }

  // "WARPGROUP.DEPBAR.LE gsb0, 0x1": all but so many groups.
  void wait_for_products(size_t warp, const Instruction& i) {
    SimulatedWarp& w = warps_[warp];
    const size_t left = static_cast<size_t>(std::max(0, i.last().back() - '0'));
    if (w.committed.size() <= left) return;
    w.awaited = w.committed[w.committed.size() - 1 - left];
    w.awaits = {.delay = Delay::products, .warp = static_cast<int>(warp), .event = w.next, .product = w.awaited};
    w.committed.erase(w.committed.begin(), w.committed.end() - static_cast<std::ptrdiff_t>(left));
  }

  bool over() const {
    bool all = true;
    for (size_t w = 0; w < warps_.size(); ++w)
      all &= !computes(run_.warps[w]) || warps_[w].next >= run_.warps[w].events.size();
    return all;
  }

  static constexpr double kDone = 0.8;  // of a warp's events: those who wait for warps that ended are no deadlock

  const std::vector<Instruction>& code_;
  std::vector<Unit> units_;  // of each instruction
  const Rates& rates_;
  const Latencies& l_;
  Simulation run_;
  std::vector<SimulatedWarp> warps_;
  Scheduler schedulers_[2 * kSchedulers];
  Multiprocessor multiprocessors_[2];
  std::map<uint32_t, Barrier> barriers_;
  std::map<uint32_t, double> latest_;  // arrival at each barrier
  std::map<int, NamedBarrier> named_;
};

}  // namespace

double Simulation::time_of_turn(size_t warp, size_t turn) const {
  const size_t event = warps[warp].turns[turn];
  return event < issues[warp].size() ? issues[warp][event].time : -1;
}

Simulation simulate(const Kernel& kernel, std::vector<WarpTrace> warps, const Rates& rates, const Latencies& latencies,
                    double apart) {
  return Machine(kernel, std::move(warps), rates, latencies, apart).go();
}

}  // namespace tandem::machine_code
