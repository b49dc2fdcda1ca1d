// The virtual GPU's library of a different Tandem version, which refuses every other version.
#include <cstdio>

#include "base/status.h"
#include "gpu/virtual_library.h"

extern "C" [[gnu::visibility("default")]] tandem::gpu::VirtualLibraryEntry tandem_vgpu_open;

int tandem_vgpu_open(const char* tag, const char*, tandem::gpu::Device**, char* sentence, size_t sentence_bytes) {
  std::snprintf(sentence, sentence_bytes, "this belongs to Tandem 9.9.9, and Tandem %s loads it", tag);
  return TANDEM_UNSUPPORTED;
}
