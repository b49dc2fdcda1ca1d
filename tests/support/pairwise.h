// A small set of combinations of many options that contains every pair of values of any two options.
#pragma once

#include <span>
#include <vector>

namespace tandem::test {

// choices: the number of values of each option. A combination has one value per option, counted from 0. The result is
// the same every time.
std::vector<std::vector<int>> pairwise(std::span<const int> choices);

}  // namespace tandem::test
