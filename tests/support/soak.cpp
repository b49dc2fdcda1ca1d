// Random continuous batching on the CPU: requests join, prefill in chunks, decode, share a prompt's pages and leave.
//
//     tandem_soak --steps 100000 --seed 1 --dtype bf16
//
// Each step appends keys to a paged cache and runs one forward. Free pages are NaN. A step compares one request with
// the same request alone, bit by bit, and with float64. At the end no page may be missing, and resident memory may not
// have grown.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "problem/convert.h"
#include "support/random.h"
#include "support/rounded.h"
#include "tandem/tandem.h"

namespace tandem::test {
namespace {

constexpr int64_t kHeadsQ = 4, kHeadsK = 2, kDim = 16, kPageSize = 16, kPages = 96, kMaxPages = 16;
constexpr size_t kMaxRequests = 12;
constexpr int64_t kChunk = 24, kPromptPages = 2;
constexpr int64_t kWindow = 1000;  // samples per check of accuracy
constexpr int64_t kQueryRow = kHeadsQ * kDim, kKeyRow = kHeadsK * kDim;

[[noreturn]] void fail(const std::string& sentence) { throw std::runtime_error(sentence); }
void require(tandem_status status) {
  if (status != TANDEM_OK) fail(tandem_last_error());
}

// Elements of a type, and their description as a tensor.
struct Array {
  DType type = DType::f32;
  std::vector<std::byte> bytes;
  std::vector<int64_t> shape;
  tandem_tensor tensor{};

  double get(int64_t n) const { return load(type, bytes.data() + n * size_of(type)); }
  void set(int64_t n, double x) { store(type, bytes.data() + n * size_of(type), x); }
  // Resizes the array, and fills it with NaN.
  void resize(DType its_type, std::vector<int64_t> its_shape) {
    type = its_type, shape = std::move(its_shape);
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    bytes.assign(static_cast<size_t>(count * size_of(type)), std::byte{0xff});
  }
  const tandem_tensor* describe() {
    const bool integer = type == DType::i32;
    tensor = {};
    tensor.data = bytes.data();
    tensor.ndim = static_cast<int32_t>(shape.size());
    tensor.dtype.code = integer ? TANDEM_INT : type == DType::bf16 ? TANDEM_BFLOAT : TANDEM_FLOAT;
    tensor.dtype.bits = static_cast<uint8_t>(8 * size_of(type));
    tensor.dtype.lanes = 1;
    tensor.device.type = TANDEM_CPU;
    tensor.shape = shape.data();
    return &tensor;
  }
};

struct Request {
  uint64_t id = 0;
  int64_t prompt = 0, limit = 0, length = 0, fresh = 0;  // keys; fresh: of this step, already counted in length
  bool shares = false;
  std::vector<int32_t> pages;
};

// The numbers of a token, which depend on the request and the position only. Requests that share a prompt share keys.
enum class Part : uint64_t { q, k, v };
double number(const Request& r, Part part, int64_t position, int64_t n) {
  const bool shared = r.shares && part != Part::q && position < kPromptPages * kPageSize;
  Random random((shared ? 0 : r.id) * 1000003 + static_cast<uint64_t>(position) * 7919 +
                static_cast<uint64_t>(part) * 31 + static_cast<uint64_t>(n));
  return 4 * random.uniform() - 2;
}

// One call: requests with their queries of this step.
class Batch {
 public:
  Batch(DType type, Array* k_cache, Array* v_cache) : type_(type), k_cache_(*k_cache), v_cache_(*v_cache) {}

  // Row kPadding rows after the last request belong to no request, and must stay NaN.
  static constexpr int64_t kPadding = 2;

  void set(const std::vector<const Request*>& requests) {
    const auto batch = static_cast<int64_t>(requests.size());
    int64_t rows = 0;
    for (const Request* r : requests) rows += r->fresh;
    for (Array* x : {&q_, &out_}) x->resize(type_, {rows + kPadding, kHeadsQ, kDim});
    for (Array* x : {&k_, &v_}) x->resize(type_, {rows + kPadding, kHeadsK, kDim});
    sums_.resize(DType::i32, {batch + 1}), used_.resize(DType::i32, {batch}), before_.resize(DType::i32, {batch});
    table_.resize(DType::i32, {batch, kMaxPages});
    longest_ = rows = 0;
    sums_.set(0, 0);
    for (int64_t b = 0; b < batch; ++b) {
      const Request& r = *requests[static_cast<size_t>(b)];
      for (int64_t i = 0; i < r.fresh; ++i) set_row(r, rows + i, r.length - r.fresh + i);
      rows += r.fresh, longest_ = std::max(longest_, r.fresh);
      sums_.set(b + 1, static_cast<double>(rows));
      used_.set(b, static_cast<double>(r.length)), before_.set(b, static_cast<double>(r.length - r.fresh));
      for (int64_t n = 0; n < kMaxPages; ++n)
        table_.set(b * kMaxPages + n, n < static_cast<int64_t>(r.pages.size()) ? r.pages[static_cast<size_t>(n)] : 1e9);
    }
  }
  void append() {
    tandem_append_kv_args args{};
    args.size = sizeof args;
    args.k = k_.describe(), args.v = v_.describe();
    args.k_cache = k_cache_.describe(), args.v_cache = v_cache_.describe();
    args.page_table = table_.describe(), args.cache_seqlens = before_.describe();
    args.cu_seqlens_new = sums_.describe();
    require(tandem_append_kv(nullptr, &args, nullptr));
  }
  void attend() {
    tandem_attention_args args{};
    args.size = sizeof args;
    args.q = q_.describe(), args.k = k_cache_.describe(), args.v = v_cache_.describe(), args.out = out_.describe();
    args.cu_seqlens_q = sums_.describe(), args.page_table = table_.describe(), args.seqused_k = used_.describe();
    args.max_seqlen_q = longest_, args.causal = 1;
    size_t bytes = 0;
    require(tandem_workspace_size(nullptr, TANDEM_FORWARD, &args, &bytes));
    workspace_.resize(std::max(bytes, workspace_.size()));
    require(tandem_forward(nullptr, &args, workspace_.data(), workspace_.size(), nullptr));
    for (int64_t n = first_row(-1) * kQueryRow; n < (first_row(-1) + kPadding) * kQueryRow; ++n)
      if (!std::isnan(out_.get(n))) fail("a row of no request was written");
  }
  int64_t first_row(int64_t request) const {
    return static_cast<int64_t>(sums_.get(request < 0 ? sums_.shape[0] - 1 : request));
  }
  std::vector<std::byte> result(int64_t request) const {
    const auto row = kQueryRow * size_of(type_);
    return {out_.bytes.begin() + first_row(request) * row, out_.bytes.begin() + first_row(request + 1) * row};
  }
  double out(int64_t request, int64_t row, int64_t n) const {
    return out_.get((first_row(request) + row) * kQueryRow + n);
  }

 private:
  void set_row(const Request& r, int64_t row, int64_t position) {
    for (int64_t n = 0; n < kQueryRow; ++n) q_.set(row * kQueryRow + n, number(r, Part::q, position, n));
    for (int64_t n = 0; n < kKeyRow; ++n) {
      k_.set(row * kKeyRow + n, number(r, Part::k, position, n));
      v_.set(row * kKeyRow + n, number(r, Part::v, position, n));
    }
  }

  const DType type_;
  Array &k_cache_, &v_cache_;
  Array q_, k_, v_, out_, sums_, used_, before_, table_;
  int64_t longest_ = 0;
  std::vector<std::byte> workspace_;
};

// The errors of a window of samples, against float64, of the engine and of standard attention.
struct Errors {
  double own = 0, plain = 0, slack = 0;
  int64_t samples = 0;

  void check(DType type) {
    if (own > 2 * plain + slack)
      fail("the error " + std::to_string(own) + " exceeds standard attention's " + std::to_string(plain) + " in " +
           name_of(type));
    *this = {};
  }
};

// Attention of one query and head. exact: float64; else float32, with probabilities and result rounded to the type.
std::vector<double> attend_row(const Request& r, DType type, int64_t position, int64_t head, bool exact) {
  const auto step = [exact](double x) { return exact ? x : static_cast<double>(static_cast<float>(x)); };
  const int64_t head_k = head / (kHeadsQ / kHeadsK);
  std::vector<double> scores, out(kDim, 0.0);
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t j = 0; j <= position; ++j) {
    double score = 0;
    for (int64_t d = 0; d < kDim; ++d) {
      const double q = rounded(type, number(r, Part::q, position, head * kDim + d));
      score = step(score + q * rounded(type, number(r, Part::k, j, head_k * kDim + d)));
    }
    scores.push_back(step(score / std::sqrt(kDim)));
    largest = std::max(largest, scores.back());
  }
  for (int64_t j = 0; j <= position; ++j) {
    const double weight = step(std::exp(scores[static_cast<size_t>(j)] - largest));
    sum = step(sum + weight);
    for (int64_t d = 0; d < kDim; ++d) {
      const double v = rounded(type, number(r, Part::v, j, head_k * kDim + d));
      out[static_cast<size_t>(d)] = step(out[static_cast<size_t>(d)] + (exact ? weight : rounded(type, weight)) * v);
    }
  }
  for (double& x : out) x = exact ? x / sum : rounded(type, step(x / sum));
  return out;
}

class Server {
 public:
  Server(DType type, uint64_t seed)
      : type_(type), random_(seed), batch_(type, &k_cache_, &v_cache_), alone_(type, &k_cache_, &v_cache_) {
    for (Array* cache : {&k_cache_, &v_cache_}) cache->resize(type, {kPages, kPageSize, kHeadsK, kDim});
    for (int32_t page = 0; page < kPages; ++page) free_.push_back(page);
  }

  void step() {
    leave(random_.chance(0.02));
    if (requests_.size() < kMaxRequests && random_.chance(0.4)) join();
    std::vector<const Request*> running;
    for (auto& [id, r] : requests_)
      if (grow(r)) running.push_back(&r);
    if (running.empty()) return leave(true);
    batch_.set(running);
    batch_.append();
    batch_.attend();
    sample(running);
    count_pages();
  }
  // Ends all requests. Every page must then be free.
  void finish() {
    while (!requests_.empty()) release(requests_.begin()->first);
    if (static_cast<int64_t>(free_.size()) != kPages) fail("a page is missing after the last request");
    if (errors_.samples >= kWindow / 10) errors_.check(type_);
  }
  int64_t tokens() const { return tokens_; }
  size_t running() const { return requests_.size(); }

 private:
  void join() {
    Request r;
    r.id = ++last_id_;
    r.shares = random_.chance(0.5);
    r.prompt = random_.between(1, 90) + (r.shares ? kPromptPages * kPageSize : 0);
    r.limit = std::min(r.prompt + random_.between(1, 60), kMaxPages * kPageSize);
    const Request* leader = nullptr;
    for (const auto& [id, other] : requests_)
      if (r.shares && other.shares && other.length >= kPromptPages * kPageSize) leader = &other;
    if (leader != nullptr) {
      r.pages.assign(leader->pages.begin(), leader->pages.begin() + kPromptPages);
      for (const int32_t page : r.pages) ++uses_[page];
      r.length = kPromptPages * kPageSize;
    }
    requests_[r.id] = r;
  }
  // Ends the requests that are complete, and cancels one other request.
  void leave(bool cancel) {
    for (auto at = requests_.begin(); at != requests_.end();) {
      const Request r = (at++)->second;
      if (r.length >= r.limit) release(r.id);
    }
    if (!cancel || requests_.empty()) return;
    auto at = requests_.begin();
    std::advance(at, random_.between(0, static_cast<int64_t>(requests_.size()) - 1));
    release(at->first);
  }
  void release(const uint64_t id) {
    for (const int32_t page : requests_[id].pages) {
      if (--uses_[page] > 0) continue;
      free_.push_back(page);
      for (Array* cache : {&k_cache_, &v_cache_}) {
        const int64_t bytes = kPageSize * kKeyRow * size_of(type_);
        std::memset(cache->bytes.data() + page * bytes, 0xff, static_cast<size_t>(bytes));
      }
    }
    requests_.erase(id);
  }
  // Adds the keys of the next chunk or token. Returns false if no page is free, or the request has ended.
  bool grow(Request& r) {
    r.fresh = std::min(r.length < r.prompt ? std::min(random_.between(1, kChunk), r.prompt - r.length) : int64_t{1},
                       r.limit - r.length);
    const auto pages = static_cast<size_t>((r.length + r.fresh + kPageSize - 1) / kPageSize);
    if (r.fresh == 0 || pages - std::min(pages, r.pages.size()) > free_.size()) return false;
    while (r.pages.size() < pages) {
      const auto n = static_cast<size_t>(random_.between(0, static_cast<int64_t>(free_.size()) - 1));
      r.pages.push_back(free_[n]);
      uses_[free_[n]] = 1;
      free_[n] = free_.back();
      free_.pop_back();
    }
    r.length += r.fresh, tokens_ += r.fresh;
    return true;
  }
  void sample(const std::vector<const Request*>& running) {
    const int64_t at = random_.between(0, static_cast<int64_t>(running.size()) - 1);
    const Request& r = *running[static_cast<size_t>(at)];
    alone_.set({&r});
    alone_.attend();
    if (alone_.result(0) != batch_.result(at)) fail("request " + std::to_string(r.id) + " has other bits than alone");
    const int64_t row = random_.between(0, r.fresh - 1), head = random_.between(0, kHeadsQ - 1);
    const int64_t position = r.length - r.fresh + row;
    const auto exact = attend_row(r, type_, position, head, true), plain = attend_row(r, type_, position, head, false);
    for (int64_t d = 0; d < kDim; ++d) {
      const double got = batch_.out(at, row, head * kDim + d), x = exact[static_cast<size_t>(d)];
      if (!std::isfinite(got)) fail("request " + std::to_string(r.id) + " has a result that is not finite");
      errors_.own = std::max(errors_.own, std::fabs(got - x));
      errors_.plain = std::max(errors_.plain, std::fabs(plain[static_cast<size_t>(d)] - x));
      errors_.slack =
          std::max(errors_.slack, 2 * std::fabs(rounded(type_, rounded(type_, x + 0.3) - 0.3) - rounded(type_, x)));
    }
    if (++errors_.samples == kWindow) errors_.check(type_);
  }
  void count_pages() const {
    std::vector<int> uses(kPages, 0);
    for (const auto& [id, r] : requests_)
      for (const int32_t page : r.pages) ++uses[static_cast<size_t>(page)];
    const auto used = std::ranges::count_if(uses, [](int n) { return n > 0; });
    if (used + static_cast<int64_t>(free_.size()) != kPages) fail("a page is neither used nor free");
  }

  const DType type_;
  Random random_;
  Array k_cache_, v_cache_;
  Batch batch_, alone_;
  std::map<uint64_t, Request> requests_;
  std::map<int32_t, int> uses_;
  std::vector<int32_t> free_;
  uint64_t last_id_ = 0;
  int64_t tokens_ = 0;
  Errors errors_;
};

#ifdef TANDEM_SANITIZED
constexpr int64_t kMayGrow = int64_t{1} << 40;  // AddressSanitizer keeps freed memory, and it reports leaks
#else
constexpr int64_t kMayGrow = 2 << 20;
#endif

int64_t resident_bytes() {
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

void run(DType type, int64_t steps, uint64_t seed) {
  Server server(type, seed);
  int64_t early = 0;
  size_t most = 0;
  for (int64_t n = 0; n < steps; ++n) {
    try {
      server.step();
    } catch (const std::exception& error) {
      fail("step " + std::to_string(n) + ": " + error.what());
    }
    most = std::max(most, server.running());
    if (n == steps / 10) early = resident_bytes();
  }
  server.finish();
  const int64_t grown = resident_bytes() - early;
  std::printf("%s: %lld steps, %lld tokens, at most %zu requests at once, resident memory grew by %lld KiB\n",
              name_of(type), static_cast<long long>(steps), static_cast<long long>(server.tokens()), most,
              static_cast<long long>(grown / 1024));
  if (grown > kMayGrow) fail("resident memory grew by " + std::to_string(grown) + " bytes");
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char** argv) {
  int64_t steps = 1000;
  uint64_t seed = 1;
  tandem::DType type = tandem::DType::f32;
  for (int n = 1; n + 1 < argc; n += 2) {
    const std::string name = argv[n], value = argv[n + 1];
    if (name == "--steps") {
      steps = std::stoll(value);
    } else if (name == "--seed") {
      seed = std::stoull(value);
    } else if (name == "--dtype" && (value == "f32" || value == "bf16" || value == "f16")) {
      type = value == "bf16" ? tandem::DType::bf16 : value == "f16" ? tandem::DType::f16 : tandem::DType::f32;
    } else {
      std::fprintf(stderr, "%s (%s) must be --steps N, --seed N or --dtype f32|bf16|f16: pass one of them\n",
                   name.c_str(), value.c_str());
      return 2;
    }
  }
  try {
    tandem::test::run(type, steps, seed);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n  repeat: tandem_soak --steps %lld --seed %llu\n", error.what(),
                 static_cast<long long>(steps), static_cast<unsigned long long>(seed));
    return 1;
  }
  return 0;
}
