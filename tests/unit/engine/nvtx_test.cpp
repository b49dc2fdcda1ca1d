// NVTX ranges for tools that observe a process: every call on a GPU is a range, named after its kernel.
#include "engine/nvtx.h"

#include <cstdlib>
#include <fstream>

#include "unit/engine/gpu_call.h"

namespace tandem::test {
namespace {

class Nvtx : public GpuCalls {
 protected:
  // A process loads its tool when it opens its first GPU, so that all tests use the same file.
  static void SetUpTestSuite() {
    static const TemporaryFolder kept;
    file = kept.path() + "/ranges";
    setenv("NVTX_INJECTION64_PATH", RECORDING_NVTX, 1);
    setenv("TANDEM_TEST_NVTX", file.c_str(), 1);
  }
  void SetUp() override {
    GpuCalls::SetUp();
    std::remove(file.c_str());
  }
  static std::vector<std::string> lines() {
    std::vector<std::string> all;
    std::ifstream stream(file);
    for (std::string line; std::getline(stream, line);) all.push_back(line);
    return all;
  }

  static std::string file;
};
std::string Nvtx::file;

TEST_F(Nvtx, EveryCallIsARangeNamedAfterItsKernel) {
  GpuCall call;
  call.dense_on_gpu(kSmall);
  const std::string push = "push tandem: " + plan::name_of(plan_of(call).tile), pop = "pop tandem";
  runs(call);
  runs(call);
  EXPECT_EQ(lines(), (std::vector<std::string>{push, pop, push, pop}));
  call.args.causal = 1;
  runs(call);
  const std::string other = "push tandem: " + plan::name_of(plan_of(call).tile);
  EXPECT_NE(other, push);
  EXPECT_EQ(lines(), (std::vector<std::string>{push, pop, push, pop, other, pop}));
}

TEST_F(Nvtx, ACallThatIsRefusedIsNone) {
  GpuCall call;
  call.dense_on_gpu(kSmall);
  call.args.num_splits = 2;
  call.args.batch_invariant = 1;
  EXPECT_EQ(run(call), TANDEM_UNSUPPORTED);
  EXPECT_TRUE(lines().empty());
}

TEST_F(Nvtx, LibrariesThatAreNoToolsAreLeftAlone) {
  EXPECT_EQ(nvtx::attach("/nowhere/libtool.so").push, nullptr);
  EXPECT_EQ(nvtx::attach(FAKE_NVRTC).push, nullptr);
  setenv("TANDEM_TEST_NVTX", "refuse", 1);
  const nvtx::Tool refusing = nvtx::attach(RECORDING_NVTX);
  setenv("TANDEM_TEST_NVTX", file.c_str(), 1);
  EXPECT_EQ(refusing.push, nullptr);
  const nvtx::Range nothing(nullptr, "nothing");
  EXPECT_TRUE(lines().empty());
}

}  // namespace
}  // namespace tandem::test
