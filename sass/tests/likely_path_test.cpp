#include "sass/src/likely_path.h"

#include <gtest/gtest.h>

#include "sass/tests/listing.h"

namespace tandem::machine_code {
namespace {

// Returns the opcodes in one turn of the outermost loop, whose body is `body` after the label "head".
std::vector<std::string> turn(const Lines& body, bool through_masks = false, bool whole = false) {
  const std::vector<Instruction> code = code_of(Lines{"NOP", ".L_head:"} + body + Lines{"EXIT"});
  const Graph graph = graph_of(code);
  if (graph.loops.empty()) return {"no loop"};
  const Loop& loop = graph.loops.front();
  std::vector<std::string> opcodes;
  for (const int32_t i : whole ? whole_loop(graph, loop) : likely_path(code, graph, loop, through_masks))
    opcodes.push_back(code[static_cast<size_t>(i)].opcode);
  return opcodes;
}

using Opcodes = std::vector<std::string>;
const Lines kAgain{"@P6 BRA `(.L_head)"};
const Lines kRescale = times(16, {"FMUL R4, R4, R20"});

TEST(MachineCodePath, WaitsAreNotTaken) {
  const Lines body =
      Lines{"SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5", "@!P0 BRA `(.L_wait)", ".L_back:", "FADD R1, R1, R2"} +
      kAgain +
      Lines{"EXIT",
            ".L_wait:",
            "MOV R4, UR4",
            ".L_poll:",
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4], R5",
            "@!P0 BRA `(.L_poll)",
            "BRA `(.L_back)"};
  EXPECT_EQ(turn(body), (Opcodes{"SYNCS.PHASECHK.TRANS64.TRYWAIT", "BRA", "FADD", "BRA"}));
  EXPECT_EQ(turn(body, false, true).size(), 8u);
}

TEST(MachineCodePath, SecondLooksAtABarrierAreNotTaken) {
  EXPECT_EQ(turn(Lines{"SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5", "@P0 BRA `(.L_on)",
                       "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R5", ".L_on:"} +
                 kAgain),
            (Opcodes{"SYNCS.PHASECHK.TRANS64.TRYWAIT", "BRA", "BRA"}));
}

TEST(MachineCodePath, WhatAVoteDecidesIsAnException) {
  // The condition reaches the branch directly, through a register, or through a uniform register.
  for (const Lines& vote :
       {Lines{"VOTE.ANY P0, !P1"}, Lines{"VOTE.ANY R4, PT, !P1", "ISETP.NE.U32.AND P0, PT, R4, RZ, PT"},
        Lines{"VOTE.ANY R4, PT, P1", "R2UR UR4, R4", "UISETP.NE.U32.AND P0, UPT, UR4, URZ, UPT"},
        Lines{"VOTE.ANY P3, P1", "P2R R4, PR, RZ, 0x8", "ISETP.NE.AND P0, PT, R4, RZ, PT"}}) {
    const Lines body = vote + Lines{"@!P0 BRA `(.L_on)", "LDS R5, [R6]", "LDS R7, [R6]", ".L_on:"} + kAgain;
    EXPECT_EQ(turn(body).size(), vote.size() + 2) << vote.back();
  }
  // An unrelated condition next to a vote does not count.
  EXPECT_EQ(turn(Lines{"VOTE.ANY P1, !P1", "ISETP.NE.U32.AND P0, PT, R4, RZ, PT", "@!P0 BRA `(.L_on)", "LDS R5, [R6]",
                       ".L_on:"} +
                 kAgain)
                .size(),
            5u);
}

TEST(MachineCodePath, ExponentialsThatAVoteDecidesAreAnException) {
  const auto body = [](const char* condition, int fma, int exponentials) {
    return Lines{condition, "@!P0 BRA `(.L_other)"} + times(fma, {"FFMA R4, R4, R20, R5"}) +
           Lines{"BRA `(.L_on)", ".L_other:"} + times(exponentials, {"MUFU.EX2 R4, R4"}) + Lines{".L_on:"} + kAgain;
  };
  EXPECT_EQ(turn(body("VOTE.ANY P0, P0", 40, 8)).size(), 44u);
  EXPECT_EQ(turn(body("VOTE.ANY P0, P0", 40, 4)).size(), 7u);
  EXPECT_EQ(turn(body("ISETP.NE.U32.AND P0, PT, R4, RZ, PT", 4, 8)).size(), 11u);
}

// Selects of dropout do not make a mask.
TEST(MachineCodePath, ScoresThatNobodySeesAreNotPassedOver) {
  const auto body = [](int cleared) {
    return times(cleared, {"CS2R R4, SRZ"}) + Lines{"VOTE.ANY P0, P0", "@!P0 BRA `(.L_on)"} +
           times(8, {"MUFU.EX2 R4, R4", "FSEL R4, R4, RZ, P1"}) + Lines{".L_on:"} + kAgain;
  };
  EXPECT_EQ(turn(body(4)).size(), 23u);
  EXPECT_EQ(turn(body(3)).size(), 6u);
}

TEST(MachineCodePath, RescalingIsAnException) {
  const Lines skip{"@!P0 BRA `(.L_on)"}, on{".L_on:", "FADD R1, R1, R2"};
  EXPECT_EQ(turn(skip + kRescale + on + kAgain).size(), 3u);
  // A side is kept without a branch, with few instructions, or among products of matrices.
  EXPECT_EQ(turn(kRescale + on + kAgain).size(), 18u);
  EXPECT_EQ(turn(skip + times(15, {"FMUL R4, R4, R20"}) + on + kAgain).size(), 18u);
  EXPECT_EQ(turn(skip + kRescale + Lines{"HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"} + on + kAgain).size(), 20u);
}

TEST(MachineCodePath, MasksAreTakenWhenAskedFor) {
  const Lines mask = Lines{"@!P0 BRA `(.L_on)"} + times(8, {"FSEL R4, R4, -INF , P1"}) + Lines{".L_on:"},
              scores = times(8, {"MUFU.EX2 R4, R4"});
  EXPECT_EQ(turn(mask + scores + kAgain).size(), 10u);
  EXPECT_EQ(turn(mask + scores + kAgain, true).size(), 18u);
  // Selects that always choose the same value are no masks. Selects in loops without scores are no masks either.
  EXPECT_EQ(
      turn(Lines{"@!P0 BRA `(.L_on)"} + times(8, {"FSEL R4, R4, RZ, PT"}) + Lines{".L_on:"} + scores + kAgain).size(),
      18u);
  EXPECT_EQ(turn(mask + kAgain).size(), 10u);
}

// A loop with a step that masks chunk by chunk and a step that does not, chosen by a branch. The unmasked path must not
// go through the first step without its masks, for its length or for a vote.
TEST(MachineCodePath, StepsThatMayMaskAreNoneWithoutMasks) {
  const Lines chunk = Lines{"@!P1 BRA `(.L_whole)"} + times(8, {"FSEL R4, R4, -INF , P2"}) + Lines{".L_whole:"};
  const auto body = [&](int hiding, int plain) {
    return Lines{"@!P0 BRA `(.L_plain)"} + chunk + times(hiding, {"MUFU.EX2 R4, R4"}) +
           Lines{"BRA `(.L_on)", ".L_plain:"} + times(plain, {"MUFU.EX2 R5, R5"}) + Lines{".L_on:"} + kAgain;
  };
  EXPECT_EQ(turn(body(20, 8)).size(), 10u);
  EXPECT_EQ(turn(body(8, 20)).size(), 22u);
  EXPECT_EQ(turn(body(20, 8), true).size(), 32u);
  EXPECT_EQ(turn(body(8, 20), true).size(), 20u);
  const Lines vote{"VOTE.ANY P0, P0"};
  EXPECT_EQ(turn(vote + body(8, 20)).size(), 23u);
  EXPECT_EQ(turn(vote + body(20, 8), true).size(), 33u);
}

// An exception that decides two branches has one answer: the branch that skips more code. Here the first branch's
// shorter side belongs to a step with maxima, which the second branch skips.
TEST(MachineCodePath, AnExceptionIsAskedOnce) {
  const Lines body = Lines{"VOTE.ANY P0, P0",
                           "@P0 BRA `(.L_strict)",
                           "FSETP.GT.AND P1, PT, R4, R5, PT",
                           "FADD R6, R6, R7",
                           "BRA `(.L_on)",
                           ".L_strict:",
                           "FADD R6, R6, R7",
                           ".L_on:",
                           "@!P0 BRA `(.L_exponentials)"} +
                     times(9, {"FMNMX R8, R8, R9, !PT"}) + Lines{".L_exponentials:", "MUFU.EX2 R4, R4"} + kAgain;
  EXPECT_EQ(turn(body), (Opcodes{"VOTE.ANY", "BRA", "FSETP.GT.AND", "FADD", "BRA", "BRA", "MUFU.EX2", "BRA"}));
}

// A condition that decides before a mask and again at it has one answer. A copy or an inverse of the condition counts
// too.
TEST(MachineCodePath, WhatDecidesAboutAMaskIsAskedOnce) {
  const auto body = [](const char* first_branch) {
    return Lines{"UISETP.NE.AND UP2, UPT, UR20, 0x2, UPT",
                 "PLOP3.LUT P0, PT, PT, PT, UP2, 0x40, 0x0",
                 first_branch,
                 "LDS R5, [R6]",
                 "LDS R7, [R6]",
                 ".L_asked:",
                 "PLOP3.LUT P1, PT, PT, PT, UP2, 0x80, 0x0",
                 "@!P1 BRA `(.L_on)"} +
           times(8, {"FSEL R4, R4, R5, P2"}) + Lines{".L_on:"} + times(8, {"MUFU.EX2 R4, R4"}) + kAgain;
  };
  constexpr size_t all = 24, asking = 2, masking = 8;
  const Lines same = body("@P0 BRA `(.L_asked)"), contrary = body("@!P0 BRA `(.L_asked)");
  EXPECT_EQ(turn(same, true).size(), all);
  EXPECT_EQ(turn(same).size(), all - asking - masking);
  EXPECT_EQ(turn(contrary, true).size(), all - asking);
  EXPECT_EQ(turn(contrary).size(), all - masking);
}

TEST(MachineCodePath, OtherwiseTheLongerSide) {
  const Lines body{"@P0 BRA `(.L_else)", "FADD R1, R1, R2", "BRA `(.L_on)",    ".L_else:",
                   "FMUL R1, R1, R2",    "FMUL R3, R1, R2", "FMUL R4, R1, R2", ".L_on:"};
  EXPECT_EQ(turn(body + kAgain), (Opcodes{"BRA", "FMUL", "FMUL", "FMUL", "BRA"}));
}

TEST(MachineCodePath, CallsSleepsAndPartedLanesAreExceptions) {
  EXPECT_EQ(turn(Lines{"@P0 BRA `(.L_on)", "CALL.REL.NOINC `($slow)", ".L_on:"} + kAgain).size(), 2u);
  EXPECT_EQ(turn(Lines{"@P0 BRA `(.L_on)", "NANOSLEEP 0x20", ".L_on:"} + kAgain).size(), 2u);
  EXPECT_EQ(turn(Lines{"BRA.DIV UR4, `(.L_far)", ".L_back:"} + kAgain +
                 Lines{"EXIT", ".L_far:", "NOP", "NOP", "BRA `(.L_back)"}),
            (Opcodes{"BRA.DIV", "BRA"}));
}

TEST(MachineCodePath, WaysOutAreNotTakenAndInnerLoopsTurnOnce) {
  EXPECT_EQ(turn(Lines{"@P0 BRA `(.L_out)", ".L_inner:", "FADD R1, R1, R2", "@P1 BRA `(.L_inner)"} + kAgain +
                 Lines{".L_out:", "NOP"}),
            (Opcodes{"BRA", "FADD", "BRA", "BRA"}));
}

// A cycle with two entries is no natural loop.
TEST(MachineCodePath, EndsInCirclesToo) {
  const Lines body{"@P0 BRA `(.L_second)", ".L_first:",       "FADD R1, R1, R2",
                   ".L_second:",           "FMUL R1, R1, R2", "@P1 BRA `(.L_first)"};
  EXPECT_EQ(turn(body + kAgain).back(), "BRA");
  EXPECT_LE(turn(body + kAgain).size(), 5u);
}

}  // namespace
}  // namespace tandem::machine_code
