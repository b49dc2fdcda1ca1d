// Who computes a call: the CPU engine, the oracle, a GPU.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"
#include "gpu/device.h"
#include "problem/make_blocks.h"
#include "problem/merge.h"
#include "problem/problem.h"

namespace tandem {

// The caller's scratch memory.
struct CallWorkspace {
  const tandem_attention_args& args;
  tandem_pass pass;
  void* data;
  size_t bytes;

  // Whether it will do for a call that needs so many bytes.
  Status check(size_t needed) const;
};

// May be used by several threads at once. A Problem that comes in is valid; one that is not only checked has been
// accepted by check() and has something to write.
class Engine {
 public:
  Engine() = default;
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual std::string description() const = 0;

  // Why this engine cannot serve the problem, or ok.
  virtual Status check(const Problem& problem) const = 0;
  virtual Status check_stream(void* stream) const = 0;

  virtual size_t workspace_size(const Problem& problem) const = 0;
  // Has all that a call waits for the first time.
  virtual Status prepare(const Problem& problem) = 0;
  virtual Status run(const Problem& problem, const CallWorkspace& workspace, void* stream) = 0;

  // Refuses what it does not serve; nothing has been written then.
  virtual Status merge(const MergeProblem& problem, void* stream) = 0;
  virtual Status prepare_merge() = 0;

  // workspace: a byte for each block. Refuses what it does not serve; nothing has been written then.
  virtual Status make_blocks(const MakeBlocksProblem& problem, std::byte* workspace, void* stream) = 0;
  virtual Status prepare_make_blocks(const MakeBlocksProblem& problem) = 0;

  // The GPU behind it, or null.
  virtual gpu::Device* device() { return nullptr; }
};

}  // namespace tandem
