// Shared prefixes: the results of a cascade must be the results of each request alone.
#include <gtest/gtest.h>

#include <functional>

#include "support/cascade_case.h"
#include "tandem/tandem.h"

namespace tandem::test {
namespace {

void cascade_on_cpu(CascadeInstance& x) {
  size_t bytes = 0;
  ASSERT_EQ(tandem_cascade_workspace_size(nullptr, &x.args, &bytes), TANDEM_OK) << tandem_last_error();
  std::vector<unsigned char> workspace(bytes + 1, 0xff);
  ASSERT_EQ(tandem_cascade(nullptr, &x.args, workspace.data(), bytes, nullptr), TANDEM_OK) << tandem_last_error();
  EXPECT_EQ(workspace[bytes], 0xff);
}

TEST(CpuCascade, EveryCase) {
  for (const CascadeCase& c : cascade_cases()) EXPECT_EQ(check_cascade(c, cascade_on_cpu), "") << c.flags;
  // The rule allows a single float64 lse no error, but the merge rounds once more.
  for (const char* type : {"f32", "f64 --lse 0"}) {
    CascadeCase c = cascade_cases()[0];
    c.flags += std::string("--dtype ") + type;
    EXPECT_EQ(check_cascade(c, cascade_on_cpu), "") << type;
  }
}

// Runs a changed call, which must be refused by this sentence before anything is written.
void expect_refused(const std::function<void(CascadeInstance&)>& change, const std::string& sentence) {
  const CascadeCase c = cascade_cases()[0];
  Instance in(from_flags(c.flags));
  Outputs outputs = in.outputs(TANDEM_FORWARD);
  CascadeInstance x(c, in, outputs);
  const uint64_t before = outputs.out.fingerprint();
  std::vector<std::byte> workspace(1 << 20);
  change(x);
  EXPECT_NE(tandem_cascade(nullptr, &x.args, workspace.data(), workspace.size(), nullptr), TANDEM_OK) << sentence;
  EXPECT_EQ(std::string(tandem_last_error()).find(sentence), 0u) << tandem_last_error();
  EXPECT_EQ(outputs.out.fingerprint(), before);
}

TEST(CpuCascade, BadGroupsAreRefused) {
  expect_refused([](auto& x) { x.args.size = 8; }, "args.size (8) must be sizeof(tandem_cascade_args)");
  expect_refused([](auto& x) { x.args.own = nullptr; }, "own (NULL) must point to a tandem_attention_args");
  expect_refused([](auto& x) { x.args.cu_seqlens_group = nullptr; }, "cu_seqlens_group (NULL) must be a tensor");
  expect_refused([](auto& x) { x.args.group_page_table = nullptr; }, "group_page_table (NULL) must be a tensor");
  expect_refused([](auto& x) { x.own_args.page_table = nullptr; }, "page_table (NULL) must be a tensor");
  expect_refused([](auto& x) { x.own_args.window = TANDEM_WINDOW_LEFT; }, "window (not 0) must be 0 with shared keys");
  expect_refused([](auto& x) { x.own_args.alibi_slopes = x.own_args.lse; }, "alibi_slopes (not NULL) must be NULL");
  expect_refused([](auto& x) { x.args.max_rows_group = -1; }, "max_rows_group (-1) must be at least 0");
  expect_refused([](auto& x) { x.args.max_rows_group = 2; }, "max_rows_group (2) must be at least 3");
  expect_refused([](auto& x) { x.cu_seqlens_group.set(3, 4); }, "cu_seqlens_group[3] (4) must equal the last entry");
  expect_refused([](auto& x) { x.cu_seqlens_group.set(1, 7); }, "cu_seqlens_group");
  expect_refused([](auto& x) { x.group_seqused_k.set(0, 300); }, "group_seqused_k[0] (300)");
  expect_refused([](auto& x) { x.group_page_table.set(0, 10000); }, "group_page_table");
  expect_refused([](auto& x) { x.args.group_page_table = x.own_args.seqused_k; }, "group_page_table");
}

// A group may not end within a request.
TEST(CpuCascade, GroupsAreWholeRequests) {
  const CascadeCase c = cascade_cases()[4];
  Instance in(from_flags(c.flags));
  Outputs outputs = in.outputs(TANDEM_FORWARD);
  CascadeInstance x(c, in, outputs);
  x.cu_seqlens_group.set(1, 20);
  std::vector<std::byte> workspace(1 << 20);
  EXPECT_EQ(tandem_cascade(nullptr, &x.args, workspace.data(), workspace.size(), nullptr), TANDEM_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(tandem_last_error()).find("cu_seqlens_group[1] (20) must be an entry of cu_seqlens_q"), 0u)
      << tandem_last_error();
}

TEST(CpuCascade, WorkspaceIsChecked) {
  const CascadeCase c = cascade_cases()[0];
  Instance in(from_flags(c.flags));
  Outputs outputs = in.outputs(TANDEM_FORWARD);
  CascadeInstance x(c, in, outputs);
  size_t bytes = 0;
  ASSERT_EQ(tandem_cascade_workspace_size(nullptr, &x.args, &bytes), TANDEM_OK);
  EXPECT_EQ(tandem_cascade(nullptr, &x.args, nullptr, bytes - 1, nullptr), TANDEM_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(tandem_cascade(nullptr, &x.args, nullptr, bytes, nullptr), TANDEM_INVALID_ARGUMENT);
  EXPECT_EQ(tandem_cascade(nullptr, &x.args, outputs.out.storage().data(), bytes, nullptr), TANDEM_INVALID_ARGUMENT);
  std::vector<std::byte> workspace(bytes);
  tandem_tensor lengths = *x.args.group_seqused_k;
  lengths.data = workspace.data();
  x.args.group_seqused_k = &lengths;
  EXPECT_EQ(tandem_cascade(nullptr, &x.args, workspace.data(), bytes, nullptr), TANDEM_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tandem_last_error()).find("overlaps group_seqused_k"), std::string::npos)
      << tandem_last_error();
}

}  // namespace
}  // namespace tandem::test
