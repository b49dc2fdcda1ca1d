// Every rule of a merge is broken once, and valid merges are accepted.
#include "problem/merge.h"

#include <gtest/gtest.h>

#include "unit/problem/call.h"

namespace tandem::test {
namespace {

struct Merge {
  Held part_out[2], part_lse[2], out, lse;
  const tandem_tensor *outs[2], *lses[2];
  tandem_merge_args args{};

  Merge() {
    for (int n = 0; n < 2; ++n) {
      part_out[n].make({2, 3, 4, 8}, n == 0 ? kF32 : kBf16);
      part_lse[n].make({2, 4, 3}, kF32);
      outs[n] = &part_out[n].handle;
      lses[n] = &part_lse[n].handle;
    }
    out.make({2, 3, 4, 8}, kF32);
    lse.make({2, 4, 3}, kF32);
    args.size = sizeof args;
    args.parts = 2;
    args.part_out = outs;
    args.part_lse = lses;
    args.out = &out.handle;
    args.lse = &lse.handle;
  }
  Merge(const Merge&) = delete;

  std::string refusal() const {
    MergeProblem problem;
    const Status status = make_merge_problem(&args, {TANDEM_CPU, 0}, &problem);
    return status.ok() ? "accepted" : status.message;
  }
};

struct Rule {
  void (*spoil)(Merge&);
  const char* says;
};

const Rule rules[] = {
    {[](Merge& m) { m.args.size = 0; }, "args.size (0) must be sizeof(tandem_merge_args)"},
    {[](Merge& m) { m.args.parts = 0; }, "parts (0) must be at least 1"},
    {[](Merge& m) { m.args.parts = -1; }, "parts (-1) must be at least 1"},
    {[](Merge& m) { m.args.part_out = nullptr; }, "part_out (NULL) must point to parts (2) tensors"},
    {[](Merge& m) { m.args.part_lse = nullptr; }, "part_lse (NULL) must point to parts (2) tensors"},
    {[](Merge& m) { m.args.out = nullptr; }, "out (NULL) must be a tensor"},
    {[](Merge& m) { m.outs[1] = nullptr; }, "part_out[1] (NULL) must be a tensor"},
    {[](Merge& m) { m.lses[0] = nullptr; }, "part_lse[0] (NULL) must be a tensor"},
    {[](Merge& m) {
       m.out.make({24, 8}, kF32);
     },
     "out.ndim (2) must be 4"},
    {[](Merge& m) {
       m.part_out[1].make({2, 3, 4, 9}, kF32);
     },
     "part_out[1].head_dim (9) must equal out.head_dim (8)"},
    {[](Merge& m) {
       m.part_out[0].make({6, 4, 8}, kF32);
     },
     "part_out[0].ndim (3) must be 4"},
    {[](Merge& m) {
       m.part_lse[1].make({2, 3, 4}, kF32);
     },
     "part_lse[1].heads (3) must equal out.heads (4)"},
    {[](Merge& m) {
       m.part_lse[1].make({2, 4, 3}, kBf16);
     },
     "part_lse[1].dtype (bfloat16) must be float32"},
    {[](Merge& m) {
       m.lse.make({2, 4, 3}, kF64);
     },
     "lse.dtype (float64) must be float32"},
    {[](Merge& m) {
       m.out.make({2, 3, 4, 8}, kI32);
     },
     "out.dtype (int32) must be"},
    {[](Merge& m) {
       m.out.make({2, 3, 4, 8}, kF64);
     },
     "part_out[0].dtype (float32) must be float64"},
    {[](Merge& m) {
       m.part_out[0].make({2, 3, 4, 8}, kF64);
     },
     "part_out[0].dtype (float64) must be"},
    {[](Merge& m) {
       m.out.make({2, 3, 4, 600}, kF32);
     },
     "out.head_dim (600) must be 1 to 512"},
    {[](Merge& m) { m.out.handle.data = nullptr; }, "out.data (NULL)"},
    {[](Merge& m) {
       m.part_out[1].handle.device = {TANDEM_CUDA, 0};
     },
     "part_out[1].device (type 2"},
    {[](Merge& m) {
       m.part_out[1].set_strides({96, 32, 8, 2});
     },
     "part_out[1].strides[3] (2) must be 1"},
    {[](Merge& m) {
       m.out.set_strides({96, 32, 0, 1});
     },
     "make its elements overlap"},
    {[](Merge& m) { m.out.lie_in(m.part_out[0], 4); }, "out.data (byte 16 from part_out[0].data) overlaps part_out[0]"},
    {[](Merge& m) { m.lse.lie_in(m.part_lse[1], 1); }, "lse.data (byte 4 from part_lse[1].data) overlaps part_lse[1]"},
    {[](Merge& m) { m.lse.lie_in(m.out, 0); }, "overlaps lse"},
    {[](Merge& m) {
       m.out.make({2, 3, 4, 8}, kBf16), m.out.lie_in(m.part_out[0], 0);
     },
     "overlaps part_out[0]"},
};

TEST(MergeRules, EachIsRefusedWithASentence) {
  for (const Rule& rule : rules) {
    Merge merge;
    ASSERT_EQ(merge.refusal(), "accepted");
    rule.spoil(merge);
    EXPECT_NE(merge.refusal().find(rule.says), std::string::npos) << merge.refusal() << "\n  wanted: " << rule.says;
  }
  MergeProblem problem;
  EXPECT_NE(make_merge_problem(nullptr, {TANDEM_CPU, 0}, &problem).message.find("args (NULL)"), std::string::npos);
}

TEST(MergeRules, InPlaceIsAccepted) {
  Merge merge;
  merge.out.lie_in(merge.part_out[0], 0);
  merge.lse.lie_in(merge.part_lse[0], 0);
  EXPECT_EQ(merge.refusal(), "accepted");
  merge.args.lse = nullptr;
  EXPECT_EQ(merge.refusal(), "accepted");
}

TEST(MergeRules, ViewsOfParts) {
  Merge merge;
  MergeProblem m;
  ASSERT_TRUE(make_merge_problem(&merge.args, {TANDEM_CPU, 0}, &m).ok());
  EXPECT_EQ(m.rows(), 24);
  EXPECT_EQ(m.part(1).out.dtype, DType::bf16);
  EXPECT_EQ(m.part(1).out.batch, 96);
  EXPECT_EQ(m.part(1).out.row, 32);
  EXPECT_EQ(m.part(1).lse.head, 3);
  EXPECT_EQ(m.part(1).lse.row, 1);
}

}  // namespace
}  // namespace tandem::test
