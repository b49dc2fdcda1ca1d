#include "cli/vgpu/exec.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/text.h"
#include "cli/flags.h"
#include "cli/io/file.h"
#include "cli/terminal.h"
#include "gpu/virtual.h"
#include "vgpu/src/device.h"

namespace tandem::tool {
namespace {

namespace fs = std::filesystem;

struct Exec {
  std::string device = "vgpu:h200", check = "on", letter = "on";
  int schedule = 0, threads = 0, max_instructions = vgpu::RunOptions::kMaxInstructions;
  std::vector<std::string> command;

  int run() const;

 private:
  void set_environment(const std::string& summary) const;
};

// Returns the folder of Tandem's libcuda.so.1, in the build or installed.
fs::path stand_in() {
  const fs::path here = fs::read_symlink("/proc/self/exe").parent_path();
  std::string tried;
  std::string places = TANDEM_VIRTUAL_CUDA;
  for (size_t begin = 0; begin < places.size();) {
    const size_t end = std::min(places.find(':', begin), places.size());
    const fs::path folder = (here / places.substr(begin, end - begin)).lexically_normal();
    if (fs::exists(folder / "libcuda.so.1")) return folder;
    tried += str_cat(tried.empty() ? "" : ", ", folder.string());
    begin = end + 1;
  }
  throw io::InputError("libcuda.so.1, the stand-in for the CUDA driver, is missing in " + tried +
                       ": build or install tandem_virtual_cuda");
}

void Exec::set_environment(const std::string& summary) const {
  const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
  const char* const before = std::getenv("LD_LIBRARY_PATH");
  const std::string folder = stand_in().string();
  set("LD_LIBRARY_PATH", before && *before ? folder + ":" + before : folder);
  set("TANDEM_VGPU_DEVICE", device);
  set("TANDEM_VGPU_CHECK", check);
  set("TANDEM_VGPU_LETTER", letter);
  set("TANDEM_VGPU_SCHEDULE", std::to_string(schedule));
  set("TANDEM_VGPU_THREADS", std::to_string(threads));
  set("TANDEM_VGPU_MAX_INSTRUCTIONS", std::to_string(max_instructions));
  set("TANDEM_VGPU_SUMMARY", summary);
}

// A file that the destructor removes.
class Temporary {
 public:
  Temporary() : path_((fs::temp_directory_path() / "tandem-vgpu-XXXXXX").string()) {
    const int file = mkstemp(path_.data());
    if (file < 0) throw io::InputError(path_ + ": cannot be created: " + std::strerror(errno) + "; check the path");
    close(file);
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  ~Temporary() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Returns the program's exit code in the form of a shell.
int run_program(const std::vector<std::string>& command) {
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0)
    throw io::InputError(str_cat("no process can be created: ", std::strerror(errno), "; end other processes"));
  if (child == 0) {
    execvp(words[0], words.data());
    std::fprintf(stderr, "tandem: %s: cannot be run: %s; check the path\n", words[0], std::strerror(errno));
    _exit(127);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int Exec::run() const {
  if (command.empty()) throw io::InputError("./program must be given: write tandem vgpu exec ./program ARGUMENTS");
  const vgpu::Model* model = nullptr;
  if (!gpu::is_virtual(device))
    throw io::InputError("--device (" + device + ") must be a virtual GPU, like vgpu:h200: see tandem vgpu models");
  throw_if_failed(vgpu::find_model(device, &model));
  const Temporary summary;
  set_environment(summary.path());
  const int code = run_program(command);
  // The file has one line for each process that used the device.
  std::ifstream file(summary.path());
  size_t processes = 0, errors = 0;
  for (size_t launches = 0, found = 0, warnings = 0, refused = 0; file >> launches >> found >> warnings >> refused;) {
    ++processes;
    errors += found;
  }
  if (processes == 0 && code != 127) {
    std::fprintf(
        stderr,
        "tandem: %s: no process used the virtual GPU and exited: load libcuda.so.1 by name, and leave by exit\n",
        command.front().c_str());
    return code != 0 ? code : 2;
  }
  return code != 0 ? code : errors > 0 ? 1 : 0;
}

}  // namespace

std::vector<std::string> without_mark(std::vector<std::string> words) {
  if (words.size() < 3 || words[1] != "vgpu" || words[2] != "exec") return words;
  // Every option has a value, after "=" or as the next word.
  size_t at = 3;
  while (at < words.size() && words[at].starts_with("--") && words[at] != "--")
    at += words[at].find('=') == std::string::npos ? 2 : 1;
  if (at < words.size() && words[at] == "--") words.erase(words.begin() + static_cast<ptrdiff_t>(at));
  return words;
}

void add_exec(Command vgpu) {
  auto exec = std::make_shared<Exec>();
  Command verb = vgpu.add("exec", "A program on the CUDA driver's or runtime's interface, on a virtual GPU");
  verb.footer(R"(Examples:
  tandem vgpu exec ./program its arguments
  tandem vgpu exec --device vgpu:b200 --schedule 7 -- ./program --its-flag

The program finds a libcuda.so.1 and a libcudart.so.13 that answer for the virtual GPU. Its kernels must be there as PTX: as
text, by NVRTC, or in a fat binary (nvcc -cudart shared -gencode arch=compute_90a,code=compute_90a).
Exit code: the program's own where that is not 0; else 1 when the checker found errors, 2 when the program never reached
the virtual GPU, 0 otherwise. 127: it cannot be run; 128 + N: it was ended by signal N.)");
  verb.option("--device", exec->device, "vgpu:h200, vgpu:h100 or vgpu:b200").show_default();
  verb.option("--check", exec->check, "on, or off: several times as fast, but an invalid address ends the program")
      .one_of({"on", "off"})
      .show_default();
  verb.option("--letter", exec->letter,
              "Findings that follow from the text of the PTX manual but not from hardware: on, off")
      .one_of({"on", "off"})
      .show_default();
  verb.option("--schedule", exec->schedule, "Order in which warps run and copies complete; 0: early, 1: late")
      .at_least_zero()
      .show_default();
  verb.option("--threads", exec->threads, "Threads of the host; 0: one per core").within(0, 1024);
  verb.option("--max-instructions", exec->max_instructions, kAboutMaxInstructions).within(0, INT32_MAX).show_default();
  verb.run_with_rest([exec](std::vector<std::string> program) {
    exec->command = std::move(program);
    return exec->run();
  });
}

}  // namespace tandem::tool
