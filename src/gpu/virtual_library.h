// The interface between libtandem and libtandem_vgpu: the single function that the latter exports.
//
// The two libraries may use different C++ runtimes, as in the Python wheel. Therefore no exception and no RTTI crosses
// the boundary, and virtual destructors destroy each object in the library that created it. Classes and strings do
// cross, so both sides must be compiled from the same declarations.
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

// The identity of a build, such as "0.1.0 (interface 5d3f10a2c9e1, libstdc++)". TANDEM_INTERFACE is the version and a
// digest of the headers that both sides include (cmake/Interface.cmake).
inline constexpr char kVirtualLibraryTag[] = TANDEM_INTERFACE ", " TANDEM_STANDARD_LIBRARY ")";

inline constexpr char kVirtualLibraryEntry[] = "tandem_vgpu_open";

// tandem_vgpu_open. tag: the caller's tag, checked first; a library with another tag refuses. name: NULL checks only
// the tag. The message is cut to sentence_bytes, final 0 included. Returns a tandem_status. This signature never
// changes.
using VirtualLibraryEntry = int(const char* tag, const char* name, Device** device, char* sentence,
                                size_t sentence_bytes);

}  // namespace tandem::gpu
