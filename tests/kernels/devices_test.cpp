// Several GPUs in one process: a context on each, called in turn and from threads. A tensor on the wrong GPU is
// refused.
#include <list>
#include <thread>

#include "gpu/driver/driver.h"
#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

const std::string kCases[] = {
    "--dtype bf16 --heads-q 4 --heads-k 2 --seqlen-q 200 --seqlen-k 237 --head-dim 128 --head-dim-v 128 --causal 1",
    "--dtype f16 --packed 1 --lengths-q 130,5,0,129,64 --lengths-k 130,90,7,129,1 --max-seqlen 0 "
    "--heads-q 4 --heads-k 1 --head-dim 64 --head-dim-v 64 --causal 1",
    "--dtype f16 --heads-q 1 --heads-k 1 --seqlen-q 133 --seqlen-k 300 --head-dim 256 --head-dim-v 256"};

class KernelsDevices : public testing::Test {
 protected:
  void SetUp() override {
    std::unique_ptr<gpu::Device> second;
    if (const Status status = gpu::cuda::open("cuda:1", &second); !status.ok()) {
      GTEST_SKIP() << "NOT RUN, two GPUs are needed: " << status.message;
    }
    for (const char* name : {"cuda:0", "cuda:1"}) gpus.push_back(std::make_shared<const Gpu>(name));
    ASSERT_NE(gpus[0]->where().index, gpus[1]->where().index);
  }
  // Returns the results of a case on the first GPU, alone.
  std::vector<std::byte> expected(const std::string& flags) const {
    std::vector<std::byte> bytes = Repeated(flags, *gpus[0]).run();
    EXPECT_FALSE(std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0xff}; })) << flags;
    return bytes;
  }

  Gpus gpus;
};

TEST_F(KernelsDevices, EachHoldsTheRule) {
  for (const auto& gpu : gpus) {
    const NamedEngine engine = gpu_engine({gpu});
    for (const std::string& flags : kCases) {
      const Verdict verdict = run_case(from_flags(kServed + flags), engine.run, engine.supports);
      EXPECT_EQ(verdict.failure + verdict.refusal, "") << gpu->name();
    }
  }
}

TEST_F(KernelsDevices, InTurnsWithoutWaiting) {
  for (const std::string& flags : kCases) {
    const std::vector<std::byte> want = expected(flags);
    std::list<Repeated> calls;
    for (const auto& gpu : gpus) calls.emplace_back(flags, *gpu).call.poison_outputs();
    for (int n = 0; n < 50; ++n) {
      for (Repeated& each : calls) each.call.forward(each.gpu.stream());
    }
    for (Repeated& each : calls) EXPECT_TRUE(each.fetch(each.gpu.stream()) == want) << each.gpu.name() << ": " << flags;
  }
}

TEST_F(KernelsDevices, ThreadsThatGoFromOneToTheOther) {
  constexpr size_t kThreads = 8;
  std::vector<std::vector<std::byte>> want;
  for (const std::string& flags : kCases) want.push_back(expected(flags));
  std::vector<int> wrong(kThreads, -1);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const size_t which = t % std::size(kCases);
      gpu::Stream streams[2] = {};
      std::list<Repeated> calls;
      for (size_t g = 0; g < 2; ++g) {
        require(gpus[g]->device().create_stream(&streams[g]));
        calls.emplace_back(kCases[which], *gpus[g]);
      }
      wrong[t] = 0;
      for (size_t n = 0; n < 10; ++n) {
        size_t g = 0;
        for (Repeated& each : calls) {
          each.call.poison_outputs();
          each.call.forward(streams[g++]);
        }
        g = 0;
        for (Repeated& each : calls) wrong[t] += each.fetch(streams[g++]) != want[which];
      }
      for (size_t g = 0; g < 2; ++g) require(gpus[g]->device().destroy_stream(streams[g]));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(kThreads, 0));
}

// A tensor on the other GPU is refused with its device, and nothing is written.
TEST_F(KernelsDevices, TensorsOfTheOtherAreRefused) {
  for (const auto field :
       {&tandem_attention_args::q, &tandem_attention_args::k, &tandem_attention_args::v, &tandem_attention_args::out}) {
    Repeated here(kCases[0], *gpus[0]), there(kCases[0], *gpus[1]);
    tandem_attention_args mixed = here.call.args;
    mixed.*field = there.call.args.*field;
    here.call.poison_outputs();
    EXPECT_EQ(tandem_forward(here.gpu.context(), &mixed, here.call.workspace(), here.call.workspace_bytes(),
                             here.gpu.stream()),
              TANDEM_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tandem_last_error()).find("device"), std::string::npos) << tandem_last_error();
    for (const std::byte b : here.fetch(here.gpu.stream())) ASSERT_EQ(b, std::byte{0xff});
  }
}

}  // namespace
}  // namespace tandem::test
