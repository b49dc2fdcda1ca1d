// The engines on the CPU. Calls return when their work is done.
#pragma once

#include "cpu/threads.h"
#include "engine/engine.h"

namespace tandem {

class HostEngine : public Engine {
 public:
  // threads: the context's; outlives the engine.
  explicit HostEngine(cpu::Threads& threads) : threads_(threads) {}

  std::string description() const override;
  Status check_stream(void* stream) const override;
  Status prepare(const Problem&) override { return {}; }  // it is compiled already
  Status prepare_merge() override { return {}; }
  Status make_blocks(const MakeBlocksProblem& problem, std::byte* workspace, void* stream) override;
  Status prepare_make_blocks(const MakeBlocksProblem&) override { return {}; }

 protected:
  cpu::Threads& threads_;
};

// float32, bfloat16, float16.
class CpuEngine final : public HostEngine {
 public:
  using HostEngine::HostEngine;

  Status check(const Problem& problem) const override;
  size_t workspace_size(const Problem& problem) const override;
  Status run(const Problem& problem, const CallWorkspace& workspace, void* stream) override;
  Status merge(const MergeProblem& problem, void* stream) override;
};

// float64: not worth fast loops, as it is what others are judged by.
class OracleEngine final : public HostEngine {
 public:
  using HostEngine::HostEngine;

  Status check(const Problem& problem) const override;
  size_t workspace_size(const Problem&) const override { return 0; }
  Status run(const Problem& problem, const CallWorkspace& workspace, void* stream) override;
  Status merge(const MergeProblem& problem, void* stream) override;
};

}  // namespace tandem
