// Results have the same bits in every run: repeated, next to other streams, from a graph.
#include <thread>

#include "kernels/graph.h"
#include "kernels/on_gpu.h"

namespace tandem::test {
namespace {

const std::string kCausal =
    "--dtype bf16 --heads-q 32 --heads-k 8 --seqlen-q 400 --seqlen-k 437 --head-dim 128 --head-dim-v 128 --causal 1";
const std::string kPacked =
    "--dtype f16 --packed 1 --lengths-q 300,5,0,129,700,64 --lengths-k 300,90,7,129,700,1 --max-seqlen 0 "
    "--heads-q 16 --heads-k 4 --head-dim 64 --head-dim-v 64 --causal 1";
const std::string kFull =
    "--dtype f16 --heads-q 8 --heads-k 8 --seqlen-q 333 --seqlen-k 600 --head-dim 256 --head-dim-v 256";

bool unwritten(const std::vector<std::byte>& bytes) {
  return std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0xff}; });
}

TEST(KernelsRepeat, AThousandTimesTheSameBits) {
  for (const std::string& flags : {kCausal, kPacked}) {
    Repeated call(flags);
    const std::vector<std::byte> first = call.run();
    ASSERT_FALSE(unwritten(first));
    for (int n = 1; n < 1000; ++n) ASSERT_TRUE(call.run() == first) << "run " << n << " of " << flags;
  }
}

// Launches follow each other without a wait: a launch must not depend on the progress of the previous one.
TEST(KernelsRepeat, BackToBack) {
  for (const std::string& flags : {kCausal, kPacked, kFull}) {
    Repeated call(flags);
    const std::vector<std::byte> first = call.run();
    call.call.poison_outputs();
    for (int n = 0; n < 200; ++n) call.call.forward(call.gpu.stream());
    EXPECT_TRUE(call.fetch(call.gpu.stream()) == first) << flags;
  }
}

TEST(KernelsRepeat, TwoStreamsAtOnce) {
  Repeated a(kCausal), b(kPacked), c(kCausal);
  const std::vector<std::byte> of_a = a.run(), of_b = b.run(), of_c = c.run();
  ASSERT_TRUE(of_a == of_c);
  const Gpu& gpu = *the_gpu();
  gpu::Stream other = nullptr;
  require(gpu.device().create_stream(&other));
  for (Repeated* call : {&a, &b, &c}) call->call.poison_outputs();
  for (int n = 0; n < 50; ++n) {
    a.call.forward(gpu.stream());
    b.call.forward(other);
    c.call.forward(other);
  }
  EXPECT_TRUE(a.fetch(gpu.stream()) == of_a);
  EXPECT_TRUE(b.fetch(other) == of_b);
  EXPECT_TRUE(c.fetch(other) == of_c);
  require(gpu.device().destroy_stream(other));
}

TEST(KernelsRepeat, ThreadsOfOneContext) {
  constexpr int kThreads = 8;
  const std::string flags[] = {kCausal, kPacked, kFull};
  std::vector<std::vector<std::byte>> expected;
  for (const std::string& one : flags) expected.push_back(Repeated(one).run());
  std::vector<int> wrong(kThreads, -1);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const Gpu& gpu = *the_gpu();
      gpu::Stream stream = nullptr;
      require(gpu.device().create_stream(&stream));
      Repeated call(flags[t % 3]);
      wrong[static_cast<size_t>(t)] = 0;
      for (int n = 0; n < 50; ++n) {
        call.call.poison_outputs();
        call.call.forward(stream);
        wrong[static_cast<size_t>(t)] += call.fetch(stream) != expected[static_cast<size_t>(t % 3)];
      }
      require(gpu.device().destroy_stream(stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(kThreads, 0));
}

TEST(KernelsGraph, AWarmCallIsCapturedAndReplayed) {
  for (const std::string& flags : {kCausal, kPacked, kFull}) {
    Repeated call(flags);
    const std::vector<std::byte> expected = call.run();
    call.call.poison_outputs();
    CudaGraph graph(call.gpu.stream());
    call.call.forward(call.gpu.stream());
    graph.end();
    EXPECT_TRUE(unwritten(call.fetch(call.gpu.stream()))) << "it ran while it was captured: " << flags;
    for (int n = 0; n < 3; ++n) {
      call.call.poison_outputs();
      for (int launches = 0; launches < 5; ++launches) graph.launch();
      EXPECT_TRUE(call.fetch(call.gpu.stream()) == expected) << flags;
    }
  }
}

TEST(KernelsGraph, AColdKernelIsRefusedInACapture) {
  const Gpu fresh("cuda:0");
  Repeated call(kCausal, fresh);
  const auto forward = [&] {
    return tandem_forward(fresh.context(), &call.call.args, call.call.workspace(), call.call.workspace_bytes(),
                          fresh.stream());
  };
  {
    CudaGraph graph(fresh.stream());
    EXPECT_EQ(forward(), TANDEM_COLD_KERNEL);
    EXPECT_NE(std::string(tandem_last_error()).find("tandem_prepare"), std::string::npos) << tandem_last_error();
    graph.end();  // the capture is still valid
    graph.launch();
    EXPECT_TRUE(unwritten(call.fetch(fresh.stream())));
  }
  call.call.prepare();
  CudaGraph graph(fresh.stream());
  EXPECT_EQ(forward(), TANDEM_OK) << tandem_last_error();
  graph.end();
  graph.launch();
  EXPECT_TRUE(call.fetch(fresh.stream()) == Repeated(kCausal).run());
}

}  // namespace
}  // namespace tandem::test
