#include "gpu/virtual.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <mutex>

#include "base/own_folder.h"
#include "base/text.h"
#include "gpu/virtual_library.h"

namespace tandem::gpu {
namespace {

constexpr char kLibrary[] = "libtandem_vgpu.so." TANDEM_SOVERSION;

std::atomic<OpenVirtual> linked = nullptr;

struct Library {
  std::string path;
  VirtualLibraryEntry* entry = nullptr;

  Status call(const char* name, Device** device) const {
    char sentence[1024] = "";
    const int code = entry(kVirtualLibraryTag, name, device, sentence, sizeof sentence);
    return {static_cast<tandem_status>(code), sentence};
  }
};

// The path of the library, or its plain name for the system's loader. The Python package tandem-vgpu installs the
// library into tandem_vgpu/, a folder next to the folder of libtandem.
std::string path_of(const std::filesystem::path& folder) {
  const char* named = std::getenv("TANDEM_VGPU_LIBRARY");
  if (named != nullptr && *named != '\0') return named;
  std::error_code error;
  for (const std::filesystem::path& path : {folder / kLibrary, folder.parent_path() / "tandem_vgpu" / kLibrary})
    if (std::filesystem::exists(path, error)) return path.string();
  return kLibrary;
}

Status load(Library* library) {
  const std::filesystem::path folder = own_folder();
  library->path = path_of(folder);
  void* handle = dlopen(library->path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    const std::string reason = why != nullptr ? why : "no reason given";
    if (library->path != kLibrary)
      return Status::unsupported(str_cat("the virtual GPU's library ", library->path, " cannot be loaded (", reason,
                                         "): install Tandem again"));
    return Status::unsupported(str_cat("a virtual GPU needs ", kLibrary, ", and neither ", (folder / kLibrary).string(),
                                       " nor the system's library path has it (", reason, "): install ", kLibrary,
                                       " next to libtandem, or set TANDEM_VGPU_LIBRARY"));
  }
  library->entry = reinterpret_cast<VirtualLibraryEntry*>(dlsym(handle, kVirtualLibraryEntry));
  if (library->entry == nullptr)
    return Status::unsupported(str_cat(library->path, " has no ", kVirtualLibraryEntry,
                                       ": set TANDEM_VGPU_LIBRARY to the virtual GPU's library"));
  if (Dl_info info{}; dladdr(reinterpret_cast<const void*>(library->entry), &info) != 0 && info.dli_fname != nullptr)
    // the loader resolves a plain name to this path
    library->path = std::filesystem::path(info.dli_fname).lexically_normal().string();
  Status status = library->call(nullptr, nullptr);
  if (!status.ok()) status.message = str_cat(library->path, ": ", status.message);
  return status;
}

// Loads the library once. After a failure the next call tries again, because the library may have been installed
// meanwhile.
Status loaded(Library* library) {
  static std::mutex mutex;
  static Library* const kept = new Library;  // the library's devices may outlive every static object
  const std::lock_guard lock(mutex);
  if (kept->entry == nullptr) {
    Library found;
    TANDEM_TRY(load(&found));
    *kept = found;
  }
  *library = *kept;
  return {};
}

}  // namespace

bool is_virtual(std::string_view name) { return name == "vgpu" || name.starts_with("vgpu:"); }

void use_linked_virtual(OpenVirtual open) { linked = open; }

Status find_virtual(std::string* path) {
  Library library;
  TANDEM_TRY(loaded(&library));
  *path = library.path;
  return {};
}

Status open_virtual(std::string_view name, std::unique_ptr<Device>* device) {
  if (const OpenVirtual open = linked) return open(name, device);
  Library library;
  TANDEM_TRY(loaded(&library));
  Device* opened = nullptr;
  TANDEM_TRY(library.call(std::string(name).c_str(), &opened));
  device->reset(opened);
  return {};
}

}  // namespace tandem::gpu
