#include "vgpu/src/driver/image.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/text.h"
#include "vgpu/src/ptx/link.h"

namespace tandem::vgpu::driver {
namespace {

constexpr uint32_t kElf = 0x464c457f, kFatBinary = 0xba55ed50, kWrapper = 0x466243b1;
constexpr uint64_t kMaxBytes = uint64_t{1} << 30;  // size limit of an entry in a fat binary

// nvcc stores this wrapper next to a fat binary in the program, and cudart passes it to the driver. Version 2 (nvcc
// -rdc=true) has only linked machine code, and a null-terminated list of the objects' fat binaries.
struct Wrapper {
  uint32_t magic, version;
  const void* fat_binary;
  const void* const* objects;
};
constexpr uint32_t kLinked = 2;

struct FatHeader {
  uint32_t magic;
  uint16_t version, bytes;
  uint64_t size;  // size of all entries
};
static_assert(sizeof(FatHeader) == 16);

struct FatEntry {
  uint16_t kind, version;  // 1: PTX, 2: machine code
  uint32_t bytes;          // size of this header
  uint64_t padded_size;
  uint32_t compressed_size, options_at;
  uint16_t minor, major;
  uint32_t capability;
  uint32_t name_at, name_size;
  uint64_t flags;
  uint64_t reserved;
  uint64_t size;  // uncompressed
};
static_assert(sizeof(FatEntry) == 64);
constexpr uint64_t kLz4 = 0x2000, kZstd = 0x8000;

template <class T>
T read(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Decompresses an LZ4 block. The upper half of a token counts literals, and the lower half counts repeated bytes.
bool unpack_lz4(const unsigned char* from, size_t size, std::string* text) {
  const unsigned char* const end = from + size;
  const size_t whole = text->size();
  size_t at = 0;
  const auto count_of = [&](size_t count) {
    if (count != 15) return count;
    unsigned char more = 255;
    while (more == 255 && from < end) count += more = *from++;
    return count;
  };
  while (from < end) {
    const unsigned char token = *from++;
    const size_t literals = count_of(token >> 4);
    if (literals > static_cast<size_t>(end - from) || literals > whole - at) return false;
    std::memcpy(text->data() + at, from, literals);
    from += literals;
    at += literals;
    if (from == end) break;  // the last token has nothing to repeat
    if (end - from < 2) return false;
    const size_t back = from[0] | from[1] << 8;
    from += 2;
    const size_t repeated = count_of(token & 15) + 4;
    if (back == 0 || back > at || repeated > whole - at) return false;
    for (size_t i = 0; i < repeated; ++i, ++at) (*text)[at] = (*text)[at - back];
  }
  return at == whole;
}

// Decompresses by the system's library, because every distribution has it and only fat binaries need it.
Status unpack_zstd(const void* from, size_t size, std::string* text) {
  static void* const library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
  using Decompress = size_t(void*, size_t, const void*, size_t);
  auto* const decompress = library ? reinterpret_cast<Decompress*>(dlsym(library, "ZSTD_decompress")) : nullptr;
  if (decompress == nullptr)
    return Status::unsupported(
        "the PTX of this fat binary is compressed by zstd, and libzstd.so.1 is missing: install libzstd, or compile "
        "with nvcc --no-compress");
  if (decompress(text->data(), text->size(), from, size) != text->size())
    return Status::invalid("the PTX of this fat binary, compressed by zstd, is broken: compile the program again");
  return {};
}

Status text_of(const FatEntry& entry, const unsigned char* payload, std::string* text) {
  const bool packed = (entry.flags & (kLz4 | kZstd)) != 0;
  const uint64_t stored = packed ? entry.compressed_size : entry.padded_size;
  if (stored > entry.padded_size || (packed && entry.size > kMaxBytes))
    return Status::invalid("this fat binary must contain its entries: compile the program again");
  if (!packed) {
    text->assign(reinterpret_cast<const char*>(payload), stored);
  } else {
    text->resize(entry.size);
    if (entry.flags & kZstd) {
      TANDEM_TRY(unpack_zstd(payload, stored, text));
    } else if (!unpack_lz4(payload, stored, text)) {
      return Status::invalid("the PTX of this fat binary, compressed by LZ4, is broken: compile the program again");
    }
  }
  text->resize(std::min(text->find('\0'), text->size()));  // padding
  return {};
}

Status find_ptx(const unsigned char* image, int capability, std::string* text) {
  const auto header = read<FatHeader>(image);
  const unsigned char* best = nullptr;
  FatEntry chosen{};
  bool any_code = false;
  const auto end = header.size;
  for (uint64_t at = 0; at + sizeof(FatEntry) <= end;) {
    const unsigned char* const here = image + header.bytes + at;
    const auto entry = read<FatEntry>(here);
    if (entry.bytes < sizeof(FatEntry) || entry.bytes > end - at || entry.padded_size > end - at - entry.bytes)
      return Status::invalid("this fat binary must contain its entries: compile the program again");
    any_code |= entry.kind == 2;
    const bool fits = entry.kind == 1 && static_cast<int>(entry.capability) <= capability;
    if (fits && (best == nullptr || entry.capability >= chosen.capability)) {
      best = here + entry.bytes;
      chosen = entry;
    }
    at += entry.bytes + entry.padded_size;
  }
  if (best == nullptr)
    return Status::unsupported(
        str_cat("this fat binary has no PTX for compute capability ", capability / 10, ".", capability % 10,
                " or before", any_code ? ", but only machine code, which the virtual GPU does not execute" : "",
                ": compile with nvcc -gencode "
                "arch=compute_",
                capability, "a,code=compute_", capability, "a"));
  return text_of(chosen, best, text);
}

// Returns TANDEM_UNSUPPORTED if no object has PTX for the GPU.
Status link_objects(const void* const* objects, int capability, std::string* linked) {
  std::vector<std::string> texts;
  Status why = Status::unsupported("this program must have objects with kernels: link its device code");
  for (; *objects != nullptr; ++objects) {
    std::string text;
    why = find_ptx(static_cast<const unsigned char*>(*objects), capability, &text);
    if (why.ok()) texts.push_back(std::move(text));
  }
  return texts.empty() ? why : ptx::link(texts, linked);
}

}  // namespace

Status ptx_of(const void* image, int capability, std::string* text) {
  auto magic = read<uint32_t>(image);
  if (magic == kWrapper) {
    const auto wrapper = read<Wrapper>(image);
    image = wrapper.fat_binary;
    magic = read<uint32_t>(image);
    if (wrapper.version == kLinked && wrapper.objects != nullptr) {
      const Status linked = link_objects(wrapper.objects, capability, text);
      if (linked.ok() || linked.code == TANDEM_INVALID_ARGUMENT) return linked;
    }
  }
  if (magic == kFatBinary) return find_ptx(static_cast<const unsigned char*>(image), capability, text);
  if (magic == kElf)
    return Status::unsupported(
        str_cat("the image is machine code (a cubin), which the virtual GPU does not execute: compile to PTX with "
                "NVRTC's --gpu-architecture=compute_",
                capability, "a or nvcc's -gencode arch=compute_", capability, "a,code=compute_", capability, "a"));
  *text = static_cast<const char*>(image);
  return {};
}

}  // namespace tandem::vgpu::driver
