// Compares block masks that the CPU computes with brute force, and checks the refusals of arguments.
#include <gtest/gtest.h>

#include <vector>

#include "support/blocks_case.h"

namespace tandem::test {
namespace {

void make(BlocksInstance& instance) {
  std::vector<std::byte> workspace(static_cast<size_t>(instance.blocks()));
  const tandem_block_mask_args args = instance.args();
  EXPECT_EQ(tandem_make_block_mask(nullptr, &args, workspace.data(), workspace.size(), nullptr), TANDEM_OK)
      << tandem_last_error();
}

TEST(CpuMakeBlocks, ByBruteForce) {
  for (const BlocksCase& c : blocks_cases()) EXPECT_EQ(check_blocks_accuracy(c, make), "") << c;
}

// The mask of this shape would not fit in memory.
TEST(CpuMakeBlocks, LongSequences) {
  BlocksInstance instance({.text = "k <= q and q - k < n * 984",
                           .seqlen_q = int64_t{1} << 20,
                           .seqlen_k = int64_t{1} << 20,
                           .block_q = 1 << 13,
                           .block_k = 1 << 13,
                           .by_keys = false});
  make(instance);
  for (int64_t row = 0; row < 128; ++row) {
    const double partial = instance.counts[0].get(row), full = instance.counts[1].get(row);
    // Full blocks end at the diagonal, and begin at the end of the window: 12 blocks and 96 keys before it.
    EXPECT_EQ(full, static_cast<double>(std::min<int64_t>(row, 11))) << row;
    EXPECT_EQ(partial, static_cast<double>(1 + std::min<int64_t>(std::max<int64_t>(row - 11, 0), 2))) << row;
  }
}

TEST(CpuMakeBlocks, WhatIsWrongIsRefused) {
  BlocksInstance instance({});
  const auto refused = [&](const char* sentence, auto&& spoil) {
    tandem_block_mask_args args = instance.args();
    size_t bytes = static_cast<size_t>(instance.blocks());
    tandem_mod mod = *args.mask_mod;
    spoil(args, mod, bytes);
    if (args.mask_mod != nullptr) args.mask_mod = &mod;
    std::vector<std::byte> workspace(static_cast<size_t>(instance.blocks()));
    EXPECT_NE(tandem_make_block_mask(nullptr, &args, workspace.data(), bytes, nullptr), TANDEM_OK) << sentence;
    EXPECT_NE(std::string(tandem_last_error()).find(sentence), std::string::npos) << tandem_last_error();
  };
  using Args = tandem_block_mask_args;
  refused("args.size (7)", [](Args& a, tandem_mod&, size_t&) { a.size = 7; });
  refused("mask_mod (NULL) must be an expression", [](Args& a, tandem_mod&, size_t&) { a.mask_mod = nullptr; });
  refused("mask_mod: column 1: 'p' is not a known name", [](Args&, tandem_mod& m, size_t&) { m.text = "p"; });
  refused("mask_mod: column 1: a mask_mod must return a bool", [](Args&, tandem_mod& m, size_t&) { m.text = "k - q"; });
  refused("batch (-1) must be 0 to 2147483647", [](Args& a, tandem_mod&, size_t&) { a.batch = -1; });
  refused("mask_block_k (0) must be at least 1", [](Args& a, tandem_mod&, size_t&) { a.mask_block_k = 0; });
  refused("must be at most 2^40", [](Args& a, tandem_mod&, size_t&) {
    a.seqlen_q = a.seqlen_k = INT32_MAX, a.mask_block_q = a.mask_block_k = 1;
  });
  refused("kv_indices (NULL) must be given", [](Args& a, tandem_mod&, size_t&) { a.kv_indices = nullptr; });
  refused("full_q_indices (NULL) must be given", [](Args& a, tandem_mod&, size_t&) { a.full_q_indices = nullptr; });
  refused("full_q_num_blocks must be NULL",
          [](Args& a, tandem_mod&, size_t&) { a.full_kv_num_blocks = a.full_kv_indices = nullptr; });
  refused("kv_num_blocks.blocks (3) must be 1", [](Args& a, tandem_mod&, size_t&) { a.mask_block_q = 300; });
  refused("kv_indices.ndim (1) must be 4",
          [&](Args& a, tandem_mod&, size_t&) { a.kv_indices = instance.slope.describe(); });
  refused("q_indices.data overlaps kv_indices", [](Args& a, tandem_mod&, size_t&) { a.q_indices = a.kv_indices; });
  refused("workspace_bytes (8) must be at least 9", [](Args&, tandem_mod&, size_t& bytes) { bytes = 8; });
}

}  // namespace
}  // namespace tandem::test
