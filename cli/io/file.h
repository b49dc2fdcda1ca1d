// Files: read-only views of whole files, and files that appear complete or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace tandem::io {

// The bytes of a regular file, mapped. Throws InputError when it cannot be opened.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Writes to a temporary file beside the target and renames it in commit(); the destructor removes what was not
// committed, and so does a SIGINT, SIGTERM or SIGHUP. One at a time per process. Failures throw InputError.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  void commit();

 private:
  [[noreturn]] void fail(const char* what);

  std::string path_, temporary_;
  int descriptor_ = -1;
};

}  // namespace tandem::io
