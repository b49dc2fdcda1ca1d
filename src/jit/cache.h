// Compiled kernels on disk, shared by all processes of a user. A lost folder or file costs only time, because callers
// continue without the cache after any error.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "jit/sha256.h"

namespace tandem::jit {

// A file descriptor that is closed on destruction.
class File {
 public:
  File() = default;
  explicit File(int fd) : fd_(fd) {}
  File(File&& other) noexcept : fd_(other.release()) {}
  File& operator=(File&& other) noexcept;
  ~File();

  bool open() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  int release();

 private:
  int fd_ = -1;
};

class Cache {
 public:
  struct Options {
    std::string folder;  // "": no cache
    int64_t max_bytes = int64_t{512} << 20;
    // Maximum wait for another process that compiles the same kernel. Afterwards this process compiles the kernel too.
    std::chrono::milliseconds patience = std::chrono::minutes(2);
  };

  // The folder is TANDEM_CACHE_DIR, else tandem/ in XDG_CACHE_HOME, else ~/.cache/tandem. The path is empty with
  // TANDEM_CACHE=off or without a home.
  static Options options(const Env& env);

  explicit Cache(Options options) : options_(std::move(options)) {}

  // Returns ok if entries can be read, else a message for the log: the reason why this process has no cache.
  Status usable() const;

  // Returns the payload published under key. A damaged entry is removed and counts as missing.
  std::optional<std::string> lookup(const Digest& key) const;

  // Makes the payload visible to all processes atomically, then removes the least recently used entries beyond
  // max_bytes.
  Status publish(const Digest& key, std::string_view description, std::string_view payload) const;

  // The right to compile a kernel, among processes and threads. The right ends on destruction or with the process.
  class Lock {
   public:
    Lock() = default;
    Lock(File folder, File file, std::string name);
    Lock(Lock&&) noexcept = default;
    Lock& operator=(Lock&&) = delete;
    ~Lock();

    bool held() const { return file_.open(); }

   private:
    File folder_, file_;
    std::string name_;
  };
  // Returns when the caller has the right, when another process has published the entry, or after options.patience.
  // Also returns if the file system has no locks.
  Lock lock(const Digest& key) const;

  struct Listed {
    std::string description;
    int64_t bytes = 0;
    std::chrono::seconds age{};  // since the last use, accurate to an hour
  };
  // Returns the entries, most recently used first.
  std::vector<Listed> list() const;
  // Removes everything and returns the number of removed entries.
  int64_t clear() const;

 private:
  Status open_folder(File* folder) const;
  void trim(const File& folder) const;

  const Options options_;
};

}  // namespace tandem::jit
