#include "sass/src/work.h"

#include <gtest/gtest.h>

#include <numeric>

#include "sass/tests/listing.h"

namespace tandem::machine_code {
namespace {

Work work(const Lines& lines) {
  const std::vector<Instruction> code = code_of(lines);
  std::vector<int32_t> all(code.size());
  std::iota(all.begin(), all.end(), 0);
  return work_of(code, all);
}
std::optional<Role> role(const Lines& lines) { return work(lines).role(); }

const Lines kExponential{"MUFU.EX2 R4, R4"}, kPack{"F2FP.BF16.F32.PACK_AB R4, R4, R5"};

// A polynomial begins by rounding down, with an addition or a multiply-add, of one number or a packed pair.
TEST(MachineCodeWork, ExponentialsByPolynomials) {
  EXPECT_EQ(work(kExponential).exponentials, 1);
  EXPECT_EQ(work({"FADD.RM R4, R4, R5"}).exponentials, 1);
  EXPECT_EQ(work({"FFMA.RM R4, R4, R5, R6"}).exponentials, 1);
  EXPECT_EQ(work({"FADD2.RM R4, R4, R6"}).exponentials, 2);
  EXPECT_EQ(work({"FFMA2.FTZ.RM R4, R4, R6, R8"}).exponentials, 2);
  EXPECT_EQ(work({"FFMA2 R4, R4, R6, R8", "FADD2 R4, R4, R6", "MUFU.RCP R4, R4", "F2I.RM R4, R4"}).exponentials, 0);
}

TEST(MachineCodeWork, ScoresAreWhatIsPackedToo) {
  EXPECT_EQ(work(times(66, kExponential) + times(32, kPack)).scores(), 64);
  EXPECT_EQ(work(times(128, kExponential) + times(32, kPack)).scores(), 64);  // softcap
  EXPECT_EQ(work(times(40, kExponential) + times(40, kPack)).scores(), 40);   // a backward pass
  EXPECT_EQ(work(times(67, kExponential)).scores(), 64);
  EXPECT_TRUE(work(times(40, kExponential) + times(40, kPack)).backward());
  EXPECT_FALSE(work(times(40, kExponential) + times(20, kPack)).backward());
  EXPECT_FALSE(work(times(40, kPack)).backward());
}

TEST(MachineCodeWork, RolesFollow) {
  const Lines product{"UTCHMMA gdesc[UR6], gdesc[UR4], tmem[UR8], tmem[UR10], idesc[UR11], UPT"},
      read{"LDTM.x16 R4, tmem[UR4]"}, written{"STTM.x16 tmem[UR4], R4"}, copy{"UTMALDG.4D [UR8], [UR4]"};
  EXPECT_EQ(role(product), Role::mma);
  EXPECT_EQ(role(product + times(7, kExponential)), Role::mma);
  EXPECT_EQ(role(product + times(8, kExponential)), Role::computing);
  EXPECT_EQ(role(read + times(8, kExponential) + written), Role::softmax);
  EXPECT_EQ(role(read + written + kExponential), Role::correction);
  EXPECT_EQ(role(read + Lines{"UTMASTG.4D [UR8], [UR4]"}), Role::epilogue);
  EXPECT_EQ(role(read + Lines{"SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", "SYNCS.ARRIVE.TRANS64 RZ, [UR4], R3"}),
            Role::staging);
  EXPECT_EQ(role(copy), Role::load);
  EXPECT_EQ(role({"LDGSTS.E.128 [R4], [R6.64]"}), Role::load);
  EXPECT_EQ(role({"UBLKCP.S.G [UR4], [UR6], UR8"}), Role::load);
  EXPECT_EQ(role({"UBLKRED.G.S.ADD.F32.RN [UR4], [UR6], UR8"}), Role::reduction);
  EXPECT_EQ(role({"FADD R4, R4, R5", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ"}), std::nullopt);
}

TEST(MachineCodeWork, ProductsOfScoresAndOfValues) {
  // Scores begin a sum here. Values add to an older sum, and their left operands are in registers.
  const Work hopper = work(Lines{"HGMMA.64x80x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT"} +
                           times(3, {"HGMMA.64x80x16.F32.BF16 R88, gdesc[UR8], R88"}) +
                           times(5, {"HGMMA.64x128x16.F32.BF16 R24, R180, gdesc[UR8].tnspB, R24"}));
  EXPECT_EQ(hopper.products, 9);
  EXPECT_EQ(hopper.sums, 1);
  EXPECT_EQ(hopper.of_scores, 4);
  EXPECT_EQ(hopper.depth, 16);
  EXPECT_EQ(hopper.value_columns, 128);
  // Both kinds of products may begin a sum in tensor memory.
  const Work blackwell = work({"UTCHMMA gdesc[UR6], gdesc[UR4], tmem[UR8], tmem[UR10], idesc[UR11], !UPT",
                               "UTCHMMA gdesc[UR6], gdesc[UR4], tmem[UR8], tmem[UR10], idesc[UR11], UPT",
                               "UTCHMMA tmem[UR6], gdesc[UR4], tmem[UR8], tmem[UR10], idesc[UR11], UP0"});
  EXPECT_EQ(blackwell.products, 3);
  EXPECT_EQ(blackwell.sums, 1);
  EXPECT_EQ(blackwell.of_scores, 2);
  EXPECT_EQ(blackwell.value_columns, 0);
}

TEST(MachineCodeWork, WaitsVotesAndTensorMemory) {
  const Work w = work({"SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ",
                       "VOTE.ANY P0, P0", "LDTM.x32 R4, tmem[UR4]", "STTM.x16 tmem[UR4], R4", "STTM.x8 tmem[UR4], R4"});
  EXPECT_EQ(w.waits, 1);
  EXPECT_EQ(w.votes, 1);
  EXPECT_EQ(w.columns_read, 32);
  EXPECT_EQ(w.columns_written, 24);
  EXPECT_TRUE(w.synchronised);
  EXPECT_FALSE(work({"SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", "BAR.ARV R3, 0x100"}).synchronised);
  EXPECT_TRUE(work({"BAR.SYNC.DEFER_BLOCKING R2, 0x100"}).synchronised);
}

}  // namespace
}  // namespace tandem::machine_code
