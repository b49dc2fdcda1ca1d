// The error bound of an engine against float64. The largest error is at most twice the error of standard attention in
// the input precision, plus the rounding of the result's type. The mean error is at most 1.5 times standard
// attention's, plus the mean rounding. The lse of 16-bit inputs may err by another 2^-13, the error of its
// exponentials. Infinities must be where float64 has them. The bound of every head comes from the worst head and run of
// standard attention.
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
  Errors engine, plain;  // over the whole tensor; plain: of the first run
  double worst = 0;      // largest error over bound of any head; good up to 1
  std::string why;       // reason if not good
  bool good() const { return why.empty(); }
};

// plain: the results of one or more runs of standard attention. input: the type of q.
AccuracyCheck check_accuracy(DType input, const Results::Named& engine, const std::vector<const Buffer*>& plain,
                             const Buffer& exact);

// Checks all tensors of a pass.
std::vector<AccuracyCheck> check_accuracy(DType input, tandem_pass pass, const Results& engine,
                                          const std::vector<Results>& plain, const Results& exact);

}  // namespace tandem::tool
