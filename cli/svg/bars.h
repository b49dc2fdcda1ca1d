// Small bar charts in a row on one scale: a panel for each kind of problem, a group of bars for each size.
#pragma once

#include <string>
#include <vector>

namespace tandem::svg {

struct Bars {
  std::string title, subtitle;
  std::string value_label;     // vertical axis, with its unit
  std::string category_label;  // horizontal axis

  struct Series {
    std::string name;
    const char* color;  // a class of Canvas
    bool pale;          // the same colour, lighter
  };
  std::vector<Series> series;

  struct BarPanel {
    std::string title;
    std::vector<std::string> categories;
    std::vector<std::vector<double>> values;  // [series][category]; 0: not measured
  };
  std::vector<BarPanel> panels;
  size_t columns = 4;
};

std::string draw(const Bars& bars);

}  // namespace tandem::svg
