// Builds kernels on demand: from memory, else from disk, else by compilation.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/status.h"
#include "jit/cache.h"
#include "jit/compiler.h"
#include "jit/sources.h"

namespace tandem::jit {

struct Code {
  Digest key;         // SHA-256 over every byte the compiler reads
  std::string bytes;  // a cubin, or PTX text
};

// Several threads may use a builder at once.
class KernelBuilder {
 public:
  // sources: the files that kernels may include. Only tests pass a list other than kernels(). The texts must outlive
  // the builder.
  KernelBuilder(Search search, Env env, Cache::Options cache, Sources sources = kernels());

  // A lookup hashes the compiler's whole input; callers should therefore keep the result. Code is compiled once, even
  // if several threads or processes request it at the same time.
  Status build(const Request& request, std::shared_ptr<const Code>* code);

  // "NVRTC 13.0", or "" without a compiler.
  std::string compiler_name();

  struct Counters {
    int64_t from_memory = 0, from_disk = 0, compiled = 0;
  };
  Counters counters() const { return {from_memory_, from_disk_, compiled_}; }

  const Cache& cache() const { return cache_; }

 private:
  // One kernel. The entry's mutex is locked during lookup and compilation.
  struct Slot {
    std::mutex mutex;
    std::shared_ptr<const Code> code;
  };

  Status compiler(const Compiler** compiler);
  Status fill(const Compiler& compiler, const Request& request, const std::vector<Text>& headers, const Digest& key,
              std::string* bytes);

  const Search search_;
  const Env env_;
  const Cache cache_;
  const Sources sources_;

  std::mutex mutex_;  // guards the members below
  std::unique_ptr<const Compiler> compiler_;
  std::map<Digest, std::shared_ptr<Slot>> slots_;

  std::atomic<int64_t> from_memory_{0}, from_disk_{0}, compiled_{0};
};

}  // namespace tandem::jit
