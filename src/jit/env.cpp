#include "jit/env.h"

#include <cstdlib>

namespace tandem::jit {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

Env load() {
  Env env;
  env.nvrtc = variable("TANDEM_NVRTC");
  env.virtual_env = variable("VIRTUAL_ENV");
  env.conda_prefix = variable("CONDA_PREFIX");
  env.cuda_home = variable("CUDA_HOME");
  env.cache = variable("TANDEM_CACHE");
  env.cache_dir = variable("TANDEM_CACHE_DIR");
  env.xdg_cache_home = variable("XDG_CACHE_HOME");
  env.home = variable("HOME");
  env.temporary = variable("TMPDIR");
  if (env.temporary.empty()) env.temporary = "/tmp";
  return env;
}

}  // namespace

// Never destroyed: a call may come as late as another library's static destructor.
const Env& Env::get() {
  static const Env& env = *new Env(load());
  return env;
}

}  // namespace tandem::jit
