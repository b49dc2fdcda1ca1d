// Standard attention in the input precision. Scores, softmax and sums are float32 (float64 for float64 inputs). P, dS
// and the results are rounded to the input type. The log-sum-exp sums rounded exponentials, because it need not be more
// exact than P. The backward of float32 and float64 divides P by its sum; with 16-bit inputs it uses the caller's
// log-sum-exp. The error of all this measures the error of every engine.
#pragma once

#include <cstdint>

#include "problem/problem.h"

namespace tandem::test {

// Runs forward or backward by p.pass, into float64 outputs, rounded to the types of `rounded`, the same problem. noise
// 0: every operation rounds to nearest. Otherwise `noise` seeds random errors of at most half a unit (Monte Carlo
// arithmetic), because one run may be accurate by chance.
void plain(const Problem& p, const Problem& rounded, uint64_t noise);

}  // namespace tandem::test
