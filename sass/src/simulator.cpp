#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "sass/src/clocks.h"
#include "sass/src/simulated_barriers.h"

namespace tandem::machine_code {
namespace {

constexpr int kSchedulers = 4;
constexpr size_t kQueue = 8;  // products in issue order that can wait for a tensor core

class Machine {
 public:
  Machine(const Kernel& kernel, std::vector<WarpTrace> traces, const Rates& rates, const Latencies& latencies,
          double offset)
      : code_(kernel.code),
        rates_(rates),
        l_(latencies),
        run_(std::move(traces)),
        warps_(run_.warps.size()),
        barriers_(code_, l_, run_, warps_) {
    run_.issues.resize(run_.warps.size());
    for (const Instruction& i : code_) units_.push_back(unit_of(i));
    int before[2 * kSchedulers] = {};
    for (size_t w = 0; w < warps_.size(); ++w) {
      if (computes(run_.warps[w])) warps_[w].late = offset * before[scheduler_of(w)]++;
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
      } else if (!barriers_.assume_arrival(time)) {
        break;
      }
    }
    return std::move(run_);
  }

 private:
  struct TensorCore {
    double free = 0;  // end of its last product
    int last_product = -1;
  };
  struct Scheduler {
    double units[kUnits] = {};  // time at which each unit is free
    TensorCore tensor;          // if sums are in registers
    std::vector<int> queue;     // its products so far, in issue order
    double spare = 0;           // register reads that products have left unused
    double counted_at = 0;      // time up to which unused reads are counted
  };
  struct Multiprocessor {
    double shared = 0;    // reads and writes of warps
    double operands = 0;  // also reads of products and writes of copies
    double copies = 0;
    double bulk = 0, dsmem = 0;  // ways to global memory and to the other block
    TensorCore tensor;           // if sums are in tensor memory
  };
  struct ProductCost {
    double may_start = 0;  // earliest time at which its operands are available
    double clocks = 0, bytes = 0, flops = 0;
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

  // ---- Products and copies ----

  int add_product(size_t warp, double time, const ProductCost& cost, int multiprocessor, TensorCore* core) {
    Product p{.warp = static_cast<int>(warp),
              .event = warps_[warp].next,
              .multiprocessor = multiprocessor,
              .issue = time,
              .flops = cost.flops,
              .before = core->last_product};
    double& operands = multiprocessors_[multiprocessor].operands;
    p.start = std::max(cost.may_start, core->free);
    operands = std::max(operands, time) + cost.bytes / rates_.shared_bytes;
    p.finish = std::max(p.start + cost.clocks, operands);
    core->free = p.finish;
    run_.products.push_back(p);
    return core->last_product = static_cast<int>(run_.products.size()) - 1;
  }

  // Clocks from a product until its warp issues the next product (bench/limits/order.py).
  static double issue_clocks(double columns) { return (columns - 32) / 8; }

  // A warp's quarter of a warpgroup's product of 64 rows runs on its scheduler's tensor core.
  void multiply_in_registers(size_t warp, const Instruction& i, double time) {
    constexpr double rows = 64, quarter = 0.25, depth = 32;
    const double columns = columns_of(i);
    const double bytes = depth * (columns + (left_in_shared_memory(i) ? rows : 0)) * quarter;
    Scheduler& s = scheduler(warp);
    SimulatedWarp& w = warps_[warp];
    // The warp waits until the left operand of the first product is read. Later operands are read in the background.
    const bool first = w.last_product < 0 || product(w.last_product).finish <= time;
    const bool reads_left = first && !left_in_shared_memory(i);
    const double ahead = reads_left ? l_.start_from_registers : l_.start_from_shared;
    const ProductCost cost{.may_start = time + ahead,
                           .clocks = columns / rates_.mma_columns,
                           .bytes = bytes,
                           .flops = 2 * rows * columns * depth_of(i) * quarter};
    w.last_product = add_product(warp, time, cost, run_.warps[warp].block, &s.tensor);
    s.queue.push_back(w.last_product);
    w.open.push_back(w.last_product);
    w.ready.time = std::max(w.ready.time, time + (reads_left ? ahead : issue_clocks(columns)));
    if (i.last() != "gsb0") return;
    w.committed.push_back(w.open.back());
    w.open.clear();
  }

  // Returns the index in the queue of the running product, or the size of the queue if no product runs.
  size_t running(const Scheduler& s, double time) {
    size_t k = s.queue.size();
    while (k > 0 && product(s.queue[k - 1]).start > time) --k;
    return k > 0 && product(s.queue[k - 1]).finish > time ? k - 1 : s.queue.size();
  }

  // An instruction and the running product use the same register ports, and the product comes last. If the unused reads
  // do not suffice, the product is delayed.
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
    s.tensor.free = product(s.queue[place]).finish += clocks;
    for (size_t k = place + 1; k < s.queue.size(); ++k) {
      Product& p = product(s.queue[k]);
      const double late = std::max(0.0, s.tensor.free - p.start);
      p.start += late;
      s.tensor.free = p.finish += late;
    }
  }

  void multiply_in_tensor_memory(size_t warp, const Event& e, double time) {
    constexpr double depth = 32, lanes = 128, usual = 128;
    const Instruction& i = at(e);
    const double columns = e.amount == Event::kUnknown ? usual : 8 * (e.amount >> 17 & 63);
    const bool pair = by_a_pair(i);
    // A pair's product of 128 rows has 64 rows in each block. Each half of its columns has separate lanes, so that it
    // takes half of the clocks.
    const bool halves = pair && e.amount != Event::kUnknown && 16 * (e.amount >> 24 & 31) == lanes;
    const double rows = halves ? lanes / 2 : lanes;
    const double bytes = depth * (columns / (pair ? 2 : 1) + (left_in_shared_memory(i) ? rows : 0));
    for (int m = 0; m < (pair ? 2 : 1); ++m) {
      const int where = pair ? m : run_.warps[warp].block;
      const ProductCost cost{.may_start = time,
                             .clocks = rows / lanes * columns / rates_.mma_columns,
                             .bytes = bytes,
                             .flops = 2 * rows * columns * depth_of(i)};
      warps_[warp].last_product = add_product(warp, time, cost, where, &multiprocessors_[where].tensor);
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
      // The measured tail of a burst includes the latency of an arrival, which release() adds.
      time = std::max(time, p.finish + tail - l_.arrival);
    }
    barriers_.arrive(e, warp, time, cause);
  }

  void copy(size_t warp, const Event& e, double time) {
    const std::optional<double> bytes = barriers_.bytes_of_copy(e);
    if (!bytes) return;
    Multiprocessor& sm = multiprocessor(warp);
    if (is_copy_to_block(at(e))) {
      const ChargedWait& cost = l_.charge(Charge::dsmem);
      sm.operands = std::max(sm.operands, time) + *bytes / rates_.shared_bytes;
      sm.dsmem = std::max(sm.dsmem, time) + *bytes / cost.bytes;
      record(warp, Charge::dsmem, sm.dsmem + cost.clocks - time);
      barriers_.arrive(e, warp, sm.dsmem + cost.clocks,
                       {.delay = Delay::copies, .warp = static_cast<int>(warp), .event = warps_[warp].next});
      return;
    }
    sm.copies = std::max(sm.copies, time) + *bytes / l_.copy_bytes;
    sm.operands = std::max(sm.operands, time) + *bytes / rates_.shared_bytes;
    barriers_.arrive(e, warp, sm.copies + l_.copy,
                     {.delay = Delay::copies, .warp = static_cast<int>(warp), .event = warps_[warp].next});
  }

  // ---- Fences, semaphores and results on their way to memory ----

  void record(size_t warp, Charge charge, double clocks) {
    run_.charged.push_back({static_cast<int>(warp), warps_[warp].next, charge, clocks});
  }

  // The warp continues at this time.
  void hold(size_t warp, Charge charge, double time, double until) {
    record(warp, charge, std::max(0.0, until - time));
    Release& ready = warps_[warp].ready;
    if (until > ready.time)
      ready = {until, {.delay = Delay::fences, .warp = static_cast<int>(warp), .event = warps_[warp].next}};
  }

  void store_bulk(size_t warp, const Event& e, double time) {
    constexpr double usual = 8192;
    const double bytes = e.amount == Event::kUnknown ? usual : e.amount;
    const ChargedWait& cost = l_.charge(Charge::bulk);
    Multiprocessor& sm = multiprocessor(warp);
    sm.operands = std::max(sm.operands, time) + bytes / rates_.shared_bytes;
    sm.bulk = std::max(sm.bulk, time) + bytes / cost.bytes;
    SimulatedWarp& w = warps_[warp];
    if (!w.bulk_open) w.bulk_open = BulkGroup{.begin = time, .end = 0};
    w.bulk_open->end = sm.bulk + cost.clocks;
  }

  // "DEPBAR.LE SB0, 0x1": waits until at most that number of groups is incomplete.
  void wait_for_bulk(size_t warp, const Instruction& i, double time) {
    SimulatedWarp& w = warps_[warp];
    const size_t left = std::stoul(i.operands.at(1), nullptr, 16);
    if (w.bulk_groups.size() <= left) return;
    const size_t complete = w.bulk_groups.size() - left;
    double until = time;
    for (size_t k = w.bulk_complete; k < complete; ++k) until = std::max(until, w.bulk_groups[k].end);
    w.wrote |= complete > w.bulk_complete;
    w.bulk_complete = std::max(w.bulk_complete, complete);
    hold(warp, Charge::bulk, time, until);
  }

  // A releasing addition publishes all complete groups.
  void publish(size_t warp, double time) {
    SimulatedWarp& w = warps_[warp];
    if (w.bulk_complete == w.bulk_published) return;
    run_.published.push_back({static_cast<int>(warp), w.bulk_groups[w.bulk_published].begin, time});
    w.bulk_published = w.bulk_complete;
  }

  void order_memory(size_t warp, const Event& e, const Instruction& i, double time) {
    const auto fence = [&](Charge charge) { hold(warp, charge, time, time + l_.charge(charge).clocks); };
    const std::string_view base = i.base();
    if (is_bulk_store(i)) store_bulk(warp, e, time);
    if (base == "UTMACMDFLUSH" && warps_[warp].bulk_open) {
      warps_[warp].bulk_groups.push_back(*warps_[warp].bulk_open);
      warps_[warp].bulk_open.reset();
    }
    if (base == "DEPBAR") wait_for_bulk(warp, i, time);
    if (base == "MEMBAR" && i.has("CTA")) fence(Charge::cta_fence);
    if (base == "MEMBAR" && !i.has("CTA"))
      fence(std::exchange(warps_[warp].wrote, false) ? Charge::gpu_fence : Charge::idle_fence);
    warps_[warp].wrote |= writes_global(i);
    if (base == "FENCE" && i.has("ASYNC") && !i.has("T")) fence(Charge::async_fence);
    if (base == "CCTL" && i.has("IVALL")) fence(Charge::invalidate);
    if (base == "LDG" && i.has("STRONG")) record(warp, Charge::strong_load, l_.charge(Charge::strong_load).clocks);
    if (base.starts_with("RED") && i.has("STRONG")) publish(warp, time);
  }

  // ---- Issue ----

  static bool reads_registers(Unit unit) {
    return unit == Unit::fma || unit == Unit::alu || unit == Unit::conversion || unit == Unit::exponential;
  }

  // Returns the earliest time at which the waits of a warp allow its next event.
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

  // Returns the earliest time at which the unit or queue that the event needs is free.
  Release free_for(size_t warp) {
    const Event& e = event(warp);
    const Instruction& i = at(e);
    const Unit unit = units_[static_cast<size_t>(e.instruction)];
    const Scheduler& s = scheduler(warp);
    Release found{s.units[static_cast<size_t>(unit)], {.delay = Delay::unit}};
    if (unit == Unit::shared_memory) found.time = std::max(found.time, multiprocessor(warp).shared - l_.shared);
    if (unit == Unit::mma && !in_tensor_memory(i) && s.queue.size() >= kQueue) {
      const int first = s.queue[s.queue.size() - kQueue];  // the queue is full until this product starts
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
      case Unit::memory:
        if (i.base() == "LDL") return l_.shared;  // a spilled register, in the L1 cache
        return i.has("STRONG") ? l_.charge(Charge::strong_load).clocks : l_.memory;
      case Unit::uniform: return l_.uniform;
      case Unit::tensor_memory: return i.base() == "STTM" ? l_.tensor_store : l_.tensor_load;
      default: return l_.control;
    }
  }

  // Returns the clocks of the unit's part that belongs to one scheduler.
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
    if (i.base() == "SYNCS" && i.has("PHASECHK")) barriers_.wait(warp, e, time);
    if (arrives(i) && e.barrier != Event::kUnknown) {
      Cause cause = self;
      const bool loads = arrives_after_loads(i);
      cause.delay = loads ? Delay::copies : Delay::barrier;
      const bool remote = static_cast<int>(e.barrier >> kBlockBits) != run_.warps[warp].block;
      barriers_.arrive(e, warp, time + (remote ? l_.remote : loads ? l_.memory : 0), cause);
    }
    if (i.base() == "BAR") barriers_.arrive_named(warp, e, time);
    if (i.base() == "UTCBAR") commit(warp, e, time);
    if (is_copy(i)) copy(warp, e, time);
    if (unit == Unit::mma && in_tensor_memory(i)) multiply_in_tensor_memory(warp, e, time);
    if (unit == Unit::mma && !in_tensor_memory(i)) multiply_in_registers(warp, i, time);
    if (i.base() == "WARPGROUP" && i.has("DEPBAR")) wait_for_products(warp, i);
    order_memory(warp, e, i, time);
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
    busy = (busy > time - 1 ? busy : time) + clocks;  // fractions of a clock count
    // Conversions share the ALU's path.
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

  // "WARPGROUP.DEPBAR.LE gsb0, 0x1": waits until at most that number of groups is pending.
  void wait_for_products(size_t warp, const Instruction& i) {
    SimulatedWarp& w = warps_[warp];
    const size_t left = static_cast<size_t>(std::max(0, i.last().back() - '0'));
    if (w.committed.size() <= left) return;
    w.awaited = w.committed[w.committed.size() - 1 - left];
    w.awaits = {.delay = Delay::products, .warp = static_cast<int>(warp), .event = w.next, .product = w.awaited};
    w.committed.erase(w.committed.begin(), w.committed.end() - static_cast<std::ptrdiff_t>(left));
  }

  bool over() const {
    const auto ended = [&](bool computing) {
      for (size_t w = 0; w < warps_.size(); ++w) {
        if ((!computing || computes(run_.warps[w])) && warps_[w].next < run_.warps[w].events.size()) return false;
      }
      return true;
    };
    return ended(std::ranges::any_of(run_.warps, computes));
  }

  const std::vector<Instruction>& code_;
  std::vector<Unit> units_;  // per instruction
  const Rates& rates_;
  const Latencies& l_;
  Simulation run_;
  std::vector<SimulatedWarp> warps_;
  Scheduler schedulers_[2 * kSchedulers];
  Multiprocessor multiprocessors_[2];
  Barriers barriers_;
};

}  // namespace

double Simulation::time_of_turn(size_t warp, size_t turn) const {
  const size_t event = warps[warp].turns[turn];
  return event < issues[warp].size() ? issues[warp][event].time : -1;
}

Simulation simulate(const Kernel& kernel, std::vector<WarpTrace> warps, const Rates& rates, const Latencies& latencies,
                    double offset) {
  return Machine(kernel, std::move(warps), rates, latencies, offset).go();
}

}  // namespace tandem::machine_code
