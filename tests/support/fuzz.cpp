// tandem_fuzz: random problems through an engine and the check of accuracy. One line per failure repeats it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/check_accuracy.h"
#include "support/gpu.h"

namespace {

constexpr const char* kUsage =
    "tandem_fuzz [--device cpu|oracle|cuda|cuda:N|vgpu:MODEL] [--cases cpu|gpu|backward] [--seed S] [--count N] "
    "[--seconds T]\n"
    "            [--lengths N] [--threads N] [--schedules N] [--passes both|backward] [--case 'FLAGS'] [--verbose]\n"
    "  Runs N random problems from seed S on, for T seconds at most, or one problem given by its flags. A GPU runs\n"
    "  GPU cases, which all cores check; a virtual one runs each under N schedules. Stops at the 20th failure.\n"
    "  --lengths: N GPU cases in turn differ only in lengths and share kernels, which take seconds to compile (1).\n"
    "  --passes backward: only gradients, of problems that have them; the reference computes the forward.\n";

constexpr uint64_t kMaxFailures = 20;  // a failed GPU may fail every later call

struct Options {
  std::string device = "cpu", cases, flags;
  uint64_t seed = 1, count = 1000, lengths = 1, threads = 0;
  int schedules = 1;
  double seconds = 1e9;
  tandem::test::Passes passes = tandem::test::Passes::both;
  bool verbose = false;

  bool gpu() const { return device.starts_with("cuda") || device.starts_with("vgpu"); }
};

Options read_options(int argc, char** argv) {
  Options o;
  for (int n = 1; n < argc; ++n) {
    const std::string flag = argv[n];
    if (flag == "--verbose") {
      o.verbose = true;
      continue;
    }
    if (n + 1 == argc) throw std::invalid_argument("unknown flag or missing value: " + flag);
    const std::string value = argv[++n];
    if (flag == "--device") {
      o.device = value;
    } else if (flag == "--cases") {
      if (value != "cpu" && value != "gpu" && value != "backward")
        throw std::invalid_argument("--cases must be cpu, gpu or backward (gpu's, with gradients)");
      o.cases = value;
    } else if (flag == "--seed") {
      o.seed = std::stoull(value);
    } else if (flag == "--count") {
      o.count = std::stoull(value);
    } else if (flag == "--lengths") {
      o.lengths = std::stoull(value);
      if (o.lengths == 0) throw std::invalid_argument("--lengths must be at least 1");
    } else if (flag == "--threads") {
      o.threads = std::stoull(value);
    } else if (flag == "--schedules") {
      o.schedules = std::stoi(value);
    } else if (flag == "--seconds") {
      o.seconds = std::stod(value);
    } else if (flag == "--passes") {
      if (value != "both" && value != "backward") throw std::invalid_argument("--passes must be both or backward");
      o.passes = value == "both" ? tandem::test::Passes::both : tandem::test::Passes::backward;
    } else if (flag == "--case") {
      o.flags = value;
    } else {
      throw std::invalid_argument("unknown flag: " + flag);
    }
  }
  if (o.cases.empty()) o.cases = o.gpu() ? "gpu" : "cpu";
  if (o.threads == 0) o.threads = o.gpu() ? std::max(1u, std::thread::hardware_concurrency()) : 1;
  if (!o.flags.empty()) o.count = o.threads = 1;
  return o;
}

class Fuzzer {
 public:
  explicit Fuzzer(const Options& options)
      : o_(options), engine_(tandem::test::engine_named(options.device, options.schedules)) {}

  int run() {
    std::vector<std::thread> threads;
    for (uint64_t n = 0; n < o_.threads; ++n) threads.emplace_back([this] { work(); });
    for (std::thread& thread : threads) thread.join();
    std::printf("%s: %llu problems, %llu refused, %llu failed; largest error %.2f of the allowed one\n",
                o_.device.c_str(), number(done_), number(refused_), number(failures_), worst_);
    return failures_ == 0 ? 0 : 1;
  }

 private:
  static unsigned long long number(uint64_t n) { return n; }
  double elapsed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

  void work() {
    using namespace tandem::test;
    for (uint64_t n = next_++; n < o_.count && elapsed() < o_.seconds && failures_ < kMaxFailures; n = next_++) {
      const uint64_t seed = o_.seed + n;
      const uint64_t first = seed / o_.lengths, lengths = seed % o_.lengths;
      const Case c = !o_.flags.empty()        ? from_flags(o_.flags)
                     : o_.cases == "gpu"      ? random_gpu_case(first, lengths)
                     : o_.cases == "backward" ? random_gpu_backward_case(first, lengths)
                                              : random_case(seed);
      if (o_.verbose) say(to_flags(c));
      check(seed, run_case(c, engine_.run, engine_.supports, nullptr, engine_.flags, o_.passes));
    }
  }

  void check(uint64_t seed, const tandem::test::Verdict& verdict) {
    const std::lock_guard lock(mutex_);
    ++done_;
    worst_ = std::max(worst_, verdict.worst);
    if (!verdict.failure.empty()) {
      ++failures_;
      say("FAILED (seed " + std::to_string(seed) + ") " + verdict.failure);
    }
    if (!verdict.refusal.empty()) {
      ++refused_;
      if (o_.verbose || !o_.flags.empty()) say("refused: " + verdict.refusal);
    }
  }

  static void say(const std::string& line) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }

  const Options o_;
  const tandem::test::NamedEngine engine_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::atomic<uint64_t> next_{0}, failures_{0};
  std::mutex mutex_;  // guards the members below
  uint64_t done_ = 0, refused_ = 0;
  double worst_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    return Fuzzer(read_options(argc, argv)).run();
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "%s\n%s", error.what(), kUsage);
    return 2;
  } catch (const std::exception& error) {
    std::printf("NOT RUN: %s\n", error.what());
    return 77;
  }
}
