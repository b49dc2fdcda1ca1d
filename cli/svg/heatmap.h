// The attention of one head as a picture: a row for every query word, a column for every key word. A darker cell has a
// larger weight.
#pragma once

#include <string>
#include <vector>

namespace tandem::svg {

struct Heatmap {
  std::string title, subtitle;
  std::vector<std::string> rows, columns;  // query words, key words
  std::vector<double> values;              // rows x columns, 0..1; each row's sum is at most 1
};

std::string draw(const Heatmap& map);

}  // namespace tandem::svg
