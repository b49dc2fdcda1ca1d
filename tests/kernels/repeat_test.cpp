// Results have the same bits in every run: repeated, next to other streams, from a graph, alone and in a batch.
#include <cstring>
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

// ---- batch_invariant ----

void copy_rows(const Tensor& from, int64_t first, Tensor& to) {
  const int64_t begin = first * (from.size() / std::max<int64_t>(from.shape()[0], 1));
  for (int64_t n = 0; n < to.size(); ++n)
    std::memcpy(to.element(n), from.element(begin + n), static_cast<size_t>(size_of(to.dtype())));
}

void scale_rows(Tensor& to, int64_t first, int64_t rows, double factor) {
  const int64_t row = to.size() / std::max<int64_t>(to.shape()[0], 1);
  for (int64_t n = first * row; n < (first + rows) * row; ++n) to.set(n, to.get(n) * factor);
}

// Compares rows from `first` on of dimension 0 of the batch's tensors with all rows of the other result's.
void expect_same_rows(const Tensor& batch, int64_t first, const Tensor& alone, const std::string& what) {
  const int64_t begin = first * (batch.size() / std::max<int64_t>(batch.shape()[0], 1));
  for (int64_t n = 0; n < alone.size(); ++n) {
    ASSERT_EQ(std::memcmp(batch.element(begin + n), alone.element(n), static_cast<size_t>(size_of(alone.dtype()))), 0)
        << what << ", element " << n << ": " << batch.get(begin + n) << " in the batch, " << alone.get(n) << " alone";
  }
}

TEST(KernelsInvariance, ASequenceOfAPackedBatchAndAlone) {
  for (const std::string dims : {"--head-dim 64 --head-dim-v 64 ", "--head-dim 128 --head-dim-v 128 "}) {
    for (const std::string more : {"--causal 1", "--left 100 --right 30 --softcap 9", ""}) {
      const std::string common =
          "--dtype bf16 --packed 1 --max-seqlen 0 --invariant 1 --heads-q 8 --heads-k 2 " + dims + more;
      Repeated batch(common + " --lengths-q 300,5,0,129,700,64 --lengths-k 300,90,7,129,8400,1");
      const Case& c = batch.instance->c;
      // The last tile of an odd sequence contains a neighbour's rows, with scores of sigma 30.
      for (size_t b = 0, q = 0; b < c.lengths_q.size(); q += static_cast<size_t>(c.lengths_q[b++]))
        if (b % 2 == 0) scale_rows(batch.instance->q, static_cast<int64_t>(q), c.lengths_q[b], 32);
      batch.run();
      for (size_t b = 0; b < c.lengths_q.size(); ++b) {
        int64_t q = 0, k = 0;
        for (size_t n = 0; n < b; ++n) q += c.lengths_q[n], k += c.lengths_k[n];
        auto in =
            std::make_unique<Instance>(from_flags(kServed + common + " --lengths-q " + std::to_string(c.lengths_q[b]) +
                                                  " --lengths-k " + std::to_string(c.lengths_k[b])));
        copy_rows(batch.instance->q, q, in->q);
        copy_rows(batch.instance->k, k, in->k);
        copy_rows(batch.instance->v, k, in->v);
        Repeated alone(std::move(in));
        alone.run();
        expect_same_rows(batch.outputs.out, q, alone.outputs.out, common + ", sequence " + std::to_string(b));
      }
    }
  }
}

TEST(KernelsInvariance, ASequenceOfADenseBatchAndAlone) {
  for (const std::string more : {"--causal 1", "--left 30 --alibi head", "--scale -0.1"}) {
    const std::string common =
        "--dtype f16 --invariant 1 --heads-q 6 --heads-k 2 --seqlen-q 210 --seqlen-k 333 --head-dim 128 --head-dim-v "
        "64 " +
        more;
    Repeated batch(common + " --batch 5");
    batch.run();
    for (int64_t b = 0; b < 5; ++b) {
      auto in = std::make_unique<Instance>(from_flags(kServed + common));
      copy_rows(batch.instance->q, b, in->q);
      copy_rows(batch.instance->k, b, in->k);
      copy_rows(batch.instance->v, b, in->v);
      if (in->alibi_slopes) copy_rows(batch.instance->alibi_slopes, 0, in->alibi_slopes);
      Repeated alone(std::move(in));
      alone.run();
      expect_same_rows(batch.outputs.out, b, alone.outputs.out, common + ", sequence " + std::to_string(b));
      expect_same_rows(batch.outputs.lse, b, alone.outputs.lse, common + ", lse of sequence " + std::to_string(b));
    }
  }
}

}  // namespace
}  // namespace tandem::test
