#include "jit/builder.h"

#include <optional>
#include <utility>

#include "base/text.h"

namespace tandem::jit {
namespace {

// A part of every key. Raise this number when equal inputs must produce different code.
constexpr std::string_view kKeyVersion = "tandem-2";

// Lengths are part of the hash, so that different lists of texts give different bytes.
class KeyHash {
 public:
  void add(std::string_view text) {
    const uint64_t bytes = text.size();
    char length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(bytes >> (8 * i));
    hash_.add({length, sizeof length});
    hash_.add(text);
  }
  Digest finish() { return hash_.finish(); }

 private:
  Sha256 hash_;
};

std::string_view name_of(Output output) { return output == Output::cubin ? "cubin" : "ptx"; }

// The request's name is part of the key, because it is the file name in line information.
Digest key_of(const Compiler& compiler, const Request& request, const std::vector<Text>& headers) {
  KeyHash hash;
  for (const std::string_view text : {kKeyVersion, std::string_view(compiler.identity()), name_of(request.output),
                                      std::string_view(request.arch), std::string_view(request.name)}) {
    hash.add(text);
  }
  hash.add(std::to_string(request.options.size()));
  for (const std::string& option : request.options) hash.add(option);
  hash.add(request.source);
  for (const Text& header : headers) {
    hash.add(header.name);
    hash.add(header.text);
  }
  return hash.finish();
}

// ptxas reports that it serialises matrix products, which makes a kernel 1.5 times as slow. NVRTC's register allocation
// varies between runs, so that a second run may find registers for overlapping products.
bool is_serialised(const std::string& log) {
  return log.find("instructions are serialized due to") != std::string::npos;
}
constexpr int kRuns = 3;

}  // namespace

KernelBuilder::KernelBuilder(Search search, Env env, Cache::Options cache, Sources sources)
    : search_(std::move(search)), env_(std::move(env)), cache_(std::move(cache)), sources_(sources) {}

Status KernelBuilder::compiler(const Compiler** compiler) {
  const std::lock_guard lock(mutex_);
  if (compiler_ == nullptr) {
    std::unique_ptr<Compiler> found;
    TANDEM_TRY(Compiler::open(search_, env_, &found));
    compiler_ = std::move(found);
  }
  *compiler = compiler_.get();
  return {};
}

std::string KernelBuilder::compiler_name() {
  const Compiler* found = nullptr;
  return compiler(&found).ok() ? str_cat("NVRTC ", found->major(), ".", found->minor()) : "";
}

Status KernelBuilder::build(const Request& request, std::shared_ptr<const Code>* code) {
  const Compiler* with = nullptr;
  TANDEM_TRY(compiler(&with));
  const std::vector<Text> headers = included_by(request.source, sources_);
  const Digest key = key_of(*with, request, headers);

  std::shared_ptr<Slot> slot;
  {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Slot>& place = slots_[key];
    if (place == nullptr) place = std::make_shared<Slot>();
    slot = place;
  }
  const std::lock_guard lock(slot->mutex);
  if (slot->code != nullptr) {
    ++from_memory_;
  } else {
    std::string bytes;
    TANDEM_TRY(fill(*with, request, headers, key, &bytes));
    slot->code = std::make_shared<const Code>(Code{key, std::move(bytes)});
  }
  *code = slot->code;
  return {};
}

Status KernelBuilder::fill(const Compiler& compiler, const Request& request, const std::vector<Text>& headers,
                           const Digest& key, std::string* bytes) {
  std::optional<std::string> found = cache_.lookup(key);
  std::optional<Cache::Lock> lock;
  if (!found) {
    lock.emplace(cache_.lock(key));
    found = cache_.lookup(key);  // another process may have published the code meanwhile
  }
  if (found) {
    ++from_disk_;
    *bytes = std::move(*found);
    return {};
  }
  std::string log;
  for (int run = 0; run < kRuns && (run == 0 || is_serialised(log)); ++run) {
    TANDEM_TRY(compiler.compile(request, headers, bytes, &log));
    ++compiled_;
  }
  if (is_serialised(log)) return {};  // correct but slow: another process may compile better code
  const std::string description = str_cat(request.name, ", ", request.arch, ", ", name_of(request.output), ", NVRTC ",
                                          compiler.major(), ".", compiler.minor());
  (void)cache_.publish(key, description, *bytes);  // uncached code is compiled again next time
  return {};
}

}  // namespace tandem::jit
