// The tables: types, base opcodes, special registers.
#include "vgpu/src/ptx/words.h"

#include <gtest/gtest.h>

#include "vgpu/src/ptx/module.h"

namespace tandem::test {
namespace {

using namespace vgpu::ptx;

TEST(PtxWords, TypesHaveTheirNamesAndBits) {
  for (int i = static_cast<int>(Type::pred); i <= static_cast<int>(Type::ue8m0x2); ++i) {
    const auto type = static_cast<Type>(i);
    EXPECT_EQ(type_named(name_of(type)), type) << i;
    EXPECT_GT(bits_of(type), 0) << i;
  }
  const std::pair<const char*, int> bits[] = {{"pred", 1},   {"b8", 8},      {"s16", 16},   {"u32", 32},
                                              {"f64", 64},   {"b128", 128},  {"bf16", 16},  {"f16x2", 32},
                                              {"f32x2", 64}, {"e4m3x2", 16}, {"e2m1x2", 8}, {"tf32", 32}};
  for (const auto& [name, n] : bits) EXPECT_EQ(bits_of(type_named(name)), n) << name;
  EXPECT_EQ(type_named("x2"), Type::none);
  EXPECT_EQ(bits_of(Type::none), 0);
}

TEST(PtxWords, Opcodes) {
  for (const char* word : {"abs",
                           "add",
                           "bar",
                           "barrier",
                           "clusterlaunchcontrol",
                           "cp",
                           "createpolicy",
                           "cvta",
                           "elect",
                           "fence",
                           "griddepcontrol",
                           "mbarrier",
                           "movmatrix",
                           "redux",
                           "setmaxnreg",
                           "stmatrix",
                           "szext",
                           "tcgen05",
                           "tensormap",
                           "vset4",
                           "wgmma",
                           "wmma",
                           "xor"}) {
    EXPECT_TRUE(is_opcode(word)) << word;
  }
  for (const char* word : {"", "a", "addx", "ad", "ADD", "cp.async", "zzz", "%r1"})
    EXPECT_FALSE(is_opcode(word)) << word;
}

TEST(PtxWords, SpecialRegisters) {
  for (const char* word : {"%laneid", "%clock64", "%cluster_ctarank", "%envreg0", "%envreg31", "%pm7", "%pm0_64",
                           "%reserved_smem_offset_begin", "%reserved_smem_offset_1", "%warpid"}) {
    EXPECT_TRUE(is_special_register(word)) << word;
    EXPECT_FALSE(has_components(word)) << word;
  }
  for (const char* word : {"%tid", "%nclusterid", "%cluster_nctaid"}) {
    EXPECT_TRUE(is_special_register(word)) << word;
    EXPECT_TRUE(has_components(word)) << word;
  }
  for (const char* word : {"%tix", "%envreg32", "%envreg", "%envreg01", "%pm8", "%pm_64", "%pm0_6", "laneid", "%",
                           "%reserved_smem_offset_2", "%envreg-1"}) {
    EXPECT_FALSE(is_special_register(word)) << word;
  }
}

}  // namespace
}  // namespace tandem::test
