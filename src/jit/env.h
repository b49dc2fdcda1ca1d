// The environment variables that this room heeds, read once.
#pragma once

#include <string>

namespace tandem::jit {

struct Env {
  std::string nvrtc;           // TANDEM_NVRTC: the path of libnvrtc.so; no other is tried
  std::string virtual_env;     // VIRTUAL_ENV
  std::string conda_prefix;    // CONDA_PREFIX
  std::string cuda_home;       // CUDA_HOME
  std::string cache;           // TANDEM_CACHE: "off" keeps compiled kernels in memory only
  std::string cache_dir;       // TANDEM_CACHE_DIR: the folder of compiled kernels itself
  std::string xdg_cache_home;  // XDG_CACHE_HOME
  std::string home;            // HOME
  std::string temporary;       // TMPDIR, "/tmp" without: compile logs

  // As it was at the first call.
  static const Env& get();
};

}  // namespace tandem::jit
