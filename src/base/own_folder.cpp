#include "base/own_folder.h"

#include <dlfcn.h>

namespace tandem {

std::filesystem::path own_folder() {
  Dl_info info{};
  std::error_code error;
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr) return {};
  // For a program the name is argv[0], which has no folder if the shell found the program in PATH.
  const std::filesystem::path named = info.dli_fname;
  const std::filesystem::path self =
      std::filesystem::canonical(named.has_parent_path() ? named : std::filesystem::path("/proc/self/exe"), error);
  return error ? std::filesystem::path() : self.parent_path();
}

}  // namespace tandem
