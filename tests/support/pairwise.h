// Few combinations of many options that hold every pair of values of any two of them.
#pragma once

#include <span>
#include <vector>

namespace tandem::test {

// choices: how many values each option has. A combination has a value of each, counted from 0. The same list every
// time.
std::vector<std::vector<int>> pairwise(std::span<const int> choices);

}  // namespace tandem::test
