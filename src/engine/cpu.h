// The CPU engines. Calls return when their work is complete.
#pragma once

#include "cpu/threads.h"
#include "engine/engine.h"

namespace tandem {

class HostEngine : public Engine {
 public:
  // threads: the context's threads, which must outlive the engine.
  explicit HostEngine(cpu::Threads& threads) : threads_(threads) {}

  std::string description() const override;
  Status check_stream(void* stream) const override;
  Status prepare(const Problem&) override { return {}; }  // kernels are compiled with the library
  Status prepare_serving(const Problem&) override { return {}; }
  Status prepare_merge() override { return {}; }
  Status append_kv(const AppendKvProblem& problem, void* stream) override;
  Status prepare_append_kv() override { return {}; }
  Status make_blocks(const MakeBlocksProblem& problem, std::byte* workspace, void* stream) override;
  Status prepare_make_blocks(const MakeBlocksProblem&) override { return {}; }

 protected:
  cpu::Threads& threads_;
};

// The engine of float32, bfloat16 and float16.
class CpuEngine final : public HostEngine {
 public:
  using HostEngine::HostEngine;

  Status check(const Problem& problem) const override;
  size_t workspace_size(const Problem& problem) const override;
  Status run(const Problem& problem, const CallWorkspace& workspace, void* stream) override;
  Status merge(const MergeProblem& problem, void* stream) override;
};

// The engine of float64, which favours clarity over speed because it is the reference for other engines.
class OracleEngine final : public HostEngine {
 public:
  using HostEngine::HostEngine;

  Status check(const Problem& problem) const override;
  size_t workspace_size(const Problem&) const override { return 0; }
  Status run(const Problem& problem, const CallWorkspace& workspace, void* stream) override;
  Status merge(const MergeProblem& problem, void* stream) override;
};

}  // namespace tandem
