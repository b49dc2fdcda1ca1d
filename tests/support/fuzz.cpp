// tandem_fuzz: random problems through an engine and the judge. Prints one line per failure that repeats it.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "support/engines.h"
#include "support/judge.h"

namespace {

constexpr const char* kUsage =
    "tandem_fuzz [--device cpu|oracle] [--seed S] [--count N] [--seconds T] [--case 'FLAGS'] [--verbose]\n"
    "  Runs N random problems from seed S on, for T seconds at most, or one problem given by its flags.\n";

struct Options {
  std::string device = "cpu", flags;
  uint64_t seed = 1, count = 1000;
  double seconds = 1e9;
  bool verbose = false;
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
    } else if (flag == "--seed") {
      o.seed = std::stoull(value);
    } else if (flag == "--count") {
      o.count = std::stoull(value);
    } else if (flag == "--seconds") {
      o.seconds = std::stod(value);
    } else if (flag == "--case") {
      o.flags = value;
    } else {
      throw std::invalid_argument("unknown flag: " + flag);
    }
  }
  return o;
}

int run(const Options& o) {
  using namespace tandem::test;
  const NamedEngine engine = engine_named(o.device);
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const uint64_t count = o.flags.empty() ? o.count : 1;
  uint64_t failures = 0, refused = 0, done = 0;
  double worst = 0;
  for (; done < count && elapsed() < o.seconds; ++done) {
    const Case c = o.flags.empty() ? random_case(o.seed + done) : from_flags(o.flags);
    if (o.verbose) {
      std::printf("%s\n", to_flags(c).c_str());
      std::fflush(stdout);
    }
    const Verdict verdict = run_case(c, engine.run, engine.supports);
    worst = std::max(worst, verdict.worst);
    if (!verdict.failure.empty()) {
      ++failures;
      std::printf("FAILED (seed %llu) %s\n", static_cast<unsigned long long>(o.seed + done), verdict.failure.c_str());
      std::fflush(stdout);
    }
    if (!verdict.refusal.empty()) {
      ++refused;
      if (o.verbose || !o.flags.empty()) std::printf("refused: %s\n", verdict.refusal.c_str());
    }
  }
  std::printf("%s: %llu problems, %llu refused, %llu failed; largest error %.2f of the allowed one\n", o.device.c_str(),
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(refused),
              static_cast<unsigned long long>(failures), worst);
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(read_options(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n%s", error.what(), kUsage);
    return 2;
  }
}
