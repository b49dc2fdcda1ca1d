// Tests the command's use of a GPU, and its conversion of types that a GPU does not support. The driver of
// tests/unit/gpu/fake_cuda.cpp keeps its memory on the host.
#include "cli/gpu.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "cli/compare.h"

namespace tandem::tool {
namespace {

TEST(GpusSeenTest, ListsThemAndTheDriver) {
  const GpusSeen seen = gpus_seen(FAKE_CUDA);
  EXPECT_EQ(seen.why_none, "");
  ASSERT_EQ(seen.gpus.size(), 2u);
  EXPECT_EQ(seen.gpus[1].name, "Fake 1");
  EXPECT_EQ(seen.gpus[1].memory_bytes, int64_t{80} << 30);
  EXPECT_FALSE(seen.gpus[1].served()) << "its compute capability is none there is";
  EXPECT_EQ(seen.driver_version, 12080);
}

TEST(GpusSeenTest, ReportsWhyNoGpuIsSeen) {
  const GpusSeen seen = gpus_seen("libno_such_driver.so");
  EXPECT_TRUE(seen.gpus.empty());
  EXPECT_NE(seen.why_none.find("install the driver"), std::string::npos) << seen.why_none;
}

TEST(GpuTest, KeepsWhatItIsGiven) {
  Gpu gpu("cuda:1", FAKE_CUDA);
  EXPECT_EQ(gpu.place().type, TANDEM_CUDA);
  EXPECT_EQ(gpu.place().index, 1);
  std::vector<int> sent(100), got(100);
  std::iota(sent.begin(), sent.end(), 7);
  Gpu::Memory memory(gpu, 400);
  gpu.fill(memory, 0xff);
  gpu.download(got.data(), memory, 400);
  gpu.synchronize();
  EXPECT_EQ(got, std::vector<int>(100, -1));
  gpu.upload(memory, sent.data(), 400);
  const Gpu::Memory elsewhere = std::move(memory);
  gpu.download(got.data(), elsewhere, 400);
  gpu.synchronize();
  EXPECT_EQ(got, sent);
}

TEST(GpuTest, TimesManyRunsAtOnce) {
  Gpu gpu("cuda", FAKE_CUDA);  // 1.5 ms pass between any two events of the fake
  int runs = 0;
  const double seconds = gpu.median_seconds([&] { ++runs; }, 0.075);
  EXPECT_EQ(runs, 1 + 1 + 6 * 10) << "first, measured once, then a round to warm up and five to measure";
  EXPECT_NEAR(seconds, 1.5e-3 / 10, 1e-7);
}

TEST(GpuTest, RefusesWhatIsNotThere) {
  try {
    Gpu gpu("cuda:2", FAKE_CUDA);
    FAIL() << "there are two";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), TANDEM_UNSUPPORTED);
    EXPECT_NE(std::string(error.what()).find("the driver sees 2 GPUs"), std::string::npos) << error.what();
  }
}

Inputs random_inputs(DType dtype) {
  Random random(3);
  Inputs in;
  for (Buffer* tensor : {&in.q, &in.k, &in.v, &in.dout}) *tensor = random_buffer(random, dtype, {1, 40, 2, 16});
  in.sink = random_buffer(random, DType::f32, {2});
  return in;
}

TEST(GivenTest, AGpuGetsTwoByteTypes) {
  const Given given(random_inputs(DType::f32), true);
  EXPECT_EQ(given.note(), "float32 converted to bfloat16 for the GPU");
  EXPECT_EQ(given.used().q.dtype(), DType::bf16);
  EXPECT_EQ(given.used().dout.dtype(), DType::bf16);
  EXPECT_EQ(given.used().sink.dtype(), DType::f32) << "served as it is";
  EXPECT_FALSE(given.used().bias);
  for (int64_t i = 0; i < given.original.q.count(); ++i)
    ASSERT_NEAR(given.used().q.get(i), given.original.q.get(i), 0.004 * std::fabs(given.original.q.get(i)));
}

TEST(GivenTest, NothingIsConvertedWithoutNeed) {
  EXPECT_EQ(Given(random_inputs(DType::f32), false).note(), "");
  EXPECT_EQ(Given(random_inputs(DType::f16), true).note(), "");
  Inputs mixed = random_inputs(DType::f32);
  mixed.k = mixed.k.converted(DType::bf16);
  EXPECT_EQ(Given(std::move(mixed), true).note(), "") << "the engine refuses it";
}

TEST(GivenTest, ResultsAreJudgedByTheOriginal) {
  Machine machine("cpu", 1);
  const Given given(random_inputs(DType::f32), true);
  Results results(given.used(), true, false);
  Progress progress("test", 1);
  const auto checks = check_exactness(machine, given, {.causal = true}, true, results, progress);
  EXPECT_TRUE(all_good(checks)) << exactness_table(checks);

  // With one key per row out is v. The error against the original is the loss of the conversion.
  double lost = 0;
  for (int64_t i = 0; i < 2 * 16; ++i)
    lost = std::max(lost, std::fabs(given.used().v.get(i) - given.original.v.get(i)));
  EXPECT_GE(checks[0].engine.largest, lost);
  EXPECT_GT(lost, 0);
}

TEST(BufferTest, WithoutMemoryHasTypeAndShapeOnly) {
  Inputs in;
  for (Buffer* tensor : {&in.q, &in.k, &in.v}) *tensor = Buffer::without_memory(DType::bf16, {4, 1 << 20, 64, 128});
  EXPECT_TRUE(in.q);
  EXPECT_EQ(in.q.data(), nullptr);
  const Results results(in, false, false);
  EXPECT_EQ(results.out.shape(), in.q.shape());
  EXPECT_EQ(results.out.data(), nullptr);
  EXPECT_FALSE(check(with_results(in.attention({}), results)));
}

TEST(EntryTest, WrapsLongText) {
  EXPECT_EQ(entry("name", "text", 6), "name  text\n");
  std::string words;
  for (int i = 0; i < 40; ++i) words += "seven77 ";
  words.pop_back();
  std::string text = entry("name", words, 6);
  size_t lines = 0;
  for (size_t end; (end = text.find('\n')) != std::string::npos; text.erase(0, end + 1), ++lines) EXPECT_LE(end, 98u);
  EXPECT_EQ(lines, 4u);
}

TEST(TextTest, UnitsFollowTheNumber) {
  EXPECT_EQ(si_text(0, "FLOP"), "0 FLOP");
  EXPECT_EQ(si_text(68.7e9, "FLOP"), "68.7 GFLOP");
  EXPECT_EQ(si_text(999.9, "B"), "1 kB");
  EXPECT_EQ(seconds_text(85e-9), "85 ns");
  EXPECT_EQ(seconds_text(5.63e-6), "5.6 us");
  EXPECT_EQ(rate_text(68.7e9, 64e-6), "1073 TF/s");
  EXPECT_EQ(rate_text(68.7e9, 1), "68.7 GF/s");
}

}  // namespace
}  // namespace tandem::tool
