// The interface of the engines that compute a call: the CPU engine, the reference, a GPU.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"
#include "gpu/device.h"
#include "problem/append_kv.h"
#include "problem/make_blocks.h"
#include "problem/merge.h"
#include "problem/problem.h"

namespace tandem {

// Returns ok if a workspace has the bytes that a call needs. remedy: the caller's, if the bytes are too few.
Status check_workspace(const void* data, size_t bytes, size_t needed, const char* remedy);
// Returns ok without a tensor in the workspace. tensor: its name, or NULL.
Status check_workspace_overlap(const char* tensor, size_t bytes);

// The caller's scratch memory.
struct CallWorkspace {
  const tandem_attention_args& args;
  tandem_pass pass;
  void* data;
  size_t bytes;

  // Returns ok if the workspace suffices for a call that needs this number of bytes.
  Status check(size_t needed) const;
};

// Several threads may use an engine at once. Every Problem is valid. All functions except check() require that check()
// accepts the problem and that it has an output.
class Engine {
 public:
  Engine() = default;
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual std::string description() const = 0;

  // Returns ok, or the reason why this engine does not support the problem.
  virtual Status check(const Problem& problem) const = 0;
  virtual Status check_stream(void* stream) const = 0;

  virtual size_t workspace_size(const Problem& problem) const = 0;
  // Prepares everything that a first call would have to wait for.
  virtual Status prepare(const Problem& problem) = 0;
  // Prepares all forwards with the problem's options and at most its lengths.
  virtual Status prepare_serving(const Problem& problem) = 0;
  virtual Status run(const Problem& problem, const CallWorkspace& workspace, void* stream) = 0;

  // Refuses unsupported calls before anything is written.
  virtual Status merge(const MergeProblem& problem, void* stream) = 0;
  virtual Status prepare_merge() = 0;

  // Refuses unsupported calls before anything is written.
  virtual Status append_kv(const AppendKvProblem& problem, void* stream) = 0;
  virtual Status prepare_append_kv() = 0;

  // workspace: one byte per block. Refuses unsupported calls before anything is written.
  virtual Status make_blocks(const MakeBlocksProblem& problem, std::byte* workspace, void* stream) = 0;
  virtual Status prepare_make_blocks(const MakeBlocksProblem& problem) = 0;

  // Returns the GPU of the engine, or null.
  virtual gpu::Device* device() { return nullptr; }
};

}  // namespace tandem
