// Compiled kernels on disk, shared by all processes of a user. Losing the folder or any file of it costs time, nothing
// else: whatever is wrong with it, callers go on without.
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

// A file descriptor that closes itself.
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
    // How long to wait for another process that compiles the same kernel before doing so too.
    std::chrono::milliseconds patience = std::chrono::minutes(2);
  };

  // TANDEM_CACHE_DIR, else tandem/ in XDG_CACHE_HOME, else ~/.cache/tandem; none with TANDEM_CACHE=off or no home.
  static Options options(const Env& env);

  explicit Cache(Options options) : options_(std::move(options)) {}

  // Ok when entries can be read; else the sentence for the log that says why this process does without a cache.
  Status usable() const;

  // The payload published under key. A damaged entry is removed and not found.
  std::optional<std::string> lookup(const Digest& key) const;

  // Makes the payload visible to everybody at once, then removes what was used least recently, down to max_bytes.
  Status publish(const Digest& key, std::string_view description, std::string_view payload) const;

  // The right to compile a kernel, among processes and threads; given back on destruction or by the end of the process.
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
  // Returns when the caller has the right, or somebody else has published the entry, or patience is over, or the folder
  // knows no locks.
  Lock lock(const Digest& key) const;

  struct Listed {
    std::string description;
    int64_t bytes = 0;
    std::chrono::seconds age{};  // since its last use, to the hour
  };
  // The most recently used first.
  std::vector<Listed> list() const;
  // Removes everything; returns the number of entries among it.
  int64_t clear() const;

 private:
  Status open_folder(File* folder) const;
  void trim(const File& folder) const;

  const Options options_;
};

}  // namespace tandem::jit
