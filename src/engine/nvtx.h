// NVTX ranges: Nsight Systems, and whatever else speaks the protocol, shows by them which kernel a call launched. The
// declarations are our own, so that a build needs no CUDA: each follows NVTX 3.
#pragma once

#include <string>

namespace tandem::nvtx {

// What a tool that watches this process wants to be told.
struct Tool {
  void* domain = nullptr;  // "tandem"
  int (*push)(void* domain, const void* attributes) = nullptr;
  int (*pop)(void* domain) = nullptr;
};

// The tool whose library NVTX_INJECTION64_PATH names, as tools set it for the programs they start; null without one.
// Looked for once.
const Tool* tool();

// Loads a tool's library and lets it attach. The result lacks functions where it does not. One tool to a process.
Tool attach(const std::string& library);

// A range of the calling thread, named, while this lives. No tool: one comparison.
class Range {
 public:
  Range(const Tool* tool, const std::string& name) : tool_(tool) {
    if (tool_ != nullptr) [[unlikely]]
      push(name.c_str());
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range() {
    if (tool_ != nullptr) [[unlikely]]
      (void)tool_->pop(tool_->domain);
  }

 private:
  void push(const char* name) const;

  const Tool* tool_;
};

}  // namespace tandem::nvtx
