#include "sass/src/units.h"

#include <gtest/gtest.h>

#include "sass/tests/listing.h"

namespace tandem::machine_code {
namespace {

Instruction one(const std::string& line) { return code_of({line}).at(0); }

TEST(MachineCodeUnits, EveryOpcodeHasAUnit) {
  const struct {
    const char* line;
    Unit unit;
  } cases[] = {{"HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", Unit::mma},
               {"MUFU.EX2 R4, R4", Unit::exponential},
               {"FADD2.RM R4, R4, R6", Unit::fma},
               {"IMAD.MOV.U32 R4, RZ, RZ, R5", Unit::fma},
               {"FMNMX3 R4, R4, R5, R6", Unit::alu},
               {"R2P PR, R4, 0x7f", Unit::alu},
               {"F2FP.BF16.F32.PACK_AB R4, R4, R5", Unit::conversion},
               {"LDTM.x32 R4, tmem[UR4]", Unit::tensor_memory},
               {"SHFL.BFLY PT, R4, R5, 0x1, 0x1f", Unit::shared_memory},
               {"UTMALDG.4D [UR8], [UR6]", Unit::memory},
               {"STL [R1], R4", Unit::memory},
               {"R2UR UR4, R4", Unit::uniform},
               {"SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", Unit::control}};
  for (const auto& [line, unit] : cases) {
    EXPECT_EQ(unit_of(one(line)), unit) << line;
    EXPECT_TRUE(known(one(line))) << line;
  }
  EXPECT_FALSE(known(one("FNOVEL R1, R2")));
  EXPECT_FALSE(known(one("FAD R1, R2")));
  EXPECT_EQ(unit_of(one("FNOVEL R1, R2")), Unit::control);
}

TEST(MachineCodeUnits, Costs) {
  EXPECT_EQ(lanes_of(one("FFMA R1, R2, R3, R4")), 32);
  EXPECT_EQ(lanes_of(one("FFMA2 R4, R4, R6, R8")), 64);
  EXPECT_EQ(bytes_of(one("LDTM.x32 R4, tmem[UR4]")), 32 * 32 * 4);
  EXPECT_EQ(bytes_of(one("STTM.x16 tmem[UR4], R4")), 16 * 32 * 4);
  EXPECT_EQ(bytes_of(one("LDS R4, [R5]")), 32 * 4);
  EXPECT_EQ(bytes_of(one("LDS.64 R4, [R5]")), 32 * 8);
  EXPECT_EQ(bytes_of(one("STS.128 [R5], R4")), 32 * 16);
  EXPECT_EQ(bytes_of(one("STSM.16.MT88.4 [R5], R4")), 512);
  EXPECT_EQ(bytes_of(one("LDSM.16.M88.2 R4, [R5]")), 256);
}

TEST(MachineCodeUnits, Products) {
  const Instruction fresh = one("HGMMA.64x80x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0"),
                    added = one("HGMMA.64x256x32.F32.E4M3.E4M3 R24, R180, gdesc[UR8], R24, UP0"),
                    tensor = one("UTCHMMA.2CTA gdesc[UR6], gdesc[UR4], tmem[UR8], tmem[UR10], idesc[UR11], !UPT"),
                    of_values = one("UTCQMMA tmem[UR6], gdesc[UR4], tmem[UR8], tmem[UR10], idesc[UR11], UPT");
  EXPECT_EQ(columns_of(fresh), 80);
  EXPECT_EQ(columns_of(added), 256);
  EXPECT_EQ(columns_of(tensor), 0);
  EXPECT_EQ(depth_of(fresh), 16);
  EXPECT_EQ(depth_of(added), 32);
  EXPECT_EQ(depth_of(tensor), 16);
  EXPECT_EQ(depth_of(of_values), 32);
  EXPECT_TRUE(begins_sum(fresh));
  EXPECT_FALSE(begins_sum(added));
  EXPECT_TRUE(begins_sum(tensor));
  EXPECT_FALSE(begins_sum(of_values));
  EXPECT_TRUE(left_in_shared_memory(fresh));
  EXPECT_FALSE(left_in_shared_memory(added));
  EXPECT_TRUE(left_in_shared_memory(tensor));
  EXPECT_FALSE(left_in_shared_memory(of_values));
  EXPECT_TRUE(by_a_pair(tensor));
  EXPECT_FALSE(by_a_pair(of_values));
}

TEST(MachineCodeUnits, RatesByArchitecture) {
  ASSERT_NE(rates_of("sm_90a"), nullptr);
  EXPECT_EQ(rates_of("sm_90a")->tensor_bytes, 0);
  EXPECT_EQ(rates_of("sm_100a")->exponentials, 16);
  EXPECT_EQ(rates_of("sm_103a")->exponentials, 32);
  EXPECT_EQ(rates_of("sm_100f"), rates_of("sm_100"));
  EXPECT_EQ(rates_of("sm_80"), nullptr);
  EXPECT_EQ(rates_of("sm_9"), nullptr);
  EXPECT_EQ(rates_of(""), nullptr);
}

}  // namespace
}  // namespace tandem::machine_code
