// A GPU behind the C interface: plans a call, has its kernel compiled once, and puts it on the caller's stream.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/nvtx.h"
#include "gpu/device.h"
#include "jit/builder.h"
#include "plan/forward.h"
#include "problem/problem.h"
#include "problem/status.h"

namespace tandem {

// What is compiled of a tile for a device.
jit::Request request_of(const plan::Tile& tile, const gpu::Properties& device);

// May be used by several threads at once.
class GpuEngine {
 public:
  // name: the device's, "cuda:0", for messages.
  GpuEngine(std::string name, std::unique_ptr<gpu::Device> device, jit::Env env, jit::Cache::Options cache);
  ~GpuEngine();

  gpu::Device& device() { return *device_; }
  const std::string& description() const { return description_; }

  Status check(const Problem& problem) const;
  // The problem is checked, and has something to write, in what follows.
  plan::ForwardPlan plan(const Problem& problem) const;
  Status prepare(const Problem& problem);
  // workspace: as many bytes as the plan says. No allocation, no lock and no synchronisation once the kernel is there
  // (but for Problem::validate, which synchronises).
  Status run(const Problem& problem, const plan::ForwardPlan& plan, void* workspace, gpu::Stream stream);

 private:
  struct Compiled;

  const Compiled* find(const plan::Tile& tile) const;
  Status compile(const plan::Tile& tile, const Compiled** compiled);
  Status check_values(const Problem& problem, gpu::Stream stream);
  void log(const Problem& problem, const plan::ForwardPlan& plan, const Compiled& compiled) const;

  const std::string name_;
  const std::unique_ptr<gpu::Device> device_;
  jit::Builder builder_;
  const bool logging_;
  const nvtx::Tool* const watching_;
  std::string description_;

  // Kernels are added and never removed: a list of each bucket is read without a lock.
  static constexpr size_t kBuckets = 64;
  std::atomic<const Compiled*> kernels_[kBuckets] = {};
  std::mutex adding_;
  std::vector<std::unique_ptr<const Compiled>> owned_;
};

}  // namespace tandem
