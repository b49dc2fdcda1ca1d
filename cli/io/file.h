// Files: read-only views of whole files, and files that appear complete or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace tandem::io {

// The bytes of a regular file, mapped. Throws InputError if the file cannot be opened.
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

// Writes to a temporary file in the target's folder; commit() renames it. Without commit() the destructor removes it,
// and so do SIGINT, SIGTERM and SIGHUP. A process may have one at a time. Failures throw InputError.
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

// Each throws InputError if an output of that name could not be written, and creates no file. Commands call both before
// their work. flag: "--out", for the sentence. An empty path is no output.
void check_output_file(const std::string& flag, const std::string& path);
void check_output_folder(const std::string& flag, const std::string& path);  // the folder need not exist yet

}  // namespace tandem::io
