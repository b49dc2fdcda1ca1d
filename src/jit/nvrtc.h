// The part of NVRTC's interface that Tandem uses, and the places where the library may be. The declarations are
// repeated here so that a build needs no CUDA.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/env.h"

namespace tandem::jit {

using nvrtcProgram = struct _nvrtcProgram*;

enum nvrtcResult : int { kNvrtcSuccess = 0, kNvrtcInvalidOption = 5, kNvrtcCompilation = 6 };

// Each function is a member of Nvrtc below and has the signature of nvrtc.h. The function of the error text is
// separate, because it returns no result.
#define TANDEM_NVRTC_FUNCTIONS(F)                                                                        \
  F(nvrtcVersion, (int* major, int* minor))                                                              \
  F(nvrtcGetNumSupportedArchs, (int* count))                                                             \
  F(nvrtcGetSupportedArchs, (int* archs))                                                                \
  F(nvrtcCreateProgram, (nvrtcProgram * program, const char* source, const char* name, int header_count, \
                         const char* const* headers, const char* const* header_names))                   \
  F(nvrtcDestroyProgram, (nvrtcProgram * program))                                                       \
  F(nvrtcCompileProgram, (nvrtcProgram program, int option_count, const char* const* options))           \
  F(nvrtcGetProgramLogSize, (nvrtcProgram program, size_t * bytes))                                      \
  F(nvrtcGetProgramLog, (nvrtcProgram program, char* log))                                               \
  F(nvrtcGetCUBINSize, (nvrtcProgram program, size_t * bytes))                                           \
  F(nvrtcGetCUBIN, (nvrtcProgram program, char* cubin))                                                  \
  F(nvrtcGetPTXSize, (nvrtcProgram program, size_t * bytes))                                             \
  F(nvrtcGetPTX, (nvrtcProgram program, char* ptx))

struct Nvrtc {
#define TANDEM_DECLARE(name, parameters) nvrtcResult(*name) parameters = nullptr;  // NOLINT(*-macro-parentheses)
  TANDEM_NVRTC_FUNCTIONS(TANDEM_DECLARE)
#undef TANDEM_DECLARE
  const char* (*nvrtcGetErrorString)(nvrtcResult result) = nullptr;
};

inline constexpr int kOldestNvrtc = 12;  // the first version with sm_90a and C++20

// Places to search for NVRTC in addition to the environment.
struct Search {
  std::vector<std::string> site_packages;  // Python's package folders, where wheels put the library
  int newest_major = 0;                    // the driver's CUDA version: skips newer NVRTCs; 0: any
  std::string own_folder = {};             // the command's or library's; empty: unknown
};

// Paths of NVRTC in the order of trial. If TANDEM_NVRTC is set, its path is the only one. Otherwise the order is:
// site-packages, the virtual environment, conda (packages, then library), CUDA_HOME, near own_folder, the loader's
// path, /usr/local/cuda. The newest version of a folder comes first.
std::vector<std::string> nvrtc_candidates(const Search& search, const Env& env);

// Loads the library at path and the libraries that it opens later. Fills nvrtc, or returns an error. The library is
// never unloaded.
std::string load_nvrtc(const std::string& path, Nvrtc* nvrtc);

}  // namespace tandem::jit
