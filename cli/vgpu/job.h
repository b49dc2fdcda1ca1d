// A task that a virtual GPU can repeat: an attention problem, or a kernel of a PTX file.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/call.h"
#include "cli/io/tensor.h"
#include "cli/vgpu/launch.h"
#include "vgpu/src/device.h"

namespace tandem::tool {

class Job {
 public:
  virtual ~Job() = default;
  // The default device, if no flag names another.
  virtual std::string device() const { return "vgpu:h200"; }
  // The kernel to draw; "": the last launched kernel.
  virtual std::string kernel() const { return ""; }
  // Describes the job in one line.
  virtual std::string description() const = 0;
  // Returns true if no kernel would be launched.
  virtual bool is_empty() const { return false; }
  // Runs once on a new device, with the same inputs each time and uninitialised results.
  virtual Status run(const std::string& device, const vgpu::Options& options) = 0;
  // Results of the last run.
  virtual std::vector<io::FileTensor> results() const = 0;
  // Returns one sentence for each wrong result.
  virtual std::vector<std::string> complaints() const { return {}; }
  // Returns one sentence for each correct result, if the caller has given the expected results.
  virtual std::vector<std::string> remarks() const { return {}; }
};

// An attention call. A backward needs inputs with dout; it runs a forward first, for out and lse.
std::unique_ptr<Job> attention_job(Inputs inputs, const Attention& options, tandem_pass pass = TANDEM_FORWARD);

// Throws io::InputError if the files cannot be used.
std::unique_ptr<Job> ptx_job(const std::string& ptx, const std::string& launch);

}  // namespace tandem::tool
