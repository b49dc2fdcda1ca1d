#include "vgpu/mutation/subject.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "engine/gpu.h"
#include "engine/launch.h"
#include "jit/compiler.h"
#include "problem/text.h"
#include "support/gpu.h"
#include "support/instance.h"
#include "support/judge.h"
#include "vgpu/check/checker.h"

namespace tandem::test {
namespace {

constexpr uint64_t kMostInstructions = 4'000'000;  // of a block: a kernel that does not end is a finding

void add_places(const vgpu::Program& program, const vgpu::Party& party, Found* found) {
  if (party.instruction < 0) return;
  const vgpu::ptx::Module& module = program.module();
  const auto add = [&](int32_t file, int32_t line) {
    if (file >= 0) found->at.emplace(module.files[static_cast<size_t>(file)], line);
  };
  const vgpu::ptx::Location& at = program.source(party.instruction).location;
  add(at.file, at.line);
  for (int32_t i = at.inlining; i >= 0; i = module.inlinings[static_cast<size_t>(i)].outer)
    add(module.inlinings[static_cast<size_t>(i)].file, module.inlinings[static_cast<size_t>(i)].line);
}

Found found_of(const vgpu::Program& program, const vgpu::Finding& finding) {
  Found found{std::string(name_of(finding.rule)), report(program, finding), {}, is_warning(finding.rule)};
  add_places(program, finding.party, &found);
  add_places(program, finding.other, &found);
  // A deadlock's table has places for each warp.
  std::istringstream words(finding.message);
  for (std::string word; words >> word;) {
    const size_t end = word.find(".cuh:");
    if (end != std::string::npos) found.at.emplace(word.substr(0, end + 4), std::stoi(word.substr(end + 5)));
  }
  return found;
}

const std::pair<Status, std::unique_ptr<jit::Compiler>>& compiler() {
  static const auto opened = [] {
    std::pair<Status, std::unique_ptr<jit::Compiler>> made;
    made.first = jit::Compiler::open({}, jit::Env::get(), &made.second);
    return made;
  }();
  return opened;
}

class Coverage : public vgpu::Observer {
 public:
  Coverage(const vgpu::Program& program, std::set<int>* lines) : program_(program), lines_(lines) {}
  bool wants_instructions() const override { return true; }
  void executes(const vgpu::Actor& actor) override {
    if (actor.lanes != 0) lines_->insert(program_.source(actor.instruction).location.ptx_line);
  }

 private:
  const vgpu::Program& program_;
  std::set<int>* const lines_;
};

}  // namespace

void CompilerTest::SetUp() {
  const Status status = compiler().first;
  if (!status.ok()) GTEST_SKIP() << "NOT RUN, no compiler: " << status.message;
}

std::unique_ptr<gpu::Device> Subject::open(vgpu::Options options) const {
  std::unique_ptr<gpu::Device> device;
  require(vgpu::open(device_, std::move(options), &device));
  return device;
}

Subject::Subject(std::string flags, int blocks, std::string device)
    : device_(std::move(device)), case_(from_flags("--gradients none --align 8 " + flags)), blocks_(blocks) {
  Instance instance(case_);
  Outputs outputs = instance.outputs(TANDEM_FORWARD);
  const std::unique_ptr<gpu::Device> opened = open({});
  const Problem problem = instance.problem(TANDEM_FORWARD, &outputs);
  require(plan::check_forward(problem, opened->properties()));
  plan_ = plan::plan_forward(problem, opened->properties());
  if (!plan_.tile.takes_over()) plan_.grid = std::min(plan_.grid, blocks);  // else there is one for every tile
}

Status Subject::compile(jit::Sources sources, std::string* ptx) const {
  const std::unique_ptr<gpu::Device> device = open({});
  const jit::Request request = request_of(plan_.tile, device->properties());
  std::string log;
  return compiler().second->compile(request, included_by(request.source, sources), ptx, &log);
}

Status Subject::launch(const Problem& problem, const std::string& ptx, vgpu::Options options) const {
  options.run.max_instructions = kMostInstructions;
  const std::unique_ptr<gpu::Device> device = open(std::move(options));
  std::unique_ptr<gpu::Module> module;
  ForwardKernels kernels;
  TANDEM_TRY(device->load(std::as_bytes(std::span(ptx)), &module));
  TANDEM_TRY(module->find("forward", plan_.tile.shared_bytes(), &kernels.forward));
  if (plan_.tile.ragged) TANDEM_TRY(module->find("schedule", 0, &kernels.schedule));
  const DeviceMemory workspace(*device, plan_.workspace_bytes + 256);
  return launch_forward(*device, problem, plan_, kernels, workspace.at(0), nullptr);
}

Trial Subject::run(const std::string& ptx, const vgpu::Schedule& schedule, bool judges, int threads) const {
  Trial trial;
  vgpu::Options options;
  options.run.schedule = schedule;
  options.run.threads = threads;
  options.report = [&](const vgpu::Outcome& outcome) {
    for (const vgpu::Finding& finding : outcome.findings) trial.found.push_back(found_of(outcome.program, finding));
  };
  if (judges) {
    const Verdict verdict = run_case(case_, [&](const Call& call) { require(launch(call, ptx, options)); });
    trial.failure = verdict.refusal.empty() ? verdict.failure : verdict.refusal;
    return trial;
  }
  Instance instance(case_);
  Outputs outputs = instance.outputs(TANDEM_FORWARD);
  trial.failure = launch(instance.problem(TANDEM_FORWARD, &outputs), ptx, options).message;
  return trial;
}

std::set<int> Subject::executed(const std::string& ptx) const {
  std::set<int> lines;
  vgpu::Options options;
  options.run.threads = 1;
  options.observe = [&](const vgpu::LaunchDescription& launch, const vgpu::Model&) {
    return std::make_unique<Coverage>(*launch.program, &lines);
  };
  Instance instance(case_);
  Outputs outputs = instance.outputs(TANDEM_FORWARD);
  require(launch(instance.problem(TANDEM_FORWARD, &outputs), ptx, std::move(options)));
  return lines;
}

std::string Changed::replace(const std::string& file, const std::string& behind, const std::string& from,
                             const std::string& to) {
  for (jit::Text& text : texts_) {
    if (text.name != file) continue;
    std::string now(text.text);
    const size_t begin = behind.empty() ? 0 : now.find(behind);
    if (begin == std::string::npos) return "\"" + behind + "\" is not in " + file;
    const size_t at = now.find(from, begin);
    if (at == std::string::npos) return "\"" + from + "\" is not in " + file;
    if (behind.empty() && now.find(from, at + 1) != std::string::npos)
      return "\"" + from + "\" is in " + file + " twice";
    now.replace(at, from.size(), to);
    std::string& kept = changed_[file];
    kept = std::move(now);
    text.text = kept;
    return "";
  }
  return "there is no " + file;
}

std::string Changed::line(const std::string& file, int number) const {
  for (const jit::Text& text : texts_) {
    if (!file.ends_with(text.name)) continue;
    std::string_view rest = text.text;
    for (int i = 1; i < number && !rest.empty(); ++i)
      rest.remove_prefix(std::min(rest.find('\n'), rest.size() - 1) + 1);
    return std::string(rest.substr(0, rest.find('\n')));
  }
  return "";
}

}  // namespace tandem::test
