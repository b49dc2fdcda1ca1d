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

// The CPU engine on a number of threads, with a poisoned and guarded workspace of exactly the bytes it requests.
NamedEngine cpu_engine(int threads);

}  // namespace tandem::test
