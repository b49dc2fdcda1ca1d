// One attention over the GPUs of a machine with NCCL: a thread for each GPU, forward and backward. The results must be
// the results of one GPU, and with chunks they must have the same bits.
//
//   ./tandem_example_cuda_nccl [GPUs] [tokens] [tokens of a chunk] [cuda | vgpu:h200]
//
// needle.c explains how to build it. The program finds libnccl.so.2 at run time, as Tandem does.
#include "tandem/context_parallel.hpp"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"

namespace {

constexpr int64_t kHeads = 32, kDim = 128, kRow = kHeads * kDim;
constexpr int kTimedCalls = 5;

using Rows = std::vector<uint16_t>;  // bfloat16: (rows, heads, dim)

float to_float(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

Rows random_rows(int64_t rows, uint32_t seed) {
  Rows numbers(static_cast<size_t>(rows * kRow));
  for (uint16_t& x : numbers) {
    seed = seed * 1664525u + 1013904223u;
    const float number = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-30f;  // from -2 to 2
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    x = static_cast<uint16_t>(bits >> 16);
  }
  return numbers;
}

double largest_difference(const Rows& a, const Rows& b) {
  double largest = 0, scale = 0;
  for (size_t n = 0; n < a.size(); ++n) {
    largest = std::fmax(largest, std::fabs(to_float(a[n]) - to_float(b[n])));
    scale = std::fmax(scale, std::fabs(to_float(b[n])));
  }
  return largest / scale;
}

// The communicators of GPUs 0 to count - 1, from NCCL.
class Communicators {
 public:
  explicit Communicators(int count) : comms_(static_cast<size_t>(count)) {
    void* library = dlopen("libnccl.so.2", RTLD_NOW);
    if (library == nullptr) {
      std::fprintf(stderr, "libnccl.so.2 was not found.\n");
      std::exit(77);
    }
    int (*init)(void**, int, const int*);
    *reinterpret_cast<void**>(&init) = dlsym(library, "ncclCommInitAll");
    *reinterpret_cast<void**>(&destroy_) = dlsym(library, "ncclCommDestroy");
    gpu_must(init(comms_.data(), count, nullptr), "ncclCommInitAll");
  }
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;
  ~Communicators() {
    for (void* comm : comms_) destroy_(comm);
  }
  void* at(int rank) const { return comms_[static_cast<size_t>(rank)]; }

 private:
  std::vector<void*> comms_;
  int (*destroy_)(void*) = nullptr;
};

struct Inputs {
  Rows q, k, v, dout;
};

struct Results {
  explicit Results(int64_t tokens) {
    for (Rows* rows : all()) rows->resize(static_cast<size_t>(tokens * kRow));
  }
  std::vector<Rows*> all() { return {&out, &dq, &dk, &dv}; }

  Rows out, dq, dk, dv;
  double milliseconds = 0;  // both passes
};

// The tensors of one GPU, and copies of its tokens from and to the whole tensors.
class Shard {
 public:
  Shard(const std::string& device, int gpu, std::vector<tandem::CpToken> tokens)
      : name_(device == "cuda" ? "cuda:" + std::to_string(gpu) : device),
        gpu_(gpu_open_named(name_.c_str())),
        stream(gpu_stream(&gpu_)),
        context({.device = name_}),
        place_(context.on_host() ? tandem::host() : tandem::cuda(gpu)),
        tokens_(std::move(tokens)),
        lse_(allocate(rows() * kHeads * 4)) {
    for (void** x : {&q_, &k_, &v_, &dout_, &out_, &dq_, &dk_, &dv_}) *x = allocate(rows() * kRow * 2);
  }
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;
  ~Shard() {
    for (void* x : {q_, k_, v_, dout_, out_, dq_, dk_, dv_, lse_}) gpu_release(&gpu_, x);
  }

  void read(const Inputs& inputs) {
    const std::pair<void*, const Rows*> copies[] = {
        {q_, &inputs.q}, {k_, &inputs.k}, {v_, &inputs.v}, {dout_, &inputs.dout}};
    for (const auto& [to, from] : copies) {
      Rows rows(static_cast<size_t>(this->rows() * kRow));
      for (size_t n = 0; n < tokens_.size(); ++n) {
        std::memcpy(&rows[n * kRow], &(*from)[static_cast<size_t>(tokens_[n].position * kRow)], kRow * 2);
      }
      gpu_copy_to(&gpu_, to, rows.data(), rows.size() * 2, stream);
      synchronize();
    }
  }
  void write(Results* results) {
    const std::pair<const void*, Rows*> copies[] = {
        {out_, &results->out}, {dq_, &results->dq}, {dk_, &results->dk}, {dv_, &results->dv}};
    for (const auto& [from, to] : copies) {
      Rows rows(static_cast<size_t>(this->rows() * kRow));
      gpu_copy_back(&gpu_, rows.data(), from, rows.size() * 2, stream);
      for (size_t n = 0; n < tokens_.size(); ++n) {
        std::memcpy(&(*to)[static_cast<size_t>(tokens_[n].position * kRow)], &rows[n * kRow], kRow * 2);
      }
    }
  }

  // dense: with a dimension for the batch, as a call without context parallelism.
  tandem::Attention attention(bool dense, bool backward) const {
    const auto rows = [&](void* data) {
      const tandem::Sizes sizes =
          dense ? tandem::Sizes{1, this->rows(), kHeads, kDim} : tandem::Sizes{this->rows(), kHeads, kDim};
      return tandem::Tensor(tandem::bfloat16, data, sizes).on(place_);
    };
    const tandem::Sizes lse_sizes =
        dense ? tandem::Sizes{1, kHeads, this->rows()} : tandem::Sizes{kHeads, this->rows()};
    tandem::Attention a{.q = rows(q_), .k = rows(k_), .v = rows(v_), .out = rows(out_)};
    a.lse = tandem::Tensor(tandem::float32, lse_, lse_sizes).on(place_);
    if (backward) a.dout = rows(dout_), a.dq = rows(dq_), a.dk = rows(dk_), a.dv = rows(dv_);
    a.causal = dense;
    return a;
  }
  void* allocate(int64_t bytes) const { return gpu_allocate(&gpu_, static_cast<size_t>(bytes)); }
  const gpu_memory& memory() const { return gpu_; }
  void synchronize() const {
    if (gpu_.synchronize != nullptr) gpu_must(gpu_.synchronize(stream), "cuStreamSynchronize");
  }

 private:
  int64_t rows() const { return static_cast<int64_t>(tokens_.size()); }

  std::string name_;
  gpu_memory gpu_;

 public:
  void* const stream;
  const tandem::Context context;

 private:
  tandem_device place_;
  std::vector<tandem::CpToken> tokens_;
  void *q_, *k_, *v_, *dout_, *out_, *dq_, *dk_, *dv_, *lse_;
};

// Returns the mean time of calls after the first.
template <class Call>
double milliseconds_of(const Shard& shard, Call&& call) {
  call();
  shard.synchronize();
  const auto start = std::chrono::steady_clock::now();
  for (int n = 0; n < kTimedCalls; ++n) call();
  shard.synchronize();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / kTimedCalls;
}

Results on_one_gpu(const std::string& device, const Inputs& inputs, int64_t tokens) {
  std::vector<tandem::CpToken> all(static_cast<size_t>(tokens));
  for (size_t n = 0; n < all.size(); ++n) all[n].position = static_cast<int64_t>(n);
  Shard shard(device, 0, all);
  shard.read(inputs);
  tandem::Workspace workspace([&](size_t bytes) { return gpu_allocate(&shard.memory(), bytes); },
                              [&](void* memory) { gpu_release(&shard.memory(), memory); });
  Results results(tokens);
  results.milliseconds = milliseconds_of(shard, [&] {
    tandem::forward(shard.attention(true, false), shard.context, workspace, shard.stream);
    tandem::backward(shard.attention(true, true), shard.context, workspace, shard.stream);
  });
  shard.write(&results);
  return results;
}

Results on_gpus(const std::string& device, const Inputs& inputs, int64_t tokens, int gpus, int64_t chunk) {
  tandem::CpPlan plan({.ranks = gpus, .chunk = chunk, .q_lens = {tokens}, .causal = true});
  const Communicators comms(gpus);
  Results results(tokens);
  std::vector<std::string> errors(static_cast<size_t>(gpus));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < gpus; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Shard shard(device, rank, plan.queries(rank));
        shard.read(inputs);
        tandem::CpNccl nccl(shard.context, comms.at(rank), shard.stream);
        const double time = milliseconds_of(shard, [&] {
          tandem::forward(shard.attention(false, false), plan, nccl, tandem::CpExecution::gather, shard.context);
          tandem::backward(shard.attention(false, true), plan, nccl, tandem::CpExecution::gather, shard.context);
        });
        if (rank == 0) results.milliseconds = time;
        shard.write(&results);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) {
    if (!error.empty()) throw std::runtime_error(error);
  }
  return results;
}

// Prints the largest differences. Returns true if the results are right.
bool compare(const char* name, Results found, Results expected, bool equal_bits) {
  constexpr const char* kNames[] = {"out", "dq", "dk", "dv"};
  bool right = true;
  std::printf("%s: %.3f ms;", name, found.milliseconds);
  for (size_t n = 0; n < 4; ++n) {
    const Rows &x = *found.all()[n], &y = *expected.all()[n];
    const double difference = largest_difference(x, y);
    right = right && (equal_bits ? x == y : difference < 0.02);
    std::printf(" %s differs by %.2g", kNames[n], difference);
  }
  std::printf("%s\n", right ? "" : " WRONG");
  return right;
}

int run(const std::string& device, int gpus, int64_t tokens, int64_t chunk) {
  const Inputs inputs{random_rows(tokens, 1), random_rows(tokens, 2), random_rows(tokens, 3), random_rows(tokens, 4)};
  const Results one = on_one_gpu(device, inputs, tokens), one_chunks = on_gpus(device, inputs, tokens, 1, chunk);
  std::printf("Tandem %s, %d GPUs, %lld tokens, causal; one GPU takes %.3f ms\n", tandem_version(), gpus,
              static_cast<long long>(tokens), one.milliseconds);
  bool right = compare("one GPU with chunks", one_chunks, one, false);
  right = compare("GPUs", on_gpus(device, inputs, tokens, gpus, 0), one, false) && right;
  right = compare("GPUs with chunks", on_gpus(device, inputs, tokens, gpus, chunk), one_chunks, true) && right;
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const int gpus = argc > 1 ? std::atoi(argv[1]) : 2;
  const int64_t tokens = argc > 2 ? std::atoll(argv[2]) : 4096, chunk = argc > 3 ? std::atoll(argv[3]) : tokens / 16;
  try {
    return run(argc > 4 ? argv[4] : "cuda", gpus, tokens, chunk);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
