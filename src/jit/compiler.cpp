#include "jit/compiler.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "base/text.h"

namespace tandem::jit {
namespace {

constexpr std::string_view kWhatToInstall =
    "pip install nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for a driver of CUDA 12), or set TANDEM_NVRTC to the path "
    "of "
    "libnvrtc.so";

Status no_compiler(std::string message) { return {TANDEM_NO_COMPILER, std::move(message)}; }

// The version number has no patch level, so that the file size distinguishes builds of one version.
int64_t library_bytes(const Nvrtc& nvrtc) {
  Dl_info info{};
  struct stat file {};
  const bool known = dladdr(reinterpret_cast<const void*>(nvrtc.nvrtcVersion), &info) != 0;
  return known && stat(info.dli_fname, &file) == 0 ? file.st_size : 0;
}

struct Program {
  explicit Program(const Nvrtc& nvrtc) : api(nvrtc) {}
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() {
    if (handle != nullptr) (void)api.nvrtcDestroyProgram(&handle);
  }

  const Nvrtc& api;
  nvrtcProgram handle = nullptr;
};

// NVRTC returns a text through two functions: its size, and a copy.
using SizeOf = nvrtcResult (*)(nvrtcProgram, size_t*);
using CopyOf = nvrtcResult (*)(nvrtcProgram, char*);
nvrtcResult read(nvrtcProgram program, SizeOf size_of, CopyOf copy_of, std::string* text) {
  size_t bytes = 0;
  nvrtcResult result = size_of(program, &bytes);
  if (result != kNvrtcSuccess) return result;
  text->resize(bytes);
  return copy_of(program, text->data());
}

void drop_trailing_nul(std::string* text) {
  if (!text->empty() && text->back() == '\0') text->pop_back();
}

// Line information names files relative to NVRTC's working folder. The names become paths of the source tree:
// "kernels/device/exp2.h".
void name_files(const std::string& unit, std::string* ptx) {
  constexpr std::string_view directive = "\t.file\t";
  const size_t end = ptx->find(str_cat("/", unit, "\"\n"));
  const size_t begin = end == std::string::npos ? end : ptx->rfind('"', end);
  if (begin == std::string::npos) return;
  const std::string folder = ptx->substr(begin + 1, end - begin);
  const std::string of_unit = str_cat(folder, unit, "\"");
  for (size_t at = ptx->find(directive); at != std::string::npos; at = ptx->find(directive, at + 1)) {
    const size_t path = ptx->find('"', at) + 1;
    if (ptx->compare(path, folder.size(), folder) != 0) continue;
    const bool is_unit = ptx->compare(path, of_unit.size(), of_unit) == 0;
    ptx->replace(path, folder.size(), is_unit ? "" : "kernels/");
  }
}

// Returns the first line that has an error, else the first line.
std::string first_error(std::string_view log) {
  std::string_view first;
  while (!log.empty()) {
    const size_t end = std::min(log.find('\n'), log.size());
    const std::string_view line = log.substr(0, end);
    log.remove_prefix(std::min(end + 1, log.size()));
    if (line.find("error") != std::string_view::npos) return std::string(line);
    if (first.empty()) first = line;
  }
  return std::string(first);
}

// Returns the path of a new file with this text, or "" if no file can be written.
std::string write_log(const std::string& folder, std::string name, std::string_view text) {
  std::ranges::replace(name, '/', '_');
  constexpr std::string_view suffix = ".log";
  std::string path = str_cat(folder, "/tandem-", name, "-XXXXXX", suffix);
  const int file = mkostemps(path.data(), static_cast<int>(suffix.size()), O_CLOEXEC);
  if (file < 0) return "";
  while (!text.empty()) {
    const ssize_t written = write(file, text.data(), text.size());
    if (written <= 0) break;
    text.remove_prefix(static_cast<size_t>(written));
  }
  close(file);
  return path;
}

}  // namespace

Status Compiler::open(const Search& search, const Env& env, std::unique_ptr<Compiler>* compiler) {
  std::string why;
  for (const std::string& path : nvrtc_candidates(search, env)) {
    std::unique_ptr<Compiler> found(new Compiler);
    Nvrtc& nvrtc = found->nvrtc_;
    why = load_nvrtc(path, &nvrtc);
    if (!why.empty()) continue;
    int count = 0;
    nvrtcResult result = nvrtc.nvrtcVersion(&found->major_, &found->minor_);
    if (result == kNvrtcSuccess) result = nvrtc.nvrtcGetNumSupportedArchs(&count);
    found->archs_.resize(static_cast<size_t>(std::max(count, 0)));
    if (result == kNvrtcSuccess) result = nvrtc.nvrtcGetSupportedArchs(found->archs_.data());
    if (result != kNvrtcSuccess || found->major_ < kOldestNvrtc) {
      why = str_cat(path, " is NVRTC ", found->major_, ".", found->minor_, ", which is older than 12.0 or broken");
      continue;
    }
    found->path_ = path;
    found->temporary_ = env.temporary;
    found->identity_ = str_cat("NVRTC ", found->major_, ".", found->minor_, ", ", library_bytes(nvrtc), " bytes");
    *compiler = std::move(found);
    return {};
  }
  if (!env.nvrtc.empty()) {
    return no_compiler(str_cat("TANDEM_NVRTC (\"", env.nvrtc, "\") must name NVRTC 12.0 or newer (", why,
                               "): set the path of libnvrtc.so"));
  }
  const std::string version =
      search.newest_major == 0 ? "" : str_cat(" for CUDA ", search.newest_major, ", the driver's version, or older");
  return no_compiler(str_cat("NVRTC compiles the GPU kernels and was not found", version, " (last tried: ", why,
                             "): ", kWhatToInstall));
}

Status Compiler::check_arch(const Request& request, int* number) const {
  const std::string& arch = request.arch;
  const char* last = arch.data() + arch.size();
  const bool prefixed = arch.starts_with("sm_");
  if (!prefixed || std::from_chars(arch.data() + 3, last, *number).ec != std::errc()) {
    return {TANDEM_INTERNAL_ERROR, str_cat("arch (\"", arch, "\") of kernel \"", request.name,
                                           "\" must be an architecture: write a name like \"sm_90a\"")};
  }
  if (std::ranges::find(archs_, *number) != archs_.end()) return {};
  return no_compiler(str_cat("NVRTC ", major_, ".", minor_, " (", path_, ") must support ", arch,
                             ": install a newer NVRTC: ", kWhatToInstall));
}

Status Compiler::failure(const Request& request, nvrtcResult result, const std::string& log) const {
  const char* reason = nvrtc_.nvrtcGetErrorString(result);
  std::string text =
      str_cat("NVRTC ", major_, ".", minor_, " (", path_, "), kernel ", request.name, ", ", request.arch);
  for (const std::string& option : request.options) text += str_cat(" ", option);
  text += str_cat("\n", reason, "\n\n", log, "\n---- source\n", request.source);
  const std::string file = write_log(temporary_, request.name, text);
  const std::string error = first_error(log);
  return {TANDEM_INTERNAL_ERROR, str_cat("kernel \"", request.name, "\" does not compile for ", request.arch,
                                         " with NVRTC ", major_, ".", minor_, ": ", error.empty() ? reason : error,
                                         file.empty() ? "" : str_cat(" (the whole log: ", file, ")"))};
}

Status Compiler::compile(const Request& request, std::span<const Text> headers, std::string* code,
                         std::string* log) const {
  int number = 0;
  TANDEM_TRY(check_arch(request, &number));

  // PTX targets the virtual architecture, because NVRTC would also assemble code for a real architecture.
  const std::string arch = request.output == Output::ptx ? str_cat("compute_", request.arch.substr(3)) : request.arch;
  const std::string arch_option = str_cat("--gpu-architecture=", arch);
  std::vector<const char*> options{arch_option.c_str()};
  for (const std::string& option : request.options) options.push_back(option.c_str());

  std::vector<std::string> texts;
  texts.reserve(2 * headers.size());
  std::vector<const char*> header_texts, header_names;
  for (const Text& header : headers) {
    header_texts.push_back(texts.emplace_back(header.text).c_str());
    header_names.push_back(texts.emplace_back(header.name).c_str());
  }

  Program program(nvrtc_);
  nvrtcResult result =
      nvrtc_.nvrtcCreateProgram(&program.handle, request.source.c_str(), request.name.c_str(),
                                static_cast<int>(headers.size()), header_texts.data(), header_names.data());
  if (result != kNvrtcSuccess) return failure(request, result, "");
  result = nvrtc_.nvrtcCompileProgram(program.handle, static_cast<int>(options.size()), options.data());
  if (read(program.handle, nvrtc_.nvrtcGetProgramLogSize, nvrtc_.nvrtcGetProgramLog, log) != kNvrtcSuccess)
    log->clear();
  drop_trailing_nul(log);
  if (result != kNvrtcSuccess) return failure(request, result, *log);
  if (request.output == Output::cubin) {
    result = read(program.handle, nvrtc_.nvrtcGetCUBINSize, nvrtc_.nvrtcGetCUBIN, code);
  } else {
    result = read(program.handle, nvrtc_.nvrtcGetPTXSize, nvrtc_.nvrtcGetPTX, code);
    drop_trailing_nul(code);
    name_files(request.name, code);
  }
  return result == kNvrtcSuccess ? Status{} : failure(request, result, *log);
}

}  // namespace tandem::jit
