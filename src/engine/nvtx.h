// NVTX ranges, by which Nsight Systems and similar tools show the kernel that a call launched. The declarations follow
// NVTX 3 and are repeated here so that a build needs no CUDA.
#pragma once

#include <string>

namespace tandem::nvtx {

// The functions of a tool that profiles this process.
struct Tool {
  void* domain = nullptr;  // "tandem"
  int (*push)(void* domain, const void* attributes) = nullptr;
  int (*pop)(void* domain) = nullptr;
};

// The tool whose library NVTX_INJECTION64_PATH names, or null. Tools set the variable for the programs that they start.
// The variable is read once.
const Tool* tool();

// Loads a tool's library and lets the library attach. The result has no functions if the library does not attach. A
// process has one tool.
Tool attach(const std::string& library);

// A named range of the calling thread, from construction to destruction. Without a tool a range costs one comparison.
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
