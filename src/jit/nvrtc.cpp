#include "jit/nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <utility>

namespace tandem::jit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kLibrary = "libnvrtc.so.";
constexpr std::string_view kBuiltins = "libnvrtc-builtins.so.";
constexpr int kNewestKnown = 13;

// Returns the names in a folder, sorted; empty if the folder cannot be read.
std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    entries.push_back(it->path());
  }
  std::ranges::sort(entries);
  return entries;
}

// Returns 13 for libnvrtc.so.13. Other names give 0, such as libnvrtc.so.13.0.88, whose short name is in the same
// folder.
int major_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!name.starts_with(kLibrary)) return 0;
  int major = 0;
  const char* last = name.data() + name.size();
  const auto [end, error] = std::from_chars(name.data() + kLibrary.size(), last, major);
  return error == std::errc() && end == last ? major : 0;
}

class Candidates {
 public:
  explicit Candidates(int newest_major) : newest_major_(newest_major) {}

  void add_folders(const std::vector<fs::path>& folders) {
    std::vector<std::pair<int, std::string>> found;
    for (const fs::path& folder : folders) {
      for (const fs::path& path : entries_of(folder)) {
        if (const int major = major_of(path); wanted(major)) found.emplace_back(-major, path.string());
      }
    }
    std::ranges::sort(found);
    for (auto& [major, path] : found) paths.push_back(std::move(path));
  }
  // CUDA 13 wheels use nvidia/cu13/lib, and CUDA 12 wheels use nvidia/cuda_nvrtc/lib.
  void add_site_packages(const fs::path& site_packages) {
    std::vector<fs::path> folders;
    for (const fs::path& package : entries_of(site_packages / "nvidia")) folders.push_back(package / "lib");
    add_folders(folders);
  }
  void add_virtual_env(const fs::path& root) {
    for (const fs::path& python : entries_of(root / "lib")) {
      if (python.filename().string().starts_with("python")) add_site_packages(python / "site-packages");
    }
  }
  // The folder of a command or library, the Python environment around it, and build/nvrtc, which run.sh makes.
  void add_near(const fs::path& own) {
    const fs::path above = own.parent_path();
    add_folders({own});
    add_virtual_env(above);
    add_site_packages(above);
    for (const fs::path& folder : {above, above.parent_path()}) add_virtual_env(folder / "nvrtc");
  }
  void add_loader_path() {
    for (int major = kNewestKnown; major >= kOldestNvrtc; --major) {
      if (wanted(major)) paths.push_back(std::string(kLibrary) + std::to_string(major));
    }
  }

  std::vector<std::string> paths;

 private:
  bool wanted(int major) const { return major >= kOldestNvrtc && (newest_major_ == 0 || major <= newest_major_); }

  int newest_major_;
};

std::string last_error() {
  const char* why = dlerror();
  return why != nullptr ? why : "no reason given";
}

}  // namespace

std::vector<std::string> nvrtc_candidates(const Search& search, const Env& env) {
  if (!env.nvrtc.empty()) return {env.nvrtc};
  Candidates candidates(search.newest_major);
  for (const std::string& folder : search.site_packages) candidates.add_site_packages(folder);
  if (!env.virtual_env.empty()) candidates.add_virtual_env(env.virtual_env);
  if (!env.conda_prefix.empty()) {
    candidates.add_virtual_env(env.conda_prefix);
    candidates.add_folders({fs::path(env.conda_prefix) / "lib"});
  }
  if (!env.cuda_home.empty()) candidates.add_folders({fs::path(env.cuda_home) / "lib64"});
  if (!search.own_folder.empty()) candidates.add_near(search.own_folder);
  candidates.add_loader_path();
  candidates.add_folders({"/usr/local/cuda/lib64"});
  return std::move(candidates.paths);
}

std::string load_nvrtc(const std::string& path, Nvrtc* nvrtc) {
  // NVRTC opens its builtins by name during compilation, and some versions (13.0) do not search their folder. A loaded
  // library is found by its name, so that the builtins are loaded first.
  if (path.find('/') != std::string::npos) {
    for (const fs::path& beside : entries_of(fs::path(path).parent_path())) {
      if (beside.filename().string().starts_with(kBuiltins)) (void)dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
  }
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return last_error();
#define TANDEM_FIND(name, parameters)                                          \
  nvrtc->name = reinterpret_cast<decltype(nvrtc->name)>(dlsym(handle, #name)); \
  if (nvrtc->name == nullptr) return last_error();
  TANDEM_NVRTC_FUNCTIONS(TANDEM_FIND)
  TANDEM_FIND(nvrtcGetErrorString, (nvrtcResult result))
#undef TANDEM_FIND
  return "";
}

}  // namespace tandem::jit
