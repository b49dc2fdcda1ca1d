// The plain formula: attention as a textbook computes it in the input precision. Scores, softmax and sums are float32
// (float64 for float64 inputs), P and dS are rounded to the input type, and so are the results. The
// log-sum-exp sums rounded exponentials: none need be more exact than P is. The error of all this is the measure of
// every engine's.
#pragma once

#include <cstdint>

#include "problem/problem.h"

namespace tandem::test {

// Forward or backward by p.pass, into float64 outputs that hold the results, rounded to the types of those of
// `rounded`, the same problem.
//
// noise 0: every operation rounds to nearest. Otherwise every operation is off by a random amount of at most half a
// unit in the last place instead, seeded by noise (Monte Carlo arithmetic): on a small problem a single run may be
// right by luck, several show what the formula's error is.
void plain(const Problem& p, const Problem& rounded, uint64_t noise);

}  // namespace tandem::test
