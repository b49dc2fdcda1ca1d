// Skips all tests (exit code 77) if TANDEM_CPU_TARGET names an instruction set that this machine cannot run, or that it
// runs by default.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "base/instruction_set.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const char* wanted = std::getenv("TANDEM_CPU_TARGET")) {
    const std::vector<std::string_view>& targets = tandem::instruction_sets();
    const auto found = std::find(targets.begin(), targets.end(), std::string_view(wanted));
    if (found == targets.end() || found == targets.begin()) {
      std::printf("skipped: %s is %s\n", wanted, found == targets.end() ? "not available here" : "the default");
      return 77;
    }
  }
  return RUN_ALL_TESTS();
}
