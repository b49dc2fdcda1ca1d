// Merging on a GPU.
#include "kernels/on_gpu.h"
#include "support/merge_case.h"

namespace tandem::test {
namespace {

// Copies the tensors to the GPU, merges there, and copies the results back.
void merge_on(const Gpu& gpu, MergeInstance& instance) {
  tandem_merge_args args = instance.args();
  DeviceCopies copies(gpu, instance.tensors());
  std::vector<const tandem_tensor*> outs, lses;
  for (int64_t n = 0; n < args.parts; ++n) {
    outs.push_back(copies.of(args.part_out[n]));
    lses.push_back(copies.of(args.part_lse[n]));
  }
  args.part_out = outs.data();
  args.part_lse = lses.data();
  args.out = copies.of(args.out);
  args.lse = copies.of(args.lse);
  if (tandem_merge(gpu.context(), &args, gpu.stream()) != TANDEM_OK) throw std::runtime_error(tandem_last_error());
  copies.fetch();
}

std::string judged(const MergeCase& c) {
  try {
    return check_merge_accuracy(c, [](MergeInstance& instance) { merge_on(*the_gpu(), instance); });
  } catch (const std::exception& error) {
    return error.what();
  }
}

TEST(KernelsMerge, ByTheJudge) {
  ASSERT_EQ(tandem_prepare_merge(the_gpu()->context()), TANDEM_OK) << tandem_last_error();
  for (const MergeCase& c : merge_cases()) EXPECT_EQ(judged(c), "") << c;
  const MergeCase long_one{.parts = 2, .batch = 2, .seqlen = 3000, .heads = 2, .head_dim = 64, .types = {DType::bf16}};
  EXPECT_EQ(judged(long_one), "") << long_one;
}

TEST(KernelsMerge, WhatIsNotServedIsRefused) {
  EXPECT_NE(judged({.types = {DType::f64}, .out = DType::f64}).find("out.dtype (float64) must be float32"),
            std::string::npos);
  EXPECT_NE(judged({.parts = 61, .out = DType::bf16}).find("parts (61) must be at most 60 on a GPU unless"),
            std::string::npos);
  EXPECT_NE(judged({.parts = 61, .lse = false}).find("parts (61) must be at most 60"), std::string::npos);
}

}  // namespace
}  // namespace tandem::test
