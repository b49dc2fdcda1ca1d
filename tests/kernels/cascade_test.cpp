// Shared prefixes on a GPU.
#include <cmath>
#include <memory>

#include "kernels/graph.h"
#include "kernels/on_gpu.h"
#include "support/cascade_case.h"

namespace tandem::test {
namespace {

// Copies the tensors to the GPU, runs the cascade there in a workspace of the exact size, and copies the results back.
void cascade_on(const Gpu& gpu, CascadeInstance& x) {
  DeviceCopies copies(gpu, x.tensors());
  for (const tandem_tensor** field : x.fields()) *field = copies.of(*field);
  const auto check = [](tandem_status status) {
    if (status != TANDEM_OK) throw std::runtime_error(tandem_last_error());
  };
  size_t bytes = 0;
  check(tandem_cascade_workspace_size(gpu.context(), &x.args, &bytes));
  check(tandem_prepare_cascade(gpu.context(), &x.args));
  DeviceMemory workspace(gpu.device(), bytes + 1);
  check(tandem_cascade(gpu.context(), &x.args, workspace.at(1), bytes, gpu.stream()));
  copies.fetch();
}

TEST(KernelsCascade, EveryCase) {
  for (const CascadeCase& c : cascade_cases()) {
    CascadeCase on_gpu = c;
    on_gpu.flags += " --max-seqlen 0";
    for (const auto& gpu : the_gpus())
      EXPECT_EQ(check_cascade(on_gpu, [&](CascadeInstance& x) { cascade_on(*gpu, x); }), "") << c.flags;
  }
}

// A captured call, launched as a graph, has the bits of the call.
TEST(KernelsCascade, GraphHasEqualBits) {
  const Gpu& gpu = *the_gpu();
  if (gpu.is_virtual()) GTEST_SKIP() << "a virtual GPU captures no graphs";
  CascadeCase c = cascade_cases()[1];
  c.flags += " --max-seqlen 0";
  std::vector<std::vector<std::byte>> results;
  for (const bool captured : {false, true}) {
    Instance in(from_flags(c.flags));
    Outputs outputs = in.outputs(TANDEM_FORWARD);
    CascadeInstance x(c, in, outputs);
    DeviceCopies copies(gpu, x.tensors());
    for (const tandem_tensor** field : x.fields()) *field = copies.of(*field);
    size_t bytes = 0;
    ASSERT_EQ(tandem_cascade_workspace_size(gpu.context(), &x.args, &bytes), TANDEM_OK) << tandem_last_error();
    ASSERT_EQ(tandem_prepare_cascade(gpu.context(), &x.args), TANDEM_OK) << tandem_last_error();
    DeviceMemory workspace(gpu.device(), bytes);
    std::unique_ptr<CudaGraph> graph;
    if (captured) graph = std::make_unique<CudaGraph>(gpu.stream());
    EXPECT_EQ(tandem_cascade(gpu.context(), &x.args, workspace.at(0), bytes, gpu.stream()), TANDEM_OK)
        << tandem_last_error();
    if (captured) graph->end(), graph->launch();
    copies.fetch();
    results.push_back(bytes_of(outputs.out));
    EXPECT_FALSE(std::isnan(outputs.out.get(0)));
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(KernelsCascade, PagesOfAnySizeAreRefused) {
  CascadeCase c = cascade_cases()[0];
  c.flags += "--page-size 24 --max-seqlen 0";
  EXPECT_NE(check_cascade(c, [&](CascadeInstance& x) { cascade_on(*the_gpu(), x); }).find("k.page_size (24)"),
            std::string::npos);
}

}  // namespace
}  // namespace tandem::test
