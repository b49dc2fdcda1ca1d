#include "vgpu/tests/mutation/subject.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "base/text.h"
#include "engine/gpu.h"
#include "engine/launch.h"
#include "jit/compiler.h"
#include "reference/reference.h"
#include "support/check_accuracy.h"
#include "support/gpu.h"
#include "support/instance.h"
#include "vgpu/src/check/checker.h"

namespace tandem::test {
namespace {

constexpr uint64_t kMaxInstructions = 4'000'000;  // limit of instructions: a kernel that does not end

void add_places(const vgpu::Program& program, const vgpu::Accessor& party, Found* found) {
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
  Found found{std::string(name_of(finding.rule)),
              report(program, finding),
              {},
              grade_of(finding.rule) == vgpu::Grade::spec_only};
  add_places(program, finding.party, &found);
  add_places(program, finding.other, &found);
  for (const int32_t other : finding.others) add_places(program, {.instruction = other, .what = {}}, &found);
  // The table of a deadlock has places for each warp.
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
    made.first = jit::Compiler::open({}, Env::get(), &made.second);
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

namespace {

// A changed text has its own storage.
bool is_unchanged(const std::vector<jit::Text>& headers) {
  return std::ranges::all_of(headers, [](const jit::Text& header) {
    return jit::source(header.name).value_or("").data() == header.text.data();
  });
}

// Small problems have several chunks of dS, a tile before the split n_blocks, and splits of the keys only by num_splits
// and batch_invariant.
plan::Tuning small_problems() {
  plan::Tuning tuning;
  tuning.sm90.backward.min_ds_bytes = tuning.sm90.backward.two_head_tile_min_tiles = 0;
  tuning.sm90.backward.unsplit_tiles = 1;
  tuning.sm90.forward_order.worth = tuning.sm100.forward_order.worth = 0;
  tuning.sm90.forward_order.invariant_split_keys = tuning.sm100.forward_order.invariant_split_keys = 64;
  return tuning;
}

}  // namespace

Subject::Subject(std::string flags, int blocks, std::string device)
    : device_(std::move(device)),
      case_(from_flags("--gradients none --align 8 " + flags)),
      pass_(case_.gradients.empty() ? TANDEM_FORWARD : TANDEM_BACKWARD),
      blocks_(blocks) {
  Instance of_call(case_);
  Outputs outputs = of_call.outputs(pass_);
  const std::unique_ptr<gpu::Device> opened = open({});
  const Problem problem = of_call.problem(pass_, &outputs);
  require(plan::check(problem, opened->properties()));
  plan_ = plan::make_plan(problem, opened->properties(), small_problems());
  for (plan::PlannedLaunch& launch : plan_.launches) {
    // With cluster launch control the grid has one block per tile.
    if (launch.kernel == 0 && launch.entry == plan::EntryId::main &&
        !(pass_ == TANDEM_FORWARD && plan_.forward.tile.clc()))
      launch.grid = std::min(launch.grid, static_cast<uint32_t>(blocks));
  }
}

// The call's tensors. A backward receives the reference's results of the forward.
std::unique_ptr<Instance> Subject::instance() const {
  auto made = std::make_unique<Instance>(case_);
  if (pass_ == TANDEM_FORWARD) return made;
  Outputs outputs = made->outputs(TANDEM_FORWARD), exact = made->exact_outputs(TANDEM_FORWARD);
  reference::forward(with_outputs(made->problem(TANDEM_FORWARD, &outputs), &exact));
  made->give_results(&exact);
  return made;
}

Status Subject::compile(jit::Sources sources, std::vector<std::string>* ptx) const {
  const std::unique_ptr<gpu::Device> device = open({});
  for (size_t n = 0; n < plan_.kernels.size(); ++n) {
    const jit::Request request = request_of(plan_.kernels[n], device->properties());
    const std::vector<jit::Text> headers = jit::included_by(request.source, sources);
    const bool unchanged = is_unchanged(headers);
    if (const auto known = unchanged_.find(n); unchanged && known != unchanged_.end()) {
      ptx->push_back(known->second);
      continue;
    }
    std::string log;
    TANDEM_TRY(compiler().second->compile(request, headers, &ptx->emplace_back(), &log));
    if (unchanged) unchanged_[n] = ptx->back();
  }
  return {};
}

Status Subject::launch(const Problem& problem, const std::vector<std::string>& ptx, vgpu::Options options) const {
  options.run.max_instructions = kMaxInstructions;
  const std::unique_ptr<gpu::Device> device = open(std::move(options));
  std::vector<LoadedKernel> loaded(plan_.kernels.size());
  std::vector<const LoadedKernel*> kernels;
  for (size_t n = 0; n < loaded.size(); ++n) {
    TANDEM_TRY(load(*device, plan_.kernels[n], std::as_bytes(std::span(ptx[n])), &loaded[n]));
    kernels.push_back(&loaded[n]);
  }
  const DeviceMemory workspace(*device, plan_.workspace_bytes + 256);
  return tandem::launch(*device, problem, plan_, kernels, workspace.at(0), nullptr);
}

Trial Subject::run(const std::vector<std::string>& ptx, int n, bool judges) const {
  Trial trial;
  vgpu::Options options;
  options.run.schedule = vgpu::Schedule::nth(n);
  options.run.threads = 1;
  options.run.placement = static_cast<uint64_t>(n);
  options.report = [&](const vgpu::Outcome& outcome) {
    for (const vgpu::Finding& finding : outcome.findings) trial.found.push_back(found_of(outcome.program, finding));
  };
  if (judges) {
    const Verdict verdict = run_case(case_, [&](const EngineCall& call) {
      if (call.pass == pass_) {
        require(launch(call, ptx, options));
      } else {
        reference::forward(call);
      }
    });
    trial.failure = verdict.refusal.empty() ? verdict.failure : verdict.refusal;
    return trial;
  }
  const std::unique_ptr<Instance> of_call = instance();
  Outputs outputs = of_call->outputs(pass_);
  trial.failure = launch(of_call->problem(pass_, &outputs), ptx, options).message;
  return trial;
}

std::set<int> Subject::executed(const std::vector<std::string>& ptx, const char* entry) const {
  std::set<int> lines, of_others;
  vgpu::Options options;
  options.run.threads = 1;
  options.observe = [&](const vgpu::LaunchDescription& launch, const vgpu::Model&) {
    const bool has_entry = launch.program->module().find(entry) != nullptr;
    return std::make_unique<Coverage>(*launch.program, has_entry ? &lines : &of_others);
  };
  const std::unique_ptr<Instance> of_call = instance();
  Outputs outputs = of_call->outputs(pass_);
  require(launch(of_call->problem(pass_, &outputs), ptx, std::move(options)));
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
