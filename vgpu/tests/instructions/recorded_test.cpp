// The recording: comparison of results, reading of the written file, and completeness for the launches of the tests.
// Every test of this folder compares its launches.
#include <fstream>
#include <set>
#include <stdexcept>

#include "base/text.h"
#include "vgpu/tests/instructions/child.h"
#include "vgpu/tests/instructions/recording.h"

namespace tandem::test {
namespace {

const Bench& h200() {
  for (const Bench& bench : benches())
    if (bench.name == "vgpu:h200") return bench;
  throw std::runtime_error("vgpu:h200 is not there");
}

// The result of a kernel with this instruction.
struct Left {
  explicit Left(const std::string& instruction, const std::vector<uint32_t>& words) {
    kernel.body = ".reg .b32 d, a, b;\nmov.b32 a, 0;\nmov.b32 b, 0;\n" + instruction;
    kernel.memory = {Memory::in(std::vector<uint32_t>{7}), Memory::inout(words)};
    text = text_of(kernel, h200());
  }
  Record record() const { return record_of(kernel, text); }
  std::string differs_from(const Left& recorded) const { return difference(recorded.record(), record(), text); }

  BenchKernel kernel;
  std::string text;
};
std::string difference_of(const std::string& instruction, uint32_t recorded, uint32_t got) {
  return Left(instruction, {1, got}).differs_from(Left(instruction, {1, recorded}));
}

TEST(Recorded, BitsMustBeEqualButForApproximations) {
  for (const char* exact : {"add.f32 d, a, b;", "div.rn.f32 d, a, b;", "sqrt.rn.f32 d, a;", "rcp.rz.f32 d, a;"}) {
    EXPECT_EQ(difference_of(exact, 0x3f800000, 0x3f800000), "") << exact;
    EXPECT_NE(difference_of(exact, 0x3f800000, 0x3f800001), "") << exact;
    EXPECT_TRUE(Left(exact, {1, 2}).record().outputs.empty());
  }
  const char* ex2 = "ex2.approx.ftz.f32 d, a;";  // the difference may be two units of each result
  EXPECT_EQ(difference_of(ex2, 0x3f800000, 0x3f800004), "");
  EXPECT_NE(difference_of(ex2, 0x3f800000, 0x3f800005), "");
  EXPECT_NE(difference_of(ex2, 0x3f800000, 0xbf800000), "");
  EXPECT_EQ(difference_of(ex2, 0x7f800000, 0x7f7fffff), "") << "the largest number, or just beyond";
  EXPECT_NE(difference_of(ex2, 0x7f800000, 0x7f000000), "");
  EXPECT_EQ(difference_of(ex2, 0x7fc00000, 0x7fffffff), "") << "any NaN";
  EXPECT_NE(difference_of(ex2, 0x7fc00000, 0x3f800000), "");
  EXPECT_EQ(difference_of(ex2, 0x00800001, 0x00000000), "") << "one of them flushed";
  const char* tanh = "tanh.approx.bf16x2 d, a;";  // the difference may be 2^-8 of each result
  EXPECT_EQ(difference_of(tanh, 0x3f003f00, 0x3f023eff), "");
  EXPECT_NE(difference_of(tanh, 0x3f003f00, 0x3f003f03), "");
  EXPECT_NE(difference_of(tanh, 0x3f003f00, 0x3f033f00), "");
  EXPECT_NE(Left(ex2, {1, 2, 3}).differs_from(Left(ex2, {1, 2})), "") << "another size";
}

TEST(Recorded, AKeyKnowsAllThatDecidesTheResult) {
  const Left one("add.f32 d, a, b;", {1});
  std::set<uint64_t> keys = {key_of(one.kernel, one.text)};
  EXPECT_TRUE(keys.contains(key_of(one.kernel, one.text)));
  const auto changed = [&](auto change) {
    BenchKernel kernel = one.kernel;
    change(kernel);
    EXPECT_TRUE(keys.insert(key_of(kernel, text_of(kernel, h200()))).second);
  };
  changed([](BenchKernel& k) { k.body += "add.f32 d, a, b;"; });
  changed([](BenchKernel& k) { k.grid.y = 2; });
  changed([](BenchKernel& k) { k.block.y = 2; });
  changed([](BenchKernel& k) { k.cluster.y = 2; });
  changed([](BenchKernel& k) { k.dynamic_smem_bytes = 16; });
  changed([](BenchKernel& k) { k.memory[0].bytes[0] = std::byte{9}; });
  changed([](BenchKernel& k) { k.memory[0].output = true; });
  changed([](BenchKernel& k) { k.maps.resize(1); });
  changed([](BenchKernel& k) { k.maps.resize(1), k.maps[0].offset = 16; });
  changed([](BenchKernel& k) { k.maps.resize(1), k.maps[0].spec.rank = 1, k.maps[0].spec.box[0] = 16; });
}

TEST(Recorded, IsReadAsItWasWritten) {
  const TemporaryFile file;
  const Left exact("add.f32 d, a, b;", {1, 2}), close("ex2.approx.f32 d, a;", {3, 4});
  std::ofstream(file.path) << "# a remark\ndevice a GPU\ntest Some.Test\n"
                           << line_of(12, exact.record()) << "\n"
                           << line_of(~uint64_t{0}, close.record()) << "\n";
  const Recording recording = read_recording(file.path);
  EXPECT_EQ(recording.device, "a GPU");
  ASSERT_EQ(recording.records.size(), 2u);
  EXPECT_EQ(recording.records.at(12).digest, exact.record().digest);
  EXPECT_TRUE(recording.records.at(12).outputs.empty());
  EXPECT_TRUE(recording.records.at(~uint64_t{0}).outputs == close.kernel.memory[1].bytes);
  std::ofstream(file.path, std::ios::app) << "0123 no digest\n";
  EXPECT_THROW(read_recording(file.path), std::runtime_error);
}

// Records the virtual GPU, and then compares with a wrong bit in the record.
TEST(Recorded, AnotherResultFailsItsTest) {
  const TemporaryFile file;
  const std::string test = "Barrier.Reduces:Float.ApproximationsOfSpecialValues";
  const std::string read = str_cat(kRecordedVariable, "='", file.path, "'");
  ASSERT_TRUE(run_self(str_cat(kRecordVariable, "='", file.path, "' ", kRecordDeviceVariable, "=vgpu:h200"), test));
  EXPECT_GT(read_recording(file.path).records.size(), 10u);
  EXPECT_TRUE(run_self(read, test));
  std::vector<std::string> lines = file.lines();
  ASSERT_EQ(lines[0], "test Barrier.Reduces");
  char& digit = lines[1].back();
  digit = digit == '0' ? '1' : '0';
  std::ofstream again(file.path);
  for (const std::string& line : lines) again << line << "\n";
  again.close();
  EXPECT_FALSE(run_self(read, test));
}

// A stale recording would compare nothing and would not fail.
TEST(Recorded, HoldsWhatTheTestsLaunch) {
  const Recording& recording = the_recording();
  if (recording.records.empty())
    GTEST_SKIP() << recording.path << " is not there, so that nothing is compared with a real GPU: tools/gpu/record.sh "
                 << "makes it, on a Hopper GPU";
  std::set<uint64_t> launched;
  for (const std::string& line : listed())
    if (line.starts_with("key ")) launched.insert(std::stoull(line.substr(4), nullptr, 16));
  ASSERT_GT(launched.size(), 1000u);
  size_t found = 0;
  for (const uint64_t key : launched) found += recording.records.count(key);
  std::printf("Recorded on %s: %zu of %zu launches, and %zu that no test makes.\n", recording.device.c_str(), found,
              launched.size(), recording.records.size() - found);
  EXPECT_GE(found, launched.size() * 95 / 100) << "tests have changed since: run tools/gpu/record.sh again";
}

}  // namespace
}  // namespace tandem::test
