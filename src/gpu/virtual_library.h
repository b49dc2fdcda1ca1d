// Between libtandem and libtandem_vgpu: the one function that the latter exports.
//
// Each may carry a C++ runtime of its own (in the Python wheel both do). So no exception crosses, and no type
// information is asked for; objects are destroyed through their virtual destructors, by the library that made them.
// Classes and strings do cross: both sides must have been compiled from the same declarations.
#pragma once

#include <cstddef>
#include <version>

#include "gpu/device.h"

namespace tandem::gpu {

#if defined(_LIBCPP_VERSION)
#define TANDEM_STANDARD_LIBRARY "libc++"
#elif _GLIBCXX_USE_CXX11_ABI
#define TANDEM_STANDARD_LIBRARY "libstdc++"
#else
#define TANDEM_STANDARD_LIBRARY "libstdc++ without its C++11 ABI"
#endif

// What was compiled: "0.1.0 (interface 5d3f10a2c9e1, libstdc++)". TANDEM_INTERFACE is the version and a digest of the
// headers that both sides include (cmake/Interface.cmake).
inline constexpr char kVirtualLibraryTag[] = TANDEM_INTERFACE ", " TANDEM_STANDARD_LIBRARY ")";

inline constexpr char kVirtualLibraryEntry[] = "tandem_vgpu_open";

// tandem_vgpu_open. tag: the caller's; a library with another one refuses before it looks at anything else. name: NULL
// asks for nothing but that. The sentence of a refusal is cut to sentence_bytes, its final 0 included. Returns its code
// (tandem_status). This signature never changes.
using VirtualLibraryEntry = int(const char* tag, const char* name, Device** device, char* sentence,
                                size_t sentence_bytes);

}  // namespace tandem::gpu
