#include "sass/src/cost_model.h"

#include <gtest/gtest.h>

#include "sass/tests/listing.h"

namespace tandem::machine_code {
namespace {

std::string attributes(unsigned threads) {
  char text[256];
  std::snprintf(text, sizeof text,
                "\t.section\t.nv.info.forward,\"\",@\"SHT_CUDA_INFO\"\n\t//----- nvinfo : EIATTR_REQNTID\n"
                "        /*0000*/ \t.word\t0x%08x\n        /*0004*/ \t.word\t0x00000001\n"
                "        /*0008*/ \t.word\t0x00000001\n",
                threads);
  return text;
}

CostModel account_of(const std::string& arch, unsigned threads, const Lines& lines, const Shape& known = {},
                     bool whole = false) {
  Cubin cubin;
  Status status = parse("\t.target\t" + arch + "\n" + attributes(threads) + code_section("forward", lines), &cubin);
  CostModel result;
  if (status.ok()) status = cost_model(cubin, known, whole, &result);
  EXPECT_TRUE(status.ok()) << status.message;
  return result;
}

// A wait whose second test is out of line, at label + "_poll".
Lines wait(const std::string& label) {
  return {"SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5", "@!P0 BRA `(" + label + "_poll)", label + ":"};
}
Lines poll(const std::string& label) {
  return {label + "_poll:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5", "@!P0 BRA `(" + label + "_poll)",
          "BRA `(" + label + ")"};
}

// Exponentials of the 64 scores of a thread.
const Lines kSoftmax =
    times(64, {"FFMA R4, R4, R2, R3", "MUFU.EX2 R4, R4"}) + times(32, {"F2FP.BF16.F32.PACK_AB R4, R4, R5"});
const Lines kMask = times(64, {"FSEL R4, R4, -INF , P1"});

// Resembles Hopper kernels: 64 x 128 scores per turn, head_dim 128.
Lines hopper_step(const std::string& label, const Lines& more) {
  return Lines{label + ":"} + wait(label + "_keys") + Lines{"HGMMA.64x128x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT"} +
         times(7, {"HGMMA.64x128x16.F32.BF16 R88, gdesc[UR8], R88"}) +
         times(8, {"HGMMA.64x128x16.F32.BF16 R24, R180, gdesc[UR8].tnspB, R24"}) + more + kSoftmax +
         Lines{"VOTE.ANY P2, P2", "@!P2 BRA `(" + label + "_on)"} + times(16, {"FMUL R24, R24, R2"}) +
         Lines{label + "_on:", "BRA.U UP1, `(" + label + ")"};
}
constexpr int kHopperStep = 2 + 16 + 160 + 2 + 1;

const Lines kHopper = Lines{"@P3 BRA `(.L_load)", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0", ".L_tile:", "NOP"} +
                      hopper_step(".L_masked", kMask) + hopper_step(".L_plain", {}) +
                      Lines{"UTMASTG.4D [UR8], [UR4]", "@P1 BRA `(.L_tile)", "EXIT"} + poll(".L_masked_keys") +
                      poll(".L_plain_keys") + Lines{".L_load:", "USETMAXREG.DEALLOC.CTAPOOL 0x18", ".L_next:"} +
                      wait(".L_k") + Lines{"UTMALDG.4D [UR8], [UR4]"} + wait(".L_v") +
                      Lines{"UTMALDG.4D [UR8], [UR4]", "@P1 BRA `(.L_next)", "EXIT"} + poll(".L_k") + poll(".L_v");

TEST(MachineCodeAccount, ComputingWarpgroups) {
  const CostModel a = account_of("sm_90a", 384, kHopper);
  EXPECT_EQ(a.shape.head_dim, 128);
  EXPECT_EQ(a.shape.head_dim_v, 128);
  EXPECT_EQ(a.shape.rows, 128);
  EXPECT_EQ(a.shape.keys, 128);
  EXPECT_FALSE(a.backward);
  EXPECT_FALSE(a.pair);
  EXPECT_TRUE(a.unknown.empty());

  const LoopCost *plain = a.steady_softmax(false), *masked = a.steady_softmax(true),
                 *load = a.steady(Role::load, false);
  ASSERT_TRUE(plain != nullptr && masked != nullptr && load != nullptr);
  EXPECT_EQ(plain->role, Role::computing);
  EXPECT_EQ(plain->registers, 240);
  EXPECT_EQ(plain->instructions, kHopperStep);
  EXPECT_EQ(plain->left_out, 16 + 3);
  EXPECT_EQ(plain->per_tile(), 8);
  EXPECT_EQ(masked->instructions, kHopperStep + 64);
  EXPECT_EQ(load->registers, 24);
  EXPECT_EQ(load->instructions, 7);
  EXPECT_EQ(load->per_tile(), 1);

  const TileCost& tile = *a.plain;
  const auto clocks = [&](Unit unit) { return tile.clocks[static_cast<size_t>(unit)]; };
  EXPECT_EQ(clocks(Unit::mma), 2.0 * 128 * 128 * 256 / 4096);
  EXPECT_EQ(clocks(Unit::exponential), 128 * 128 / 16);
  EXPECT_EQ(clocks(Unit::fma), 128 * 128 / 128);
  EXPECT_EQ(clocks(Unit::alu), 128 * 128 / 2 / 64);
  // The copies write keys and values, and two warpgroups read keys, values and queries.
  EXPECT_EQ(clocks(Unit::shared_memory), (2 * 128 * 256 + 2 * 64 * 128 + 128 * 256) * 2 / 128);
  EXPECT_EQ(clocks(Unit::tensor_memory), 0);
  EXPECT_EQ(tile.issued, 8 * kHopperStep + 7);
  EXPECT_EQ(tile.issue_clocks, tile.issued / 4);
  EXPECT_EQ(tile.binds, "MMA");
  EXPECT_EQ(a.masked->clocks[static_cast<size_t>(Unit::alu)], clocks(Unit::alu) + 128.0 * 128 / 64);
}

TEST(MachineCodeAccount, AroundTheLoops) {
  const CostModel a = account_of("sm_90a", 384, kHopper);
  const auto around = std::find_if(a.loops.begin(), a.loops.end(), [](const LoopCost& loop) { return loop.once; });
  ASSERT_NE(around, a.loops.end());
  EXPECT_EQ(around->instructions, 3);
  EXPECT_EQ(around->per_tile(), 0);
}

TEST(MachineCodeAccount, EverythingCountsWhenAskedTo) {
  const CostModel a = account_of("sm_90a", 384, kHopper, {}, true);
  EXPECT_EQ(a.steady_softmax(false)->instructions, kHopperStep + 16 + 3);
  EXPECT_EQ(a.steady_softmax(false)->left_out, 0);
}

TEST(MachineCodeAccount, KnownShapesAreTaken) {
  // Softcap needs additional exponentials, and q may be in registers.
  const CostModel a =
      account_of("sm_90a", 512, kHopper, {.head_dim = 128, .head_dim_v = 128, .rows = 192, .keys = 128});
  EXPECT_EQ(a.shape.rows, 192);
  EXPECT_EQ(a.steady_softmax(false)->per_tile(), 8);
  EXPECT_DOUBLE_EQ(a.steady(Role::load, false)->per_tile(), 128.0 / 192);
}

TEST(MachineCodeAccount, LoadWaitsOfAStepMayBeKnown) {
  const Shape known{.head_dim = 128, .head_dim_v = 128, .rows = 128, .keys = 128, .load_waits = 1};
  EXPECT_EQ(account_of("sm_90a", 384, kHopper, known).steady(Role::load, false)->per_tile(), 0.5);
}

// The unmasked path through the masked loop is shorter here, but it is not the steady state.
TEST(MachineCodeAccount, LoopsWithoutMasksStandForTheUnmasked) {
  Lines mask = Lines{"@P4 BRA `(.L_unmasked)"} + kMask + Lines{".L_unmasked:"};
  const Lines loops = Lines{"@P3 BRA `(.L_out)"} + hopper_step(".L_both", mask) +
                      hopper_step(".L_pure", times(9, {"FADD R1, R1, R2"})) + Lines{".L_out:", "EXIT"} +
                      poll(".L_both_keys") + poll(".L_pure_keys");
  const CostModel a = account_of("sm_90a", 384, loops);
  ASSERT_EQ(a.loops.size(), 3u);
  EXPECT_EQ(a.loops[0].instructions, kHopperStep + 1);
  EXPECT_TRUE(a.loops[0].choice && a.loops[1].choice && !a.loops[2].choice);
  EXPECT_EQ(a.steady_softmax(false)->instructions, kHopperStep + 9);
  EXPECT_EQ(a.steady_softmax(true)->instructions, kHopperStep + 1 + 64);
}

// Resembles Blackwell kernels: two tiles of 128 x 128 scores per turn, head_dim 64, by one block or a pair of blocks.
Lines blackwell(const std::string& pair, const std::string& columns) {
  const std::string product = "UTCHMMA" + pair;
  const std::string rest = ", tmem[UR8], tmem[UR10], idesc[UR11], ";
  const Lines products = Lines{product + " gdesc[UR6], gdesc[UR4]" + rest + "!UPT"} +
                         times(3, {product + " gdesc[UR6], gdesc[UR4]" + rest + "UPT"}) +
                         times(8, {product + " tmem[UR6], gdesc[UR4]" + rest + "UPT"});
  const Lines exponentials = times(96, {"MUFU.EX2 R4, R4"}) +
                             times(8, {"FADD2.RM R4, R4, R6", "FFMA2.FTZ.RM R4, R4, R6, R8"}) +
                             times(64, {"F2FP.BF16.F32.PACK_AB R4, R4, R5"});
  const auto correct = [](const std::string& label) {
    return Lines{"VOTE.ANY P0, P0", "@!P0 BRA `(" + label + ")"} +
           times(4, {"LDTM.x16 R4, tmem[UR4]", "STTM.x16 tmem[UR4], R4"}) + Lines{label + ":"};
  };
  return Lines{"@P1 BRA `(.L_mma)", "@P2 BRA `(.L_load)", "@P3 BRA `(.L_correction)",
               "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xb8", ".L_softmax:"} +
         wait(".L_s") + times(4, {"LDTM.x32 R4, tmem[UR4]"}) + exponentials + times(4, {"STTM.x16 tmem[UR4], R4"}) +
         Lines{"BRA.U UP1, `(.L_softmax)", "EXIT"} + poll(".L_s") +
         Lines{".L_mma:",
               "USETMAXREG.DEALLOC.CTAPOOL 0x40",
               "UMOV UR4, " + columns,
               "MOV R4, R5",
               "UTCATOMSWS" + pair + ".FIND_AND_SET.ALIGN UP0, UR4, UR4",
               ".L_next_mma:"} +
         wait(".L_p") + times(2, products) + Lines{"BRA.U UP1, `(.L_next_mma)", "EXIT"} + poll(".L_p") +
         Lines{".L_load:"} + wait(".L_k") + Lines{"UTMALDG.4D [UR8], [UR4]"} + wait(".L_v") +
         Lines{"UTMALDG.4D [UR8], [UR4]", "BRA.U UP1, `(.L_load)", "EXIT"} + poll(".L_k") + poll(".L_v") +
         Lines{".L_correction:", "BAR.SYNC.DEFER_BLOCKING R5, 0x40"} + correct(".L_one") + correct(".L_two") +
         Lines{"BRA.U UP1, `(.L_correction)", "EXIT"};
}

TEST(MachineCodeAccount, RolesOfTheirOwn) {
  const CostModel a = account_of("sm_100a", 512, blackwell("", "0x10"));
  EXPECT_EQ(a.shape.head_dim, 64);
  EXPECT_EQ(a.shape.head_dim_v, 64);
  EXPECT_EQ(a.shape.rows, 256);
  EXPECT_EQ(a.shape.keys, 128);
  EXPECT_EQ(a.tensor_columns, 512);
  const LoopCost *softmax = a.steady_softmax(false), *mma = a.steady(Role::mma, false),
                 *load = a.steady(Role::load, false), *correction = a.steady(Role::correction, false);
  ASSERT_TRUE(softmax != nullptr && mma != nullptr && load != nullptr && correction != nullptr);
  EXPECT_EQ(softmax->role, Role::softmax);
  EXPECT_EQ(softmax->registers, 184);
  EXPECT_EQ(softmax->work.scores(), 128);
  EXPECT_EQ(softmax->per_tile(), 4);
  EXPECT_EQ(mma->registers, 64);
  EXPECT_EQ(mma->per_tile(), 0.5);
  EXPECT_EQ(load->per_tile(), 0.5);
  EXPECT_EQ(correction->per_tile(), 2);
  EXPECT_EQ(correction->instructions, 6);
  EXPECT_EQ(correction->left_out, 16);
  EXPECT_EQ(correction->work.columns_read, 0);

  const auto clocks = [&](Unit unit) { return a.plain->clocks[static_cast<size_t>(unit)]; };
  EXPECT_EQ(clocks(Unit::mma), 2.0 * 128 * 128 * 128 / 8192);
  EXPECT_EQ(clocks(Unit::exponential), 96 * 32 * 4 / 16);
  EXPECT_EQ(clocks(Unit::fma), 16 * 32 * 4 / 64);
  EXPECT_EQ(clocks(Unit::tensor_memory), 128 * 128 * 6 / 228.0);
  // Reads of queries, keys and values, and half of the copies, because a copy serves two tiles.
  EXPECT_EQ(clocks(Unit::shared_memory), ((128 + 128) * 64 + 64 * 128 + 128 * 128 / 2) * 2 / 128);
  EXPECT_EQ(a.plain->binds, "exponential");
  EXPECT_FALSE(a.masked.has_value());
}

TEST(MachineCodeAccount, TwoBlocksShareOneIssuer) {
  const CostModel one = account_of("sm_100a", 512, blackwell("", "0x10")),
                  two = account_of("sm_100a", 512, blackwell(".2CTA", "0x8"));
  EXPECT_TRUE(two.pair);
  EXPECT_EQ(two.tensor_columns, 256);
  const auto of = [](const CostModel& a, Unit unit) { return a.plain->clocks[static_cast<size_t>(unit)]; };
  EXPECT_EQ(of(two, Unit::mma), of(one, Unit::mma));
  EXPECT_LT(of(two, Unit::shared_memory), of(one, Unit::shared_memory));
  EXPECT_EQ(two.steady(Role::mma, false)->per_tile(), one.steady(Role::mma, false)->per_tile() / 2);
}

// Parts of a step that were not unrolled, such as 32 of 128 columns, count as often as the step needs.
TEST(MachineCodeAccount, PartsOfAStepAreRepeated) {
  const Lines lines = Lines{"@P1 BRA `(.L_mma)", ".L_step:"} + wait(".L_s") +
                      Lines{".L_change:", "LDTM.x32 R4, tmem[UR4]"} + times(32, {"FADD R4, R4, R5"}) +
                      Lines{"STTM.x32 tmem[UR4], R4", "@P2 BRA `(.L_change)", ".L_part:"} +
                      Lines{"LDTM.x32 R4, tmem[UR4]"} + times(32, {"MUFU.EX2 R4, R4"}) +
                      times(16, {"F2FP.BF16.F32.PACK_AB R4, R4, R5"}) +
                      Lines{"STTM.x16 tmem[UR4], R4", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", "@P2 BRA `(.L_part)",
                            "BRA.U UP1, `(.L_step)", "EXIT"} +
                      poll(".L_s") + Lines{".L_mma:"} + wait(".L_p") +
                      Lines{"UTCHMMA gdesc[UR6], gdesc[UR4], tmem[UR8], tmem[UR10], idesc[UR11], !UPT",
                            "BRA.U UP1, `(.L_mma)", "EXIT"} +
                      poll(".L_p");
  const Shape known{.head_dim = 64, .head_dim_v = 64, .rows = 256, .keys = 128};
  const CostModel a = account_of("sm_100a", 512, lines, known);
  const LoopCost* softmax = a.steady_softmax(false);
  ASSERT_NE(softmax, nullptr);
  EXPECT_EQ(softmax->work.scores(), 128);
  EXPECT_EQ(softmax->work.columns_read, 2 * 128);
  EXPECT_EQ(softmax->instructions, 2 + 4 * (35 + 52) + 1);
  EXPECT_EQ(softmax->per_tile(), 4);
  // The number of repetitions is unknown if the size of a step is unknown.
  EXPECT_EQ(account_of("sm_100a", 512, lines).steady_softmax(false)->instructions, 2 + 35 + 52 + 1);
}

TEST(MachineCodeAccount, BackwardPassesAreSeen) {
  // Each score is packed twice: as a probability and as its gradient.
  Lines lines;
  for (const std::string& line : kHopper) lines = lines + Lines(line.starts_with("F2FP") ? 2 : 1, line);
  const CostModel a = account_of("sm_90a", 384, lines);
  EXPECT_TRUE(a.backward);
  EXPECT_EQ(a.shape.head_dim, 0);
  EXPECT_EQ(a.steady_softmax(false)->work.scores(), 64);
}

// Softcap needs a second exponential for each score. An addition to global memory shows that it is a backward pass.
TEST(MachineCodeAccount, BackwardPassesWithSoftcapAreSeen) {
  Lines lines;
  for (const std::string& line : kHopper)
    lines = lines + Lines(line.starts_with("F2FP") || line.starts_with("MUFU") ? 2 : 1, line);
  EXPECT_FALSE(account_of("sm_90a", 384, lines).backward);
  const Lines reduction = Lines{"@P2 BRA `(.L_sum)"} + lines + Lines{".L_sum:"} + wait(".L_full") +
                          Lines{"UBLKRED.S.G.ADD.F32 [UR4], [UR6], UR8", "@P1 BRA `(.L_sum)", "EXIT"} + poll(".L_full");
  const CostModel a = account_of("sm_90a", 384, reduction, {.head_dim = 64, .head_dim_v = 64});
  EXPECT_TRUE(a.backward);
  EXPECT_EQ(a.steady_softmax(false)->work.scores(), 64);
  ASSERT_NE(a.steady(Role::reduction, false), nullptr);
  EXPECT_EQ(a.steady(Role::reduction, false)->warps, 1);
}

TEST(MachineCodeAccount, SpillsAndUnknownOpcodesAreSeen) {
  const CostModel a = account_of("sm_90a", 384, Lines{"STL [R1], R4", "LDL R4, [R1]", "FNOVEL R4"} + kHopper);
  EXPECT_EQ(a.spills, 2);
  EXPECT_EQ(a.unknown, std::vector<std::string>{"FNOVEL"});
}

TEST(MachineCodeAccount, RefusesOtherCode) {
  Cubin cubin;
  CostModel result;
  ASSERT_TRUE(parse(listing("sm_80", kHopper), &cubin).ok());
  Status status = cost_model(cubin, {}, false, &result);
  EXPECT_EQ(status.code, TANDEM_UNSUPPORTED);
  EXPECT_NE(status.message.find("sm_80"), std::string::npos) << status.message;
  cubin = {};
  ASSERT_TRUE(parse(listing("sm_90a", {".L_x:", "FADD R1, R1, R2", "@P0 BRA `(.L_x)", "EXIT"}), &cubin).ok());
  status = cost_model(cubin, {}, false, &result);
  EXPECT_EQ(status.code, TANDEM_UNSUPPORTED);
  EXPECT_NE(status.message.find("no attention kernel"), std::string::npos) << status.message;
}

}  // namespace
}  // namespace tandem::machine_code
