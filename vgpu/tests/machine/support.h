// Runs kernels written as PTX directly on the machine, with the host's memory.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "vgpu/src/machine/machine.h"
#include "vgpu/src/ptx/parser.h"

namespace tandem::vgpu {

inline const Model& hopper() { return *find_model("h200"); }
inline const Model& blackwell() { return *find_model("b200"); }

// Returns a kernel `k` with 64-bit parameters. body: the text between the braces.
inline std::string kernel(const std::string& body, int parameters = 1, const std::string& directives = "",
                          const std::string& before = "", const std::string& target = "sm_90a") {
  std::string text = ".version 9.0\n.target " + target + "\n.address_size 64\n" + before + "\n.visible .entry k(";
  for (int i = 0; i < parameters; ++i) text += (i > 0 ? ", " : "") + std::string(".param .u64 p") + std::to_string(i);
  return text + ") " + directives + "\n{\n" + body + "\n}\n";
}

class TestKernel {
 public:
  explicit TestKernel(const std::string& text, const Model& model = hopper()) : model_(model) {
    auto module = std::make_shared<ptx::Module>();
    status_ = ptx::parse(text, module.get());
    if (!status_.ok()) return;
    const std::string* name = nullptr;
    for (const ptx::Function& f : module->functions)
      if (f.is_entry) name = &f.name;
    if (name == nullptr) {
      status_ = Status::invalid("no kernel");
      return;
    }
    status_ = Program::decode(module, *name, model, &program_);
  }

  const Status& decoded() const { return status_; }
  const Program& program() const { return *program_; }

  Status run(std::vector<uint64_t> parameters, gpu::Dim3 grid, gpu::Dim3 block, RunOptions options = {{}, 1, 0},
             Observer* observer = nullptr, uint32_t dynamic_shared = 0, gpu::Dim3 cluster = {}) const {
    if (!status_.ok()) return status_;
    return run_bytes(std::as_bytes(std::span(parameters)), grid, block, options, observer, dynamic_shared, cluster);
  }
  Status run_bytes(std::span<const std::byte> parameters, gpu::Dim3 grid, gpu::Dim3 block,
                   RunOptions options = {{}, 1, 0}, Observer* observer = nullptr, uint32_t dynamic_shared = 0,
                   gpu::Dim3 cluster = {}) const {
    if (!status_.ok()) return status_;
    LaunchDescription launch;
    launch.program = program_.get();
    launch.grid = grid;
    launch.block = block;
    launch.cluster = cluster;
    launch.dynamic_shared_bytes = dynamic_shared;
    launch.parameters = parameters;
    return tandem::vgpu::run(launch, model_, options, observer);
  }

 private:
  const Model& model_;
  Status status_;
  std::unique_ptr<const Program> program_;
};

inline uint64_t address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

// Runs f under several schedules, on one host thread and sometimes on all cores.
template <class F>
void under_schedules(int count, F f) {
  for (int n = 0; n < count; ++n) {
    RunOptions options;
    options.schedule = Schedule::nth(n);
    options.threads = n % 4 == 3 ? 0 : 1;
    SCOPED_TRACE("schedule " + options.schedule.text());
    f(options);
  }
}

// Keeps the findings of the machine.
struct Findings : Observer {
  void finds(Finding finding) override { all.push_back(std::move(finding)); }
  bool has(Rule rule) const {
    for (const Finding& f : all)
      if (f.rule == rule) return true;
    return false;
  }
  std::vector<Finding> all;
};

}  // namespace tandem::vgpu
