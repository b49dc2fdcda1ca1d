// An engine of the public interface, on the CPU or on a GPU, and calls with tensors in its memory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/call.h"
#include "cli/gpu.h"

namespace tandem::tool {

// An engine that keeps a workspace from call to call.
class ToolEngine {
 public:
  ToolEngine(const std::string& device, int threads);

  bool on_gpu() const { return gpu_ != nullptr; }
  bool emulated() const { return emulated_; }  // a virtual GPU, which runs by the CPU's clock
  const Context& context() const { return context_; }
  size_t workspace_bytes() const { return needed_; }  // maximum of any call since the last release
  void release_workspace();

  // Returns the reason why the engine would refuse a call of these inputs, or nothing.
  std::optional<Error> refusal(const Inputs& inputs, const Attention& options, tandem_pass pass) const;

 private:
  friend class Call;
  std::span<std::byte> workspace(const Attention& attention, tandem_pass pass);

  const bool emulated_;
  std::unique_ptr<Gpu> gpu_;  // first member, because the GPU's refusal is the clearest
  Context context_;
  size_t needed_ = 0;
  std::vector<std::byte> workspace_;
  Gpu::Memory device_workspace_;
};

// One call, bound to its tensors. On a GPU these are copies, and results are NaN until they are written.
class Call {
 public:
  // Inputs and results must not move during the lifetime of the call.
  Call(ToolEngine& engine, const Inputs& inputs, const Attention& options, const Results& results);

  // On a GPU these functions return when the work is on the stream.
  void forward() { run(TANDEM_FORWARD); }
  void backward() { run(TANDEM_BACKWARD); }
  // Copies the results to the host.
  void fetch();

  double median_seconds(tandem_pass pass, double seconds);

 private:
  struct Copy {
    const Buffer* host;
    Gpu::Memory device;
    bool result;
  };
  Tensor place(const Buffer& buffer, bool result);
  void run(tandem_pass pass);

  ToolEngine& engine_;
  std::vector<Copy> copies_;  // copies on a GPU
  Attention attention_;
};

// The inputs of a command, and the engine's inputs: a GPU gets two-byte types.
struct Given {
  Given(Inputs inputs, bool for_gpu);

  Inputs original;
  std::optional<Inputs> converted;

  const Inputs& used() const { return converted ? *converted : original; }
  std::string note() const;  // "float32 converted to bfloat16 for the GPU", or ""
};

}  // namespace tandem::tool
