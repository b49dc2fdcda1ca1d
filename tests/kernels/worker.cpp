// kernels_worker <threads>: many of these processes start with an empty cache. Each thread makes the same call once, on
// one context, and all must get the same bits. Without a GPU the program reports that and returns 77.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "support/gpu.h"

namespace {

using namespace tandem::test;

constexpr const char* kCase =
    "--dtype bf16 --gradients none --align 8 --heads-q 4 --heads-k 2 --seqlen-q 300 --seqlen-k 300 --head-dim 128 "
    "--head-dim-v 128 --causal 1";

int run(int count) {
  const Gpu gpu("cuda:0");
  std::vector<uint64_t> results(static_cast<size_t>(count));
  std::atomic<int> failures = 0;
  std::vector<std::thread> threads;
  for (uint64_t& result : results) {
    threads.emplace_back([&] {
      try {
        Instance instance(from_flags(kCase));
        Outputs outputs = instance.outputs(TANDEM_FORWARD);
        DeviceCall call(gpu, instance, TANDEM_FORWARD, outputs);
        call.allocate_workspace();
        call.forward(gpu.stream());
        call.fetch(gpu.stream());
        result = outputs.out.fingerprint() * 31 + outputs.lse.fingerprint();
      } catch (const std::exception& error) {
        std::printf("%s\n", error.what());
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const uint64_t result : results) failures += result != results[0];
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::max(1, std::atoi(argv[1])) : 1);
  } catch (const std::exception& error) {
    std::printf("NOT RUN: %s\n", error.what());
    return 77;
  }
}
