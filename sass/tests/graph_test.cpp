#include "sass/src/graph.h"

#include <gtest/gtest.h>

#include "sass/tests/listing.h"

namespace tandem::machine_code {
namespace {

TEST(MachineCodeGraph, BranchesMakeBlocks) {
  const Graph graph = graph_of(code_of({"NOP", "@P0 BRA `(.L_x_0)", "NOP", "EXIT", ".L_x_0:", "@P1 EXIT", "EXIT"}));
  ASSERT_EQ(graph.blocks.size(), 4u);
  EXPECT_EQ(graph.blocks[0].next, (std::vector<int32_t>{1, 2}));
  EXPECT_TRUE(graph.blocks[1].next.empty());
  EXPECT_EQ(graph.blocks[2].next, std::vector<int32_t>{3});
  EXPECT_EQ(graph.dominators, (std::vector<int32_t>{0, 0, 0, 2}));
  EXPECT_TRUE(graph.loops.empty());
}

TEST(MachineCodeGraph, UniformAndDivergentBranches) {
  const std::vector<Instruction> code =
      code_of({".L_x_0:", "BRA.U !UP0, `(.L_x_0)", "BRA.DIV UR4, `(.L_x_0)", "BRA.U UPT, `(.L_x_0)", "BRA `(.L_x_0)"});
  EXPECT_TRUE(falls_through(code[0]));
  EXPECT_EQ(conditions_of(code[0]), std::vector<std::string>{"UP0"});
  EXPECT_TRUE(falls_through(code[1]));
  EXPECT_FALSE(falls_through(code[2]));
  EXPECT_FALSE(falls_through(code[3]));
}

TEST(MachineCodeGraph, LoopsWithinLoops) {
  // The graph 0 { 1 { 2 } 3 } with an out-of-line path, followed by unreachable code.
  const Graph graph =
      graph_of(code_of({"NOP", ".L_x_0:", "NOP", ".L_x_1:", "@P0 BRA `(.L_x_3)", ".L_x_2:", "@P1 BRA `(.L_x_1)",
                        "@P2 BRA `(.L_x_0)", "EXIT", ".L_x_3:", "NOP", "BRA `(.L_x_2)", "BRA `(.L_x_0)"}));
  ASSERT_EQ(graph.loops.size(), 2u);
  const Loop &outer = graph.loops[0], &inner = graph.loops[1];
  EXPECT_EQ(outer.head, 1);
  EXPECT_EQ(inner.head, 2);
  EXPECT_EQ(inner.blocks, (std::vector<int32_t>{2, 3, 6}));
  EXPECT_EQ(outer.blocks, (std::vector<int32_t>{1, 2, 3, 4, 6}));
  EXPECT_TRUE(outer.contains(inner));
  EXPECT_FALSE(inner.contains(outer));
  EXPECT_FALSE(inner.contains(inner));
  EXPECT_TRUE(graph.dominates(2, 6));
  EXPECT_FALSE(graph.dominates(6, 3));
  EXPECT_FALSE(graph.dominates(0, 7));
}

TEST(MachineCodeGraph, ThreadsMeetWhereBssySays) {
  const Graph graph = graph_of(code_of(
      {"BSSY B0, `(.L_x_1)", "@P0 BRA `(.L_x_0)", "BSYNC B0", ".L_x_0:", "BSYNC B0", "NOP", ".L_x_1:", "EXIT"}));
  ASSERT_EQ(graph.blocks.size(), 5u);
  EXPECT_EQ(graph.blocks[1].next, std::vector<int32_t>{4});
  EXPECT_EQ(graph.blocks[2].next, std::vector<int32_t>{4});
  EXPECT_EQ(graph.dominators[3], -1);
}

}  // namespace
}  // namespace tandem::machine_code
