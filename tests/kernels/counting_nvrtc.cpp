// An NVRTC that counts: it forwards every call to the library of TANDEM_TEST_NVRTC, and appends one byte to the file of
// TANDEM_TEST_COUNT for every compilation.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>

#include "jit/nvrtc.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace tandem::jit;

namespace {

const Nvrtc& real() {
  static const Nvrtc loaded = [] {
    Nvrtc nvrtc;
    const char* path = std::getenv("TANDEM_TEST_NVRTC");
    if (path == nullptr || !load_nvrtc(path, &nvrtc).empty()) std::abort();
    return nvrtc;
  }();
  return loaded;
}

}  // namespace

#define HAND_ON(name, parameters, arguments) \
  EXPORTED nvrtcResult name parameters { return real().name arguments; }
HAND_ON(nvrtcVersion, (int* major, int* minor), (major, minor))
HAND_ON(nvrtcGetNumSupportedArchs, (int* count), (count))
HAND_ON(nvrtcGetSupportedArchs, (int* archs), (archs))
HAND_ON(nvrtcCreateProgram,
        (nvrtcProgram * program, const char* source, const char* name, int count, const char* const* headers,
         const char* const* names),
        (program, source, name, count, headers, names))
HAND_ON(nvrtcDestroyProgram, (nvrtcProgram * program), (program))
HAND_ON(nvrtcGetProgramLogSize, (nvrtcProgram program, size_t* bytes), (program, bytes))
HAND_ON(nvrtcGetProgramLog, (nvrtcProgram program, char* log), (program, log))
HAND_ON(nvrtcGetCUBINSize, (nvrtcProgram program, size_t* bytes), (program, bytes))
HAND_ON(nvrtcGetCUBIN, (nvrtcProgram program, char* cubin), (program, cubin))
HAND_ON(nvrtcGetPTXSize, (nvrtcProgram program, size_t* bytes), (program, bytes))
HAND_ON(nvrtcGetPTX, (nvrtcProgram program, char* ptx), (program, ptx))

EXPORTED const char* nvrtcGetErrorString(nvrtcResult result) { return real().nvrtcGetErrorString(result); }

EXPORTED nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* options) {
  const char* path = std::getenv("TANDEM_TEST_COUNT");
  const int file = path == nullptr ? -1 : open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  const bool counted = file >= 0 && write(file, ".", 1) == 1;
  if (file >= 0) close(file);
  return counted ? real().nvrtcCompileProgram(program, count, options) : kNvrtcInvalidOption;
}
