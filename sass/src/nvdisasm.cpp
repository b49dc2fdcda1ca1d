#include "sass/src/nvdisasm.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "base/text.h"

extern char** environ;

namespace tandem::machine_code {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWhatToInstall =
    "pip install nvidia-cuda-nvdisasm, or set TANDEM_NVDISASM to the path of nvdisasm";

std::string variable(const char* name, const char* without) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : without;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    entries.push_back(it->path());
  }
  std::ranges::sort(entries, std::greater());
  return entries;
}

struct Candidates {
  std::vector<std::string> paths;

  void add(const fs::path& folder) {
    const std::string path = folder / "nvdisasm";
    if (access(path.c_str(), X_OK) == 0 && std::ranges::find(paths, path) == paths.end()) paths.push_back(path);
  }
  // Wheels for CUDA 13 use nvidia/cu13/bin, and wheels for CUDA 12 use nvidia/cuda_nvdisasm/bin or cuda_nvcc/bin.
  void add_virtual_env(const fs::path& root) {
    for (const fs::path& python : entries_of(root / "lib")) {
      for (const fs::path& package : entries_of(python / "site-packages" / "nvidia")) add(package / "bin");
    }
  }
};

// A file descriptor that is closed on destruction.
struct Descriptor {
  int fd = -1;
  Descriptor() = default;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close_now(); }
  void close_now() {
    if (fd >= 0) close(fd);
    fd = -1;
  }
};

// Runs a disassembler on a file and reads standard output and error together. Returns the exit code, or -1 if the
// program did not start.
int run(const std::string& program, const std::string& argument, std::string* output) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return -1;
  Descriptor from, to;
  from.fd = ends[0];
  to.fd = ends[1];
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to.fd, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, to.fd, STDERR_FILENO);
  std::string name = program, option = "-hex", file = argument;
  char* arguments[] = {name.data(), file.data(), option.data(), nullptr};
  pid_t child = 0;
  const int failed = posix_spawn(&child, program.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) return -1;
  to.close_now();
  output->clear();
  char buffer[1 << 16];
  for (;;) {
    const ssize_t count = read(from.fd, buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    output->append(buffer, static_cast<size_t>(count));
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// A file with these bytes that is removed on destruction.
class Temporary {
 public:
  Temporary(const std::string& folder, std::string_view bytes) : path_(str_cat(folder, "/tandem-XXXXXX.cubin")) {
    constexpr int suffix = 6;
    Descriptor file;
    file.fd = mkostemps(path_.data(), suffix, O_CLOEXEC);
    made_ = file.fd >= 0;
    while (made_ && !bytes.empty()) {
      const ssize_t written = write(file.fd, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      complete_ = written > 0;
      if (!complete_) return;
      bytes.remove_prefix(static_cast<size_t>(written));
    }
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  ~Temporary() {
    if (made_) unlink(path_.c_str());
  }

  bool complete() const { return made_ && complete_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  bool made_ = false, complete_ = true;
};

}  // namespace

const Places& Places::get() {
  static const Places& places = *new Places{.nvdisasm = variable("TANDEM_NVDISASM", ""),
                                            .path = variable("PATH", ""),
                                            .virtual_env = variable("VIRTUAL_ENV", ""),
                                            .conda_prefix = variable("CONDA_PREFIX", ""),
                                            .cuda_home = variable("CUDA_HOME", "/usr/local/cuda"),
                                            .temporary = variable("TMPDIR", "/tmp")};
  return places;
}

std::vector<std::string> nvdisasm_candidates(const Places& places) {
  if (!places.nvdisasm.empty()) return {places.nvdisasm};
  Candidates candidates;
  const std::string& path = places.path;
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    if (end > begin) candidates.add(path.substr(begin, end - begin));
    begin = end + 1;
  }
  for (const std::string& root : {places.virtual_env, places.conda_prefix}) {
    if (!root.empty()) candidates.add_virtual_env(root);
  }
  if (!places.cuda_home.empty()) candidates.add(fs::path(places.cuda_home) / "bin");
  return std::move(candidates.paths);
}

Status disassemble(const std::string& file, const Places& places, std::string* text) {
  if (access(file.c_str(), R_OK) != 0) return Status::invalid(str_cat(file, ": ", std::strerror(errno)));
  std::string why;
  for (const std::string& program : nvdisasm_candidates(places)) {
    const int code = run(program, file, text);
    if (code == 0) return {};
    const std::string said = text->substr(0, text->find('\n'));
    why = str_cat(program, code < 0 ? " does not run" : " cannot read the file", said.empty() ? "" : ": ", said);
  }
  if (why.empty())
    return {TANDEM_NO_COMPILER, str_cat("nvdisasm, which reads machine code, was not found: ", kWhatToInstall)};
  return Status::invalid(
      str_cat(file, " must be a cubin that nvdisasm reads: ", why, "; install a newer nvdisasm: ", kWhatToInstall));
}

Status disassemble_bytes(const std::string& cubin, const Places& places, std::string* text) {
  const Temporary file(places.temporary, cubin);
  if (!file.complete()) {
    return Status::invalid(str_cat("the machine code cannot be written to ", places.temporary, " (",
                                   std::strerror(errno), "): set TMPDIR to another folder"));
  }
  return disassemble(file.path(), places, text);
}

}  // namespace tandem::machine_code
