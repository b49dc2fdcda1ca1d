#include "cli/io/file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "cli/io/tensor.h"

namespace tandem::io {
namespace {

std::string reason() { return std::strerror(errno); }

// The temporary file that a signal handler must remove. The flag is set when the name is complete.
char unfinished[PATH_MAX];
std::atomic<bool> has_unfinished{false};
constexpr int fatal_signals[] = {SIGINT, SIGTERM, SIGHUP};

extern "C" void remove_unfinished_and_die(int number) {
  if (has_unfinished.load()) ::unlink(unfinished);
  ::signal(number, SIG_DFL);
  ::raise(number);
}

void install_signal_handlers() {
  for (const int number : fatal_signals) {
    struct sigaction action = {};
    ::sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_DFL) continue;  // ignored by the parent (nohup), or already installed
    action.sa_handler = remove_unfinished_and_die;
    sigemptyset(&action.sa_mask);
    ::sigaction(number, &action, nullptr);
  }
}

// Blocks signals between the creation of a file and the recording of its name.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t set;
    sigemptyset(&set);
    for (const int number : fatal_signals) sigaddset(&set, number);
    ::pthread_sigmask(SIG_BLOCK, &set, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) throw InputError(path + ": cannot be opened: " + reason() + "; check the path");
  struct stat status;
  if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor);
    throw InputError(path + ": must be a regular file: pass another path");
  }
  size_ = static_cast<size_t>(status.st_size);
  if (size_ > 0) {
    void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (mapped == MAP_FAILED) {
      const std::string why = reason();
      ::close(descriptor);
      throw InputError(path + ": cannot be read: " + why + "; check the file");
    }
    data_ = static_cast<const std::byte*>(mapped);
  }
  ::close(descriptor);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)), temporary_(path_ + ".XXXXXX") {
  struct stat status;
  if (::stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    throw InputError(path_ + ": must be a regular file: pass another path");
  if (temporary_.size() >= sizeof unfinished) throw InputError(path_ + ": the path must be shorter: pass another path");
  install_signal_handlers();
  const SignalsBlocked blocked;
  descriptor_ = ::mkstemp(temporary_.data());
  if (descriptor_ < 0) throw InputError(path_ + ": cannot be written: " + reason() + "; check the folder");
  std::memcpy(unfinished, temporary_.c_str(), temporary_.size() + 1);
  has_unfinished = true;
  const mode_t mask = ::umask(0);
  ::umask(mask);
  ::fchmod(descriptor_, 0666 & ~mask);  // mkstemp creates files that only their owner can read
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  const SignalsBlocked blocked;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
  has_unfinished = false;
}

void AtomicFile::fail(const char* what) {
  throw InputError(path_ + ": " + what + ": " + reason() + "; check the disk");
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("cannot be written");
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void AtomicFile::write(std::string_view text) { write(std::as_bytes(std::span(text))); }

void AtomicFile::commit() {
  const SignalsBlocked blocked;
  const int descriptor = descriptor_;
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be renamed into place");
  descriptor_ = -1;
  has_unfinished = false;
  if (::close(descriptor) != 0) fail("cannot be closed");
}

void check_output_file(const std::string& flag, const std::string& path) {
  if (path.empty()) return;
  if (std::filesystem::is_directory(path))
    throw InputError(flag + " (" + path + ") must be a file, not a folder: pass another path");
  AtomicFile file(path);  // the destructor removes its temporary file
}

void check_output_folder(const std::string& flag, const std::string& path) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  const std::string where = flag + " (" + path + ") must be a folder";
  fs::path existing = fs::absolute(path).lexically_normal();
  if (!existing.has_filename()) existing = existing.parent_path();  // "result/"
  if (!fs::exists(existing) && !path.ends_with('/') && existing.has_extension())
    throw InputError(where + ": add a / to a name with a suffix");
  while (!fs::exists(existing) && existing.has_relative_path()) existing = existing.parent_path();
  if (!fs::is_directory(existing)) throw InputError(where + ": " + existing.string() + " is a file; pass another path");
  std::string probe = (existing / "tandem.XXXXXX").string();
  const int descriptor = ::mkstemp(probe.data());
  if (descriptor < 0)
    throw InputError(where + ": " + existing.string() + " cannot be written: " + reason() + "; pass another folder");
  ::close(descriptor);
  ::unlink(probe.c_str());
}

}  // namespace tandem::io
