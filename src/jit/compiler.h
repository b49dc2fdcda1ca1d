// Compiles CUDA C++ to machine code or PTX with NVRTC, which is found at run time.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "jit/nvrtc.h"
#include "jit/sources.h"

namespace tandem::jit {

enum class Output { cubin, ptx };

struct Request {
  std::string name;    // name in messages and cache listings
  std::string source;  // one translation unit
  std::string arch;    // "sm_90a"
  std::vector<std::string> options;
  Output output = Output::cubin;
};

class Compiler {
 public:
  // Without a compiler, returns TANDEM_NO_COMPILER and names the package to install.
  static Status open(const Search& search, const Env& env, std::unique_ptr<Compiler>* compiler);

  // headers: every file that the source may include; no folder is searched. code: a cubin or PTX. log: warnings. An
  // error message has the first error and names a file with all of them. Any thread may call this function.
  Status compile(const Request& request, std::span<const Text> headers, std::string* code, std::string* log) const;

  const std::string& path() const { return path_; }
  int major() const { return major_; }
  int minor() const { return minor_; }
  // A text that differs between compilers that may emit different code.
  const std::string& identity() const { return identity_; }

 private:
  Compiler() = default;
  Status check_arch(const Request& request, int* number) const;
  Status failure(const Request& request, nvrtcResult result, const std::string& log) const;

  Nvrtc nvrtc_;
  std::string path_, temporary_, identity_;
  int major_ = 0, minor_ = 0;
  std::vector<int> archs_;  // 90, 100, ...
};

}  // namespace tandem::jit
