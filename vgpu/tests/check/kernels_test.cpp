// Each rule has a minimal kernel that breaks it, and a corrected twin: kernels/*.ptx. A line with the comment "broken"
// belongs only to the first kernel, and a line with "clean" only to its twin. The finding is at the line with
// "finding", or at no line: "// finding: the launch".
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

#include "vgpu/src/check/checker.h"
#include "vgpu/src/ptx/parser.h"
#include "vgpu/src/units/tensor_map.h"

namespace tandem::vgpu {
namespace {

struct CheckedKernel {
  std::string rule, text, target;
  std::set<int> lines;  // lines that the finding names; 0: the launch
  uint32_t grid = 1, cluster = 1, block = 32, shared = 0;
  std::string device = "h200";
};

// Reads "// launch: grid 2 block 64": words and numbers.
void read_launch(const std::string& line, CheckedKernel* kernel) {
  std::istringstream words(line);
  for (std::string word, value; words >> word >> value;) {
    if (word == "grid") kernel->grid = static_cast<uint32_t>(std::stoi(value));
    if (word == "cluster") kernel->cluster = static_cast<uint32_t>(std::stoi(value));
    if (word == "block") kernel->block = static_cast<uint32_t>(std::stoi(value));
    if (word == "shared") kernel->shared = static_cast<uint32_t>(std::stoi(value));
    if (word == "device") kernel->device = value;
  }
}

CheckedKernel read(const std::filesystem::path& path, bool broken) {
  CheckedKernel kernel;
  std::ifstream file(path);
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    const size_t comment = line.find("//");
    const std::string said = comment == std::string::npos ? "" : line.substr(comment + 2);
    const auto says = [&](const char* word) { return said.find(word) != std::string::npos; };
    ++number;
    if (comment == 0) {
      if (said.starts_with(" launch: ")) {
        read_launch(said.substr(9), &kernel);
      } else if (said == " finding: the launch") {
        kernel.lines.insert(0);
      } else {
        kernel.rule = said.substr(1, said.find(':') - 1);
      }
    } else if (says(broken ? "clean" : "broken")) {
      line.clear();
    } else if (says("finding")) {
      kernel.lines.insert(number);
    }
    kernel.text += line + "\n";
  }
  return kernel;
}

struct Result {
  Status status;
  std::vector<Finding> findings;
  std::string text;
  std::set<std::pair<std::string, int>> rules;  // rules of findings, with the lines that they name
};

// A tensor map of 64 numbers.
void put_map(void* numbers, void* at) {
  gpu::TensorMapSpec spec;
  spec.type = gpu::TensorType::f32;
  spec.rank = 1;
  spec.address = numbers;
  spec.dims[0] = spec.box[0] = 64;
  gpu::TensorMap map;
  const Status status = units::encode(spec, &map);
  if (!status.ok()) throw std::runtime_error(status.message);
  std::memcpy(at, &map, sizeof(map));
}

Result execute(const CheckedKernel& kernel, const Schedule& schedule) {
  Result result;
  auto module = std::make_shared<ptx::Module>();
  result.status = ptx::parse(kernel.text, module.get());
  const Model& model = *find_model(kernel.device);
  std::unique_ptr<const Program> program;
  if (result.status.ok()) result.status = Program::decode(module, "kernel", model, &program);
  if (!result.status.ok()) return result;
  alignas(128) std::array<uint64_t, 512> in{};
  in.fill(1);
  put_map(in.data(), in.data() + 480);
  std::vector<uint64_t> out(512);
  const std::vector<Buffer> buffers{{"in", in.data(), 4096, false, true},
                                    {"out", out.data(), 2048, true, false},
                                    {"counters", out.data() + 256, 2048, true, true}};
  const void* const parameters[] = {in.data(), out.data()};
  LaunchDescription launch;
  launch.program = program.get();
  launch.grid.x = kernel.grid;
  launch.block.x = kernel.block;
  launch.cluster.x = kernel.cluster;
  launch.dynamic_shared_bytes = kernel.shared;
  launch.parameters = std::as_bytes(std::span(parameters));
  const auto checker = Checker::create(launch, model, buffers, {});
  result.status =
      run(launch, model, {.schedule = schedule, .threads = 1, .max_instructions = 1'000'000}, checker.get());
  result.findings = checker->findings();
  for (const Finding& finding : result.findings) {
    result.text += report(*program, finding);
    if (finding.party.instruction < 0) result.rules.emplace(name_of(finding.rule), 0);
    std::vector<Accessor> parties{finding.party, finding.other};
    for (const int32_t other : finding.others) parties.push_back({.instruction = other});
    for (const Accessor& party : parties)
      if (party.instruction >= 0)
        result.rules.emplace(name_of(finding.rule), program->source(party.instruction).location.ptx_line);
  }
  return result;
}

bool is_by_the_letter(const std::string& name) {
  for (size_t i = 0; i < static_cast<size_t>(Rule::count); ++i)
    if (name == name_of(static_cast<Rule>(i))) return grade_of(static_cast<Rule>(i)) == Grade::spec_only;
  return false;
}

class Rules : public testing::TestWithParam<std::filesystem::path> {};

TEST_P(Rules, AreBrokenByOneTwinOnly) {
  const CheckedKernel broken = read(GetParam(), true), no_findings = read(GetParam(), false);
  ASSERT_FALSE(broken.lines.empty());
  std::string others;
  int found = 0;
  for (int n = 0; n < 8; ++n) {
    const Schedule schedule = Schedule::nth(n);
    const Result good = execute(no_findings, schedule);
    EXPECT_TRUE(good.status.ok()) << good.status.message;
    EXPECT_EQ(good.text, "") << "schedule " << schedule.text();
    const Result bad = execute(broken, schedule);
    EXPECT_FALSE(bad.findings.empty()) << bad.status.message << " schedule " << schedule.text();
    EXPECT_TRUE(bad.status.ok() || !is_by_the_letter(broken.rule)) << bad.status.message;
    for (const auto& [rule, line] : bad.rules) found += rule == broken.rule && broken.lines.contains(line);
    others += bad.status.message + "\n" + bad.text;
  }
  EXPECT_GT(found, 0) << others;
}

std::vector<std::filesystem::path> all() {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(TANDEM_RULE_KERNELS)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

INSTANTIATE_TEST_SUITE_P(Each, Rules, testing::ValuesIn(all()),
                         [](const auto& at) { return at.param.stem().string(); });

TEST(EveryRule, HasAKernel) {
  std::set<std::string, std::less<>> rules;
  for (const auto& path : all()) rules.insert(read(path, true).rule);
  for (size_t i = 0; i < static_cast<size_t>(Rule::count); ++i)
    EXPECT_TRUE(rules.contains(name_of(static_cast<Rule>(i)))) << name_of(static_cast<Rule>(i));
}

}  // namespace
}  // namespace tandem::vgpu
