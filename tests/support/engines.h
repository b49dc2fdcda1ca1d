// The engines that the check of accuracy can run.
#pragma once

#include <string>

#include "support/check_accuracy.h"

namespace tandem::test {

struct NamedEngine {
  Engine run;
  Supports supports;
  std::string flags = "";  // the flags of tandem_fuzz that choose the engine
};

// "cpu", `oracle` (the reference in the problem's dtypes), "cuda", "cuda:N" or "vgpu:MODEL" (see gpu.h). A virtual GPU
// runs every call under `schedules` schedules. Throws std::invalid_argument, or std::runtime_error for a missing GPU.
NamedEngine engine_named(const std::string& device, int schedules = 1);

// The CPU engine on a number of threads, with a poisoned and guarded workspace of exactly the bytes it requests.
NamedEngine cpu_engine(int threads);

}  // namespace tandem::test
