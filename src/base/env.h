// The environment variables that the library heeds, read once, each in one place. docs/environment.md has all of the
// project's.
#pragma once

#include <string>

#include "base/status.h"

namespace tandem {

struct Env {
  std::string cpu_target;      // TANDEM_CPU_TARGET: one of instruction_sets(), to be used in place of the best
  std::string nvrtc;           // TANDEM_NVRTC: the path of libnvrtc.so; no other is tried
  std::string virtual_env;     // VIRTUAL_ENV
  std::string conda_prefix;    // CONDA_PREFIX
  std::string cuda_home;       // CUDA_HOME
  std::string cache;           // TANDEM_CACHE: "off" keeps compiled kernels in memory only
  std::string cache_dir;       // TANDEM_CACHE_DIR: the folder of compiled kernels itself
  std::string xdg_cache_home;  // XDG_CACHE_HOME
  std::string home;            // HOME
  std::string temporary;       // TMPDIR, "/tmp" without: compile logs
  std::string log;             // TANDEM_LOG: "1" describes every call on a GPU in a line to stderr
  std::string nvtx;            // NVTX_INJECTION64_PATH: the library of a tool that watches this process

  bool logging() const { return log == "1"; }

  // As it was at the first call.
  static const Env& get();
};

// Ok, or a sentence about the first variable whose value has no meaning.
Status check(const Env& env);

}  // namespace tandem
