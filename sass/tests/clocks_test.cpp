#include "sass/src/clocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "sass/tests/listing.h"

namespace tandem::machine_code {
namespace {

constexpr int kTurns = 12;

// Returns the instructions of one turn. stall: the stall count of each instruction.
Kernel kernel_of_turn(const Lines& lines, int stall) {
  Kernel kernel;
  kernel.code = code_of(lines);
  for (Instruction& i : kernel.code) i.control = Control{.stall = stall};
  return kernel;
}

// Returns a warp that executes instructions [begin, end) in each turn.
WarpTrace warp_of(int warp, Role role, int32_t begin, int32_t end) {
  WarpTrace trace{.role = role, .block = 0, .warp = warp, .events = {}, .turns = {}};
  for (int turn = 0; turn < kTurns; ++turn) {
    trace.turns.push_back(trace.events.size());
    for (int32_t i = begin; i < end; ++i) trace.events.push_back({.instruction = i});
  }
  trace.turns.push_back(trace.events.size());
  return trace;
}

Clocks clocks(const Kernel& kernel, const std::vector<WarpTrace>& warps, const char* arch = "sm_90") {
  return clocks_of(simulate(kernel, warps, *rates_of(arch), *latencies_of(arch)), kernel);
}

double delay(const Clocks& c, Role role, Delay what) {
  for (const RoleClocks& r : c.roles) {
    if (r.role == role) return r.delays[static_cast<size_t>(what)];
  }
  return -1;
}

TEST(MachineCodeClocks, StallCountsOfOneWarp) {
  const Kernel kernel = kernel_of_turn(times(10, {"FADD R1, R1, R1"}), 4);
  const Clocks c = clocks(kernel, {warp_of(4, Role::computing, 0, 10)});
  EXPECT_DOUBLE_EQ(c.step, 40);
  EXPECT_DOUBLE_EQ(delay(c, Role::computing, Delay::order), 40);
  ASSERT_FALSE(c.chain.empty());
  EXPECT_EQ(c.chain[0].what, "computing: issue of FMA");
  EXPECT_DOUBLE_EQ(c.chain[0].clocks, 40);
}

// A scheduler has four lanes of the exponential unit: eight clocks per instruction. Warps 4 and 8 share a scheduler;
// warp 5 uses another.
TEST(MachineCodeClocks, WarpsShareAUnit) {
  const Kernel kernel = kernel_of_turn(times(16, {"MUFU.EX2 R1, R2"}), 1);
  const WarpTrace a = warp_of(4, Role::softmax, 0, 16), b = warp_of(8, Role::softmax, 0, 16),
                  apart = warp_of(5, Role::softmax, 0, 16);
  EXPECT_NEAR(clocks(kernel, {a, apart}).step, 16 * 8, 1);
  EXPECT_NEAR(clocks(kernel, {a, b}).step, 2 * 16 * 8, 1);
}

// A product of 64 x 128 x 16 takes 64 clocks. During the product, other instructions take longer.
TEST(MachineCodeClocks, ProductsAndWhatRunsBeside) {
  Lines lines = times(8, {"HGMMA.64x128x16.F32.BF16 R24, R180, gdesc[UR8], R24, gsb0"});
  lines = lines + Lines{"WARPGROUP.DEPBAR.LE gsb0, 0x0"} + times(100, {"FADD R1, R1, R1"});
  const Kernel kernel = kernel_of_turn(lines, 1);
  const Clocks alone = clocks(kernel, {warp_of(4, Role::computing, 0, 9)});
  const Latencies& l = *latencies_of("sm_90");
  EXPECT_NEAR(alone.step, 8 * 64 + l.start_from_registers + l.products_in_registers, 4);
  EXPECT_NEAR(alone.flops / alone.step, 1024 * 512 / alone.step,
              2);  // a quarter of the tensor core's 4096 FLOP per clock
  const Clocks softmax = clocks(kernel, {warp_of(8, Role::softmax, 9, 109)});
  EXPECT_NEAR(softmax.step, 100, 1);
  WarpTrace products = warp_of(4, Role::mma, 0, 8);
  const Clocks beside = clocks(kernel, {products, warp_of(8, Role::softmax, 9, 109)});
  EXPECT_NEAR(beside.step, 100 * l.fma.warp, 20);
}

// Bursts of eight products on an H200 (bench/limits/order.py). The clocks run from the first issue until a warp sees
// the end of the last product. The cases are one warpgroup alone, and two of which the second starts later.
TEST(MachineCodeClocks, BurstsOfProductsAsMeasured) {
  constexpr int kBurst = 8;
  const auto burst = [](int columns, bool registers) {
    const std::string left = registers ? "R180, gdesc[UR8]" : "gdesc[UR8]";
    return times(kBurst, {"HGMMA.64x" + std::to_string(columns) + "x16.F32.BF16 R24, " + left + ", R24, gsb0"}) +
           Lines{"WARPGROUP.DEPBAR.LE gsb0, 0x0"};
  };
  constexpr struct {
    int columns;
    bool registers;
    double clocks;
  } alone[] = {{64, false, 369 - 58}, {64, true, 410 - 59},   {96, false, 497 - 58},
               {96, true, 534 - 59},  {128, false, 616 - 49}, {128, true, 656 - 49}};
  for (const auto& [columns, registers, measured] : alone) {
    const Kernel kernel = kernel_of_turn(burst(columns, registers), 1);
    EXPECT_NEAR(clocks(kernel, {warp_of(4, Role::computing, 0, kBurst + 1)}).step, measured, 8) << columns;
  }
  // A warpgroup that starts at once shares the tensor core product by product. After 150 clocks all products of the
  // first warpgroup are in the queue.
  constexpr struct {
    int later;  // clocks
    double first, second;
  } shared[] = {{0, 1138, 1058}, {150, 623, 1149}};
  for (const auto& [later, first, second] : shared) {
    const Lines products = burst(128, false);
    const Kernel kernel = kernel_of_turn(times(later, {"NOP"}) + products, 1);
    const int32_t end = later + kBurst + 1;
    const auto r = simulate(kernel, {warp_of(4, Role::computing, later, end), warp_of(8, Role::computing, 0, end)},
                            *rates_of("sm_90"), *latencies_of("sm_90"));
    double ends[2] = {};
    int seen[2] = {};
    for (const Product& p : r.products) {
      if (seen[p.warp]++ < kBurst) ends[p.warp] = p.finish + latencies_of("sm_90")->products_in_registers;
    }
    constexpr double begin = 45;  // measured clock of the first issue
    const double measured[2] = {std::min(first, second) - begin, std::max(first, second) - begin};
    EXPECT_NEAR(std::min(ends[0], ends[1]), measured[0], 0.05 * measured[0]) << later;
    EXPECT_NEAR(std::max(ends[0], ends[1]), measured[1], 0.05 * measured[1]) << later;
  }
}

// Two warps of a scheduler next to products of 64 x 128 x 16 on an H200 (bench/limits/order.py). The figures are clocks
// of an instruction and of a product.
TEST(MachineCodeClocks, WhatRunsBesideProductsAsMeasured) {
  const std::string shared = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
                    registers = "HGMMA.64x128x16.F32.BF16 R24, R180, gdesc[UR8], R24, gsb0";
  const Lines score{"FFMA R4, R5, R6, R7", "MUFU.EX2 R8, R4", "FMNMX R9, R5, R6, !PT", "FADD R10, R11, R12"};
  struct Case {
    const std::string& product;
    Lines lines;
    double each, of_product;
  };
  for (const Case& c : {Case{shared, {"MUFU.EX2 R4, R5"}, 10.7, 64.8}, Case{registers, {"MUFU.EX2 R4, R5"}, 11.3, 64.4},
                        Case{shared, {"FMNMX R4, R5, R6, !PT"}, 4.2, 64.4}, Case{shared, score, 11.8, 64.2},
                        Case{registers, score, 11.2, 76.6}}) {
    constexpr int kRepeated = 16;
    const int begin = 16, end = begin + kRepeated * static_cast<int>(c.lines.size());
    const Kernel kernel = kernel_of_turn(times(begin, {c.product}) + times(kRepeated, c.lines), 1);
    const auto r = simulate(kernel,
                            {warp_of(4, Role::mma, 0, begin), warp_of(8, Role::computing, begin, end),
                             warp_of(12, Role::computing, begin, end)},
                            *rates_of("sm_90"), *latencies_of("sm_90"));
    const double from = r.time_of_turn(1, 2), until = r.time_of_turn(1, kTurns - 1);
    const auto products =
        std::ranges::count_if(r.products, [&](const Product& p) { return p.finish > from && p.finish <= until; });
    EXPECT_NEAR((until - from) / (2 * kRepeated * (kTurns - 3)), c.each, 0.16 * c.each) << c.product << c.lines.back();
    EXPECT_NEAR((until - from) / static_cast<double>(products), c.of_product, 0.16 * c.of_product)
        << c.product << c.lines.back();
  }
}

// FMA-unit instructions have priority: a stream of them delays products, so that 64 x 128 x 16 takes 148 clocks.
TEST(MachineCodeClocks, AStreamOfAdditionsHoldsUpProducts) {
  const Kernel kernel = kernel_of_turn(times(8, {"HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"}) +
                                           Lines{"WARPGROUP.DEPBAR.LE gsb0, 0x0"} + times(100, {"FADD R4, R5, R6"}),
                                       1);
  const WarpTrace products = warp_of(4, Role::computing, 0, 9);
  WarpTrace a = warp_of(8, Role::mma, 9, 109), b = warp_of(12, Role::mma, 9, 109), c = warp_of(16, Role::mma, 9, 109);
  for (WarpTrace* w : {&a, &b, &c}) {
    for (int turn = 0; turn < 8 * kTurns; ++turn)
      w->events.insert(w->events.end(), w->events.begin(), w->events.begin() + 100);
  }
  const double alone = clocks(kernel, {products}).step, beside = clocks(kernel, {products, a, b, c}).step;
  EXPECT_GT(beside, 8 * 100.0);
  EXPECT_LT(alone, 8 * 75.0);
}

// Warps that share a scheduler begin their second turn at an offset. Later turns are equal.
TEST(MachineCodeClocks, WarpsThatBeginApart) {
  const Kernel kernel = kernel_of_turn(times(10, {"FADD R1, R1, R1"}), 4);
  const std::vector<WarpTrace> warps{warp_of(4, Role::computing, 0, 10), warp_of(8, Role::computing, 0, 10),
                                     warp_of(5, Role::computing, 0, 10)};
  const auto r = simulate(kernel, warps, *rates_of("sm_90"), *latencies_of("sm_90"), 300);
  EXPECT_NEAR(r.time_of_turn(0, 1), r.time_of_turn(1, 1), 4);
  for (const size_t turn : {size_t{2}, size_t{kTurns - 1}}) {
    EXPECT_NEAR(r.time_of_turn(1, turn) - r.time_of_turn(0, turn), 300, 4);
    EXPECT_NEAR(r.time_of_turn(2, turn), r.time_of_turn(0, turn), 4);
  }
}

// A warp whose products find the queue full must wait: eight are queued, and one runs.
TEST(MachineCodeClocks, AQueueOfProducts) {
  const Kernel kernel = kernel_of_turn(times(16, {"HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"}), 1);
  const auto r = simulate(kernel, {warp_of(4, Role::computing, 0, 16)}, *rates_of("sm_90"), *latencies_of("sm_90"));
  for (size_t k = 0; k < 16; ++k) {
    const double room = k < 8 ? 0 : r.products[k - 8].start;
    EXPECT_NEAR(r.products[k].issue, std::max(12.0 * static_cast<double>(k), room), 1) << k;
  }
  EXPECT_NEAR(r.products[15].issue, r.products[0].start + 7 * 64, 1);
}

// Each block of a pair has 128 of 256 rows, or 64 of 128 rows. With 128 rows its tensor core takes half as long and
// reads half of the rows.
TEST(MachineCodeClocks, APairsProductOf128Rows) {
  const Kernel kernel =
      kernel_of_turn(times(8, {"UTCHMMA.2CTA gdesc[UR6], gdesc[UR4], tmem[UR8], tmem[UR10], idesc[UR11], !UPT"}), 1);
  const auto first_of = [&](uint32_t rows) {
    WarpTrace products = warp_of(4, Role::softmax, 0, 8);
    constexpr uint32_t columns = 128;
    for (Event& e : products.events) e.amount = rows / 16 << 24 | columns / 8 << 17;
    return simulate(kernel, {products}, *rates_of("sm_100"), *latencies_of("sm_100")).products.front();
  };
  const Product whole = first_of(256), half = first_of(128);
  EXPECT_DOUBLE_EQ(whole.finish - whole.start, 64);
  EXPECT_DOUBLE_EQ(half.finish - half.start, 32);
  EXPECT_DOUBLE_EQ(half.flops, whole.flops / 2);
}

// Lets a load and its reader alternate over one slot. The events `filling` of a turn of the load arrive at the full
// barrier, the first of them with bytes. The reader waits for the full barrier, then arrives at the empty one.
void share_slot(WarpTrace* load, const std::vector<size_t>& filling, uint32_t bytes, WarpTrace* reader) {
  constexpr uint32_t full = 0x400, empty = 0x408, odd = 1u << 31;
  for (uint32_t turn = 0; turn < kTurns; ++turn) {
    Event* of_load = &load->events[load->turns[turn]];
    Event* of_reader = &reader->events[reader->turns[turn]];
    of_load[0].barrier = of_reader[1].barrier = empty;
    of_reader[0].barrier = full;
    for (const size_t event : filling) of_load[event].barrier = full;
    of_load[0].amount = turn % 2 == 0 ? odd : 0;
    of_load[filling[0]].amount = bytes;
    of_reader[0].amount = turn % 2 == 0 ? 0 : odd;
    of_reader[1].amount = 0;
  }
}

// A ring of one slot: a copy of 6400 bytes, then an arrival when the slot is consumed, repeatedly.
TEST(MachineCodeClocks, CopiesAndBarriers) {
  Kernel kernel =
      kernel_of_turn({"SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x8], R2", "SYNCS.ARRIVE.TRANS64 RZ, [UR4], R3",
                      "UTMALDG.2D [UR8], [UR10]", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",
                      "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ"},
                     1);
  kernel.code[0].control->write_barrier = kernel.code[3].control->write_barrier = 0;
  kernel.code[1].control->waits = kernel.code[4].control->waits = 1;
  WarpTrace load = warp_of(0, Role::load, 0, 3), computing = warp_of(4, Role::computing, 3, 5);
  constexpr uint32_t bytes = 6400;
  share_slot(&load, {1, 2}, bytes, &computing);
  const Latencies& l = *latencies_of("sm_90");
  const auto made = simulate(kernel, {load, computing}, *rates_of("sm_90"), l);
  EXPECT_EQ(made.assumed, 0);
  const Clocks c = clocks_of(made, kernel);
  EXPECT_NEAR(c.step, l.copy + bytes / l.copy_bytes + 2 * l.arrival, 8);
  EXPECT_EQ(c.chain[0].what, "computing: copies");
}

// The same with cp.async, which arrives after its loads.
TEST(MachineCodeClocks, ArrivalsAfterLoads) {
  Kernel kernel = kernel_of_turn({"SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x8], R2", "LDGSTS.E [R11], [R6.64]",
                                  "ARRIVES.LDGSTSBAR.64.ARVCNT [UR4]", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",
                                  "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ"},
                                 1);
  kernel.code[0].control->write_barrier = kernel.code[3].control->write_barrier = 0;
  kernel.code[1].control->waits = kernel.code[4].control->waits = 1;
  WarpTrace load = warp_of(0, Role::load, 0, 3), softmax = warp_of(4, Role::softmax, 3, 5);
  share_slot(&load, {2}, Event::kUnknown, &softmax);
  const Latencies& l = *latencies_of("sm_100");
  const auto made = simulate(kernel, {load, softmax}, *rates_of("sm_100"), l);
  EXPECT_EQ(made.assumed + made.unanswered, 0);
  const Clocks c = clocks_of(made, kernel);
  EXPECT_NEAR(c.step, l.memory + 2 * l.arrival, 8);
  EXPECT_EQ(c.chain[0].what, "softmax: copies");
}

// The L1 cache has spilled registers.
TEST(MachineCodeClocks, SpilledRegisters) {
  Kernel kernel = kernel_of_turn({"LDL R4, [R1]", "FADD R4, R4, R4"}, 1);
  kernel.code[0].control->write_barrier = 0;
  kernel.code[1].control->waits = 1;
  const Clocks c = clocks(kernel, {warp_of(4, Role::softmax, 0, 2)});
  EXPECT_NEAR(c.step, latencies_of("sm_90")->shared, 3);
}

// Copies write 128 bytes per clock to shared memory, and a product that reads shared memory waits for them.
TEST(MachineCodeClocks, CopiesTakeSharedMemoryFromProducts) {
  const Kernel kernel = kernel_of_turn({"SYNCS.ARRIVE.TRANS64 RZ, [UR4], R3", "UTMALDG.2D [UR8], [UR10]",
                                        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"},
                                       1);
  const auto product_beside = [&](uint32_t bytes) {
    WarpTrace warp = warp_of(4, Role::computing, 0, 3);
    for (size_t turn = 0; turn < kTurns; ++turn) {
      Event* events = &warp.events[warp.turns[turn]];
      events[0].barrier = events[1].barrier = 0x400;
      events[0].amount = bytes;
    }
    const auto r = simulate(kernel, {warp}, *rates_of("sm_90"), *latencies_of("sm_90"));
    return r.products.front().finish - r.products.front().issue;
  };
  const double own = (64 + 64) * 16 * 2 / 4;  // bytes that a warp's quarter reads
  EXPECT_NEAR(product_beside(128), latencies_of("sm_90")->start_from_shared + 32, 1);
  EXPECT_NEAR(product_beside(25600), (25600 + own) / 128, 2);
}

// Sequences of one thread with the stall counts of tools/gpu/day_one/kernels/charges.cuh, all SMs active. The first
// five determined the charges. The last two are dQ's way to memory, which did not determine clocks.
TEST(MachineCodeClocks, AdditionsAndFencesAsMeasured) {
  struct Timed {
    std::string line;
    int stall;
  };
  using Sequence = std::vector<Timed>;
  const auto joined = [](std::initializer_list<Sequence> parts) {
    Sequence all;
    for (const Sequence& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  const Sequence add = {{"NOP", 14}, {"UBLKRED.G.S.ADD.F32.RN [UR8], [UR5], UR10", 30}, {"UTMACMDFLUSH", 7}},
                 complete = {{"DEPBAR.LE SB0, 0x0", 4}, {"CCTL.IVALL", 8}}, oldest = {{"DEPBAR.LE SB0, 0x1", 4}},
                 load = {{"LDG.E.STRONG.GPU R3, desc[UR6][R8.64]", 1}}, proxies = {{"FENCE.VIEW.ASYNC.G", 2}},
                 fence = {{"MEMBAR.ALL.GPU", 6}, {"CGAERRBAR", 6}}, invalidate = {{"CCTL.IVALL", 1}},
                 add_one = {{"REDG.E.ADD.S32.STRONG.GPU desc[UR6][R4.64], R27", 1}}, rest = {{"NOP", 50}};
  const auto end = [](int stall) { return Sequence{{"NOP", stall}}; };
  const Sequence part = joined({add, rest});
  const struct {
    const char* name;
    Sequence turn;
    uint32_t bytes;
    double measured, allowed;
  } all[] = {
      {"addition", joined({add, complete, end(5)}), 16384, 1144, 0.01},
      {"fence", joined({end(6), fence, invalidate, end(5)}), 0, 306, 0.01},
      {"release", joined({end(1), fence, add_one, end(18)}), 0, 573, 0.01},
      {"invalidation", joined({invalidate, end(24)}), 0, 30, 0.05},
      {"load", joined({load, invalidate, end(1)}), 0, 487, 0.03},
      {"release first",
       joined({complete, proxies, fence, add_one, end(19), part, part, oldest, part, oldest, part, oldest}), 8192, 2727,
       0.03},
      {"release during additions",
       joined({complete, proxies, end(17), part, add, load, fence, invalidate, add_one, end(35), oldest, part, oldest,
               part}),
       8192, 2187, 0.03},
  };
  for (const auto& [name, turn, bytes, measured, allowed] : all) {
    SCOPED_TRACE(name);
    Lines lines;
    for (const Timed& timed : turn) lines.push_back(timed.line);
    Kernel kernel = kernel_of_turn(lines, 1);
    for (size_t k = 0; k < turn.size(); ++k) {
      Instruction& i = kernel.code[k];
      i.control->stall = turn[k].stall;
      if (i.base() == "LDG") i.control->write_barrier = 1;
      if (i.base() == "CCTL") i.control->waits = 2;
    }
    WarpTrace warp = warp_of(0, Role::computing, 0, static_cast<int32_t>(turn.size()));
    for (Event& e : warp.events) e.amount = bytes;
    EXPECT_NEAR(clocks(kernel, {warp}).step, measured, allowed * measured);
  }
}

// A warp adds 8 KB and releases a semaphore after the additions are complete. Another warp does not delay it.
TEST(MachineCodeClocks, TheWayOfDq) {
  const Kernel kernel =
      kernel_of_turn(Lines{"UBLKRED.G.S.ADD.F32.RN [UR8], [UR5], UR10", "UTMACMDFLUSH", "DEPBAR.LE SB0, 0x0",
                           "MEMBAR.ALL.GPU", "REDG.E.ADD.S32.STRONG.GPU desc[UR6][R4.64], R27", "NOP"} +
                         times(4000, {"FADD R1, R1, R1"}),
                     1);
  WarpTrace adds = warp_of(0, Role::reduction, 0, 6), computes = warp_of(4, Role::softmax, 6, 4006);
  for (Event& e : adds.events) e.amount = 8192;
  const Latencies& l = *latencies_of("sm_100");
  const auto path = dq_path_of(kernel, {adds, computes}, *rates_of("sm_100"), l);
  ASSERT_TRUE(path.has_value());
  const ChargedWait& bulk = l.charge(Charge::bulk);
  const double expected = bulk.clocks + 8192 / bulk.bytes + l.charge(Charge::gpu_fence).clocks;
  EXPECT_NEAR(path->hand_over, expected, 8);
  EXPECT_NEAR(path->step, expected, 10);
  EXPECT_NEAR(dq_path_of(kernel, {adds}, *rates_of("sm_100"), l.with(Charge::gpu_fence, 2))->step,
              expected + l.charge(Charge::gpu_fence).clocks, 10);
  EXPECT_FALSE(dq_path_of(kernel, {computes}, *rates_of("sm_100"), l));
}

// A copy to the other block of a pair has its own latency and rate.
TEST(MachineCodeClocks, CopiesToTheOtherBlock) {
  Kernel kernel = kernel_of_turn({"SYNCS.ARRIVE.TRANS64 RZ, [UR4], R3", "UBLKCP.S.S [UR8], [UR10], UR5",
                                  "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2"},
                                 1);
  kernel.code[2].control->write_barrier = 0;
  kernel.code[0].control->waits = 1;
  WarpTrace warp = warp_of(0, Role::computing, 0, 3);
  constexpr uint32_t barrier = 0x400, bytes = 16384, odd = 1u << 31;
  for (uint32_t turn = 0; turn < kTurns; ++turn) {
    Event* events = &warp.events[warp.turns[turn]];
    for (int k = 0; k < 3; ++k) events[k].barrier = barrier;
    events[0].amount = events[1].amount = bytes;
    events[2].amount = turn % 2 == 0 ? 0 : odd;
  }
  const Clocks c = clocks(kernel, {warp});
  EXPECT_NEAR(c.step, 1079, 0.05 * 1079);  // measured on an H200
  ASSERT_EQ(c.charges.size(), 1u);
  EXPECT_EQ(c.charges[0].charge, Charge::dsmem);
  EXPECT_NEAR(c.charges[0].times, 1, 0.01);
}

// A wait at a barrier where no warp arrives gives no verdict.
TEST(MachineCodeClocks, UnansweredWaitsAreCounted) {
  const Kernel kernel = kernel_of_turn({"SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", "FADD R1, R1, R1"}, 2);
  WarpTrace warp = warp_of(4, Role::computing, 0, 2);
  for (Event& e : warp.events) {
    if (e.instruction == 0) e.barrier = 0x400, e.amount = 0;
  }
  EXPECT_GT(simulate(kernel, {warp}, *rates_of("sm_90"), *latencies_of("sm_90")).unanswered, 5);
}

// No warp arrives. The model releases the waiting warps and counts the assumed arrivals.
TEST(MachineCodeClocks, ArrivalsThatNobodyMakesAreCounted) {
  const Kernel kernel = kernel_of_turn({"BAR.SYNC 0x1, 0x40", "FADD R1, R1, R1"}, 2);
  WarpTrace warp = warp_of(4, Role::computing, 0, 2);
  for (Event& e : warp.events) {
    if (e.instruction == 0) e.barrier = 1, e.amount = 64;
  }
  EXPECT_GT(simulate(kernel, {warp}, *rates_of("sm_90"), *latencies_of("sm_90")).assumed, 5);
}

}  // namespace
}  // namespace tandem::machine_code
