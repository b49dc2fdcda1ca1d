// Something that a virtual GPU can run again and again: an attention problem, or a kernel of a PTX file.
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
  // The device that it is for, where nobody says another.
  virtual std::string device() const { return "vgpu:h200"; }
  // The one of its kernels that is worth a picture; "": the last that it launches.
  virtual std::string kernel() const { return ""; }
  // Once, on a device of its own: the same inputs each time, results that begin as nobody's bytes.
  virtual Status run(const std::string& device, const vgpu::Options& options) = 0;
  // Of the last run.
  virtual std::vector<io::TensorView> results() const = 0;
  // What is wrong with them, a sentence each.
  virtual std::vector<std::string> complaints() const { return {}; }
  // What is right with them, where somebody knows.
  virtual std::vector<std::string> remarks() const { return {}; }
};

// An attention call. Its backward needs inputs with dout, and takes out and lse from a forward that it runs first.
std::unique_ptr<Job> attention_job(Inputs inputs, const Attention& options, tandem_pass pass = TANDEM_FORWARD);

// Throws io::InputError when the files cannot be used.
std::unique_ptr<Job> ptx_job(const std::string& ptx, const std::string& launch);

}  // namespace tandem::tool
