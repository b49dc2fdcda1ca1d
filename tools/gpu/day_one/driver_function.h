// Functions of the CUDA driver that Tandem does not use.
#pragma once

#include <dlfcn.h>

namespace tandem::day_one {

// Returns null if no driver is installed or the driver has no such function.
inline void* driver_function(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return library != nullptr ? dlsym(library, name) : nullptr;
}

}  // namespace tandem::day_one
