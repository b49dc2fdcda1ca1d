// The rule by which a result is exact enough: against float64, an engine's error may be
//   at most twice the plain formula's in the input precision, plus what the result's type loses around the values;
//   in the mean at most 1.5 times it, plus the same in the mean.
// The log-sum-exp of 16-bit inputs may err by 2^-13 besides: engines take its exponentials no more exactly than that.
// Infinities must stand where they stand in float64. Every head is held to what the plain formula's
// worst head and run show.
#pragma once

#include <string>
#include <vector>

#include "cli/call.h"

namespace tandem::tool {

struct Errors {
  double largest = 0, mean = 0;
};

struct AccuracyCheck {
  std::string name;
  Errors engine, plain;  // over the whole tensor; plain: of its first run
  double worst = 0;      // the largest share of what is allowed that any head uses up; good when at most 1
  std::string why;       // when not good
  bool good() const { return why.empty(); }
};

// plain: the results of one or more runs of the formula. input: the type of q.
AccuracyCheck check_accuracy(DType input, const Results::Named& engine, const std::vector<const Buffer*>& plain,
                             const Buffer& exact);

// All tensors of a pass.
std::vector<AccuracyCheck> check_accuracy(DType input, tandem_pass pass, const Results& engine,
                                          const std::vector<Results>& plain, const Results& exact);

}  // namespace tandem::tool
