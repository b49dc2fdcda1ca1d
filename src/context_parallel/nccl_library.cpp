#include "context_parallel/nccl_library.h"

#include <dlfcn.h>

#include "base/text.h"

namespace tandem::context_parallel {

// dlopen returns the library that the process already uses, because its name is the same.
Status load_nccl(const std::string& name, NcclLibrary* library) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return Status::unsupported(str_cat("comm needs NCCL, and ", name, " cannot be loaded (",
                                       why != nullptr ? why : "no reason", "): install NCCL's shared library"));
  }
#define TANDEM_FIND(result, function, parameters)                                                              \
  library->function = reinterpret_cast<decltype(library->function)>(dlsym(handle, #function));                 \
  if (library->function == nullptr) {                                                                          \
    return Status::unsupported(                                                                                \
        str_cat("comm needs NCCL 2.14 or newer, and ", name, " lacks ", #function, ": install a newer NCCL")); \
  }
  TANDEM_NCCL_FUNCTIONS(TANDEM_FIND)
#undef TANDEM_FIND
  return {};
}

}  // namespace tandem::context_parallel
