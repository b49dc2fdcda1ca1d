// worker <libnvrtc> <cache folder> <threads> <source>: each thread requests the kernel once.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "jit/builder.h"

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  tandem::Env env;
  env.nvrtc = argv[1];
  tandem::jit::KernelBuilder builder({}, env, {.folder = argv[2]}, {});
  const tandem::jit::Request request{"worker", argv[4], "sm_90a", {}, tandem::jit::Output::cubin};
  std::vector<std::thread> threads;
  for (int i = 0; i < std::atoi(argv[3]); ++i) {
    threads.emplace_back([&] {
      std::shared_ptr<const tandem::jit::Code> code;
      const tandem::Status status = builder.build(request, &code);
      if (!status.ok() || code->bytes.find("compiled worker") != 0) {
        std::fprintf(stderr, "%s\n", status.message.c_str());
        std::_Exit(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}
