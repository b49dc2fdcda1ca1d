// Tests with one line per checked case.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "support/check_accuracy.h"
#include "support/engines.h"

namespace tandem::test {

inline void expect_good(const std::string& flags, const std::function<void(Instance&)>& adjust = nullptr) {
  static const NamedEngine engine = cpu_engine(2);
  const Verdict verdict = run_case(from_flags(flags), engine.run, engine.supports, adjust);
  EXPECT_EQ(verdict.failure, "");
  EXPECT_EQ(verdict.refusal, "") << flags;
}

}  // namespace tandem::test
