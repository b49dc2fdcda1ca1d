#include "sass/src/trace.h"

#include <gtest/gtest.h>

#include "sass/src/value_analysis.h"
#include "sass/tests/listing.h"

namespace tandem::machine_code {
namespace {

Kernel kernel_from(const Lines& lines, int threads = 64) {
  Kernel kernel;
  kernel.code = code_of(lines);
  kernel.threads = threads;
  return kernel;
}

// Returns the state of the registers of one thread after these instructions.
ValueAnalysis after(const Lines& lines, const Place& place = {}) {
  static const Kernel none;
  ValueAnalysis values(none, place);
  for (const Instruction& i : code_of(lines)) values.execute(i);
  return values;
}

TEST(MachineCodeValues, Arithmetic) {
  const ValueAnalysis v =
      after({"UMOV UR4, 0x400", "S2UR UR5, SR_CgaCtaId", "ULEA UR6, UR5, UR4, 0x18", "S2R R0, SR_TID.X",
             "SHF.R.U32.HI R2, RZ, 0x5, R0", "SHFL.IDX PT, R3, R2, RZ, 0x1f", "R2UR UR7, R3",
             "UIADD3 UR8, UPT, UPT, UR6, -0x8, URZ", "IMAD R4, R3, 0x8, R2", "LOP3.LUT R5, R3, 0x1, RZ, 0x3c, !PT",
             "LEA.HI R6, R3, R3, RZ, 0x1f", "VIADDMNMX.U32 R7, R3, -0x2, 0x2, PT", "PRMT R8, R0, 0x7610, R4"},
            {.thread = 96, .block = 1});
  EXPECT_EQ(v.value("UR6"), 0x1000400u);
  EXPECT_EQ(v.value("UR7"), 3u);
  EXPECT_EQ(v.value("UR8"), 0x10003f8u);
  EXPECT_EQ(v.value("R4"), 27u);
  EXPECT_EQ(v.value("R5"), 2u);
  EXPECT_EQ(v.value("R6"), 4u);
  EXPECT_EQ(v.value("R7"), 1u);
  EXPECT_EQ(v.value("R8"), 96u);
  EXPECT_EQ(v.address("[UR8+0x10]"), 0x1000408u);
}

// Computes five modulo three in ptxas' code.
TEST(MachineCodeValues, Remainder) {
  const ValueAnalysis v = after({"UMOV UR14, 0x5", "UIMAD.WIDE UR4, UR14, 0x55555556, URZ",
                                 "ULEA.HI UR4, UR5, UR5, URZ, 0x1", "UIMAD UR4, UR4, -0x3, UR14"});
  EXPECT_EQ(v.value("UR4"), 2u);
}

// A 64-bit shift writes one register. The next register, here the base of the barriers, stays known.
TEST(MachineCodeValues, AShiftOfTwoRegistersWritesOne) {
  const ValueAnalysis v = after({"UMOV UR8, 0x100", "UMOV UR9, 0x400", "USHF.R.U64 UR8, UR8, 0x4, URZ"});
  EXPECT_EQ(v.value("UR8"), 0x10u);
  EXPECT_EQ(v.value("UR9"), 0x400u);
}

TEST(MachineCodeValues, WhatMemorySaysIsUnknown) {
  const ValueAnalysis v =
      after({"MOV R2, 0x7", "LDS.64 R2, [R9]", "LDC R4, c[0x0][0x210]", "IADD3 R5, PT, PT, R2, 0x1, RZ",
             "ISETP.NE.AND P0, PT, R2, RZ, PT", "IMAD R6, R2, RZ, 0x3", "LOP3.LUT R7, R2, RZ, RZ, 0xc0, !PT"});
  EXPECT_EQ(v.value("R2"), std::nullopt);
  EXPECT_EQ(v.value("R3"), std::nullopt);
  EXPECT_EQ(v.value("R4"), std::nullopt);
  EXPECT_EQ(v.value("R5"), std::nullopt);
  EXPECT_EQ(v.truth("P0"), std::nullopt);
  EXPECT_EQ(v.value("R6"), 3u);
  EXPECT_EQ(v.value("R7"), 0u);
}

TEST(MachineCodeValues, SpilledRegisters) {
  const ValueAnalysis v = after({"MOV R2, 0x7", "STL [R1+0x34], R2", "MOV R2, RZ", "LDL R3, [R1+0x34]",
                                 "STL.64 [R1+0x34], R2", "LDL R4, [R1+0x34]", "LDL R5, [R1+0x38]"});
  EXPECT_EQ(v.value("R3"), 7u);
  EXPECT_EQ(v.value("R4"), std::nullopt);
  EXPECT_EQ(v.value("R5"), std::nullopt);
}

// Parameters of CuTe kernels decide if a product negates its operands.
TEST(MachineCodeValues, ProductsNegateNothing) {
  const ValueAnalysis v = after({"MOV R2, 0x8412490", "SEL R3, R2, 0x8410490, P0", "SEL R4, RZ, 0x4000, !P0",
                                 "IADD3 R5, PT, PT, R3, R4, RZ", "SEL R6, R2, 0x8510490, P0"});
  EXPECT_EQ(v.value("R5"), 0x8410490u);
  EXPECT_EQ(v.value("R6"), std::nullopt);
}

TEST(MachineCodeValues, Predicates) {
  const ValueAnalysis v =
      after({"MOV R2, 0xffffffff", "ISETP.LT.AND P0, P1, R2, RZ, PT", "ISETP.LT.U32.AND P2, PT, R2, RZ, PT",
             "LDS R3, [R9]", "ISETP.EQ.OR P3, PT, R3, RZ, P0", "PLOP3.LUT P4, P5, P0, P2, PT, 0x80, 0x08",
             "SEL R4, R2, 0x5, P2", "@P2 MOV R2, 0x1"});
  EXPECT_EQ(v.truth("P0"), true);
  EXPECT_EQ(v.truth("!P1"), true);
  EXPECT_EQ(v.truth("P2"), false);
  EXPECT_EQ(v.truth("P3"), true);  // for any value of R3
  EXPECT_EQ(v.truth("P4"), false);
  EXPECT_EQ(v.value("R4"), 5u);
  EXPECT_EQ(v.value("R2"), 0xffffffffu);
}

// Warp 0 loads into a ring of two slots. Warp 1 multiplies and computes exponentials.
const Lines kRing = Lines{"S2R R0, SR_TID.X",
                          "UMOV UR4, 0x400",
                          "MOV R2, RZ",
                          "MOV R3, RZ",
                          "ISETP.GT.U32.AND P0, PT, R0, 0x1f, PT",
                          "@P0 BRA `(.L_x_2)",
                          ".L_x_0:",
                          "SHF.L.U32 R5, R3, 0x1f, RZ",
                          "LEA R4, R2, UR4, 0x3",
                          "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4+URZ+0x10], R5",
                          "@!P1 BRA `(.L_x_4)",
                          ".L_x_1:",
                          "MOV R6, 0x4000",
                          "SYNCS.ARRIVE.TRANS64 RZ, [R4+URZ], R6",
                          "R2UR UR9, R4",
                          "UTMALDG.2D [UR8], [UR10]",
                          "ARRIVES.LDGSTSBAR.64.ARVCNT [UR9]",
                          "IADD3 R2, PT, PT, R2, 0x1, RZ",
                          "ISETP.NE.AND P2, PT, R2, 0x2, PT",
                          "SEL R2, R2, RZ, P2",
                          "SEL R7, RZ, 0x1, P2",
                          "LOP3.LUT R3, R3, R7, RZ, 0x3c, !PT",
                          "LDC R8, c[0x0][0x210]",
                          "ISETP.NE.AND P3, PT, R8, RZ, PT",
                          "@P3 BRA `(.L_x_0)",
                          "EXIT",
                          ".L_x_2:",
                          "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], RZ",
                          "@!P1 BRA `(.L_x_2)",
                          "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0"} +
                    times(16, {"MUFU.EX2 R24, R24"}) +
                    Lines{"SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x10], RZ",
                          "LDC R8, c[0x0][0x210]",
                          "ISETP.NE.AND P3, PT, R8, RZ, PT",
                          "@P3 BRA `(.L_x_2)",
                          "EXIT",
                          ".L_x_4:",
                          "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4+URZ+0x10], R5",
                          "@!P1 BRA `(.L_x_4)",
                          "BRA `(.L_x_1)"};

TEST(MachineCodeTrace, FollowsARing) {
  const Kernel kernel = kernel_from(kRing);
  Cubin cubin{.arch = "sm_90a", .kernels = {kernel}};
  CostModel cost_model_;
  const Status status = cost_model(cubin, {}, false, &cost_model_);
  ASSERT_TRUE(status.ok()) << status.message;
  const std::vector<WarpTrace> traces = trace(kernel, cost_model_, 3);
  ASSERT_EQ(traces.size(), 2u);
  EXPECT_EQ(traces[0].role, Role::load);
  EXPECT_EQ(traces[1].role, Role::computing);
  EXPECT_EQ(traces[1].warp, 1);
  std::vector<uint32_t> waits, parities, copies, loads, bytes;
  for (const Event& e : traces[0].events) {
    const Instruction& i = kernel.code[static_cast<size_t>(e.instruction)];
    if (i.base() == "UTMALDG") copies.push_back(e.barrier);
    if (i.base() == "ARRIVES") loads.push_back(e.barrier);
    if (i.base() != "SYNCS") continue;
    if (i.has("ARRIVE")) bytes.push_back(e.amount);
    if (i.has("PHASECHK")) waits.push_back(e.barrier), parities.push_back(e.amount);
  }
  EXPECT_EQ(waits, (std::vector<uint32_t>{0x410, 0x418, 0x410}));
  EXPECT_EQ(parities, (std::vector<uint32_t>{0, 0, 0x80000000}));
  EXPECT_EQ(copies, (std::vector<uint32_t>{0x400, 0x408, 0x400}));
  EXPECT_EQ(loads, copies);
  EXPECT_EQ(bytes, (std::vector<uint32_t>{0x4000, 0x4000, 0x4000}));
}

// A table of addresses in constant bank 2. The branch takes the second address.
TEST(MachineCodeTrace, IndirectBranches) {
  Kernel kernel = kernel_from({"MOV R4, 0x4", "LDC R2, c[0x2][R4]", "NOP"});
  kernel.tables = {0x10, 0, 0, 0, 0x20, 1, 0, 0};
  ValueAnalysis values(kernel, {});
  for (const Instruction& i : kernel.code) values.execute(i);
  EXPECT_EQ(values.value("R2"), 0x120u);
}

}  // namespace
}  // namespace tandem::machine_code
