// The GPU engine: plans a call, compiles each kernel once, and launches it on the caller's stream.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "engine/engine.h"
#include "engine/launch.h"
#include "engine/nvtx.h"
#include "gpu/device.h"
#include "jit/builder.h"
#include "plan/plan.h"
#include "problem/problem.h"

namespace tandem {

// The compile request of a kernel for a device.
jit::Request request_of(const plan::PlannedKernel& kernel, const gpu::Properties& device);
jit::Request request_of(std::string name, std::string source, const gpu::Properties& device);

class GpuEngine final : public Engine {
 public:
  // name: the name of the device in messages, such as "cuda:0".
  GpuEngine(std::string name, std::unique_ptr<gpu::Device> device, Env env, jit::Cache::Options cache);
  ~GpuEngine() override;

  std::string description() const override { return description_; }
  gpu::Device* device() override { return device_.get(); }

  Status check(const Problem& problem) const override;
  Status check_stream(void*) const override { return {}; }  // every stream belongs to the device
  size_t workspace_size(const Problem& problem) const override;
  Status prepare(const Problem& problem) override;
  Status prepare_serving(const Problem& problem) override;
  // Does not allocate, lock or synchronise once the kernels are loaded. Only Problem::validate synchronises.
  Status run(const Problem& problem, const CallWorkspace& workspace, void* stream) override;
  Status merge(const MergeProblem& problem, void* stream) override;
  Status prepare_merge() override;
  Status append_kv(const AppendKvProblem& problem, void* stream) override;
  Status prepare_append_kv() override;
  Status make_blocks(const MakeBlocksProblem& problem, std::byte* workspace, void* stream) override;
  Status prepare_make_blocks(const MakeBlocksProblem& problem) override;

  // For tests: sets the constants of later plans.
  void set_tuning(const plan::Tuning& tuning) { tuning_ = tuning; }

 private:
  struct Compiled;
  using Kernels = FixedVector<const Compiled*, plan::kMaxKernels>;

  const Compiled* find(uint64_t id) const;
  Kernels find(const plan::Plan& plan) const;
  Status compile(const plan::Plan& plan, Kernels* kernels);
  void build_all(std::span<const jit::Request> requests);
  Status compile(uint64_t id, const jit::Request& request, std::span<const plan::KernelEntry> entries,
                 const Compiled** compiled);
  Status compile_merge(const Compiled** compiled);
  Status compile_append_kv(const Compiled** compiled);
  Status compile_make_blocks(const MakeBlocksProblem& problem, const Compiled** compiled);
  Status refuse_while_capturing(const std::string& kernel, const char* remedy, gpu::Stream stream);
  Status check_values(const Problem& problem, gpu::Stream stream);
  void log(const Problem& problem, const plan::Plan& plan, const std::string& kernel) const;

  const std::string name_;
  const std::unique_ptr<gpu::Device> device_;
  const bool logging_;
  plan::Tuning tuning_;  // with the switches of the environment
  jit::KernelBuilder builder_;
  const nvtx::Tool* const watching_;
  std::string description_;

  // Kernels are added and never removed, so each bucket's list is read without a lock.
  static constexpr size_t kBuckets = 64;
  std::atomic<const Compiled*> kernels_[kBuckets] = {};
  std::mutex adding_;
  std::vector<std::unique_ptr<const Compiled>> owned_;
};

}  // namespace tandem
