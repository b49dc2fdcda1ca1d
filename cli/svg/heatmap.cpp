#include "cli/svg/heatmap.h"

#include <algorithm>
#include <cmath>

#include "cli/svg/canvas.h"

namespace tandem::svg {
namespace {

using Anchor = Canvas::Anchor;

constexpr double margin = 24, turn = 50;  // degrees by which column words are rotated
constexpr double legend_width = 14, legend_room = 84;

double widest(const std::vector<std::string>& words, double size) {
  double width = 0;
  for (const std::string& word : words) width = std::max(width, text_width(word, size));
  return width;
}

std::string percent(double value) { return std::to_string(static_cast<int>(std::lround(100 * value))) + " %"; }

// Returns the end of the scale: the largest weight, rounded up to a short number.
double scale_end(const std::vector<double>& values) {
  const double most = values.empty() ? 1 : *std::max_element(values.begin(), values.end());
  for (const double end : {0.05, 0.1, 0.2, 0.4, 0.6, 0.8}) {
    if (most <= end) return end;
  }
  return 1;
}

struct Layout {
  double cell, word_size, left, top, width, height;
  size_t word_step;  // small cells: only every n-th word is written
};

Layout layout_of(const Heatmap& map) {
  const auto longest = static_cast<double>(std::max<size_t>({map.rows.size(), map.columns.size(), 1}));
  Layout at;
  at.cell = std::clamp(640 / longest, 2.0, 40.0);
  at.word_size = std::clamp(at.cell * 0.45, 10.0, 14.0);
  at.word_step = static_cast<size_t>(std::ceil((at.word_size + 2) / at.cell));
  const double radians = turn * 3.14159265358979 / 180;
  const double word = widest(map.columns, at.word_size);
  at.left = margin + 26 + widest(map.rows, at.word_size) + 10;
  at.top = margin + 60 + 26 + word * std::sin(radians) + 14;
  const double grid = static_cast<double>(map.columns.size()) * at.cell;
  const double overhang = word * std::cos(radians) - legend_room;  // overhang of the last column's word
  at.width = std::max(at.left + grid + legend_room + std::max(0.0, overhang) + margin,
                      2 * margin + std::max(text_width(map.title, 19), text_width(map.subtitle, 13)));
  at.height = at.top + std::max(static_cast<double>(map.rows.size()) * at.cell, 120.0) + margin;
  return at;
}

void draw_words(Canvas& canvas, const Heatmap& map, const Layout& at) {
  for (size_t r = 0; r < map.rows.size(); r += at.word_step) {
    const double y = at.top + (static_cast<double>(r) + 0.5) * at.cell + at.word_size * 0.35;
    canvas.text(at.left - 8, y, map.rows[r], {.size = at.word_size, .anchor = Anchor::end});
  }
  for (size_t c = 0; c < map.columns.size(); c += at.word_step) {
    const double x = at.left + (static_cast<double>(c) + 0.5) * at.cell + at.word_size * 0.25;
    canvas.text(x, at.top - 8, map.columns[c], {.size = at.word_size, .degrees = -turn});
  }
  const double grid_width = static_cast<double>(map.columns.size()) * at.cell;
  const double grid_height = static_cast<double>(map.rows.size()) * at.cell;
  canvas.text(at.left + grid_width / 2, margin + 72, "key: the word that receives attention",
              {.size = 12, .color = "soft", .anchor = Anchor::middle});
  canvas.text(margin + 8, at.top + grid_height / 2, "query: the word that attends",
              {.size = 12, .color = "soft", .anchor = Anchor::middle, .degrees = -90});
}

void draw_cells(Canvas& canvas, const Heatmap& map, const Layout& at, double end) {
  const double gap = at.cell > 12 ? 2 : 0;
  for (size_t r = 0; r < map.rows.size(); ++r) {
    for (size_t c = 0; c < map.columns.size(); ++c) {
      const double value = map.values[r * map.columns.size() + c];
      const double x = at.left + static_cast<double>(c) * at.cell, y = at.top + static_cast<double>(r) * at.cell;
      const double strength = 0.04 + 0.96 * std::clamp(value / end, 0.0, 1.0);
      canvas.rectangle(x + gap / 2, y + gap / 2, at.cell - gap, at.cell - gap,
                       {"first", strength, gap, map.rows[r] + " looks at " + map.columns[c] + ": " + percent(value)});
      if (at.cell < 30 || value < 0.095) continue;
      canvas.text(x + at.cell / 2, y + at.cell / 2 + 4, std::to_string(std::lround(100 * value)),
                  {.size = 11, .color = strength > 0.68 ? "on" : "ink", .anchor = Anchor::middle});
    }
  }
}

void draw_legend(Canvas& canvas, const Heatmap& map, const Layout& at, double end) {
  const double x = at.left + static_cast<double>(map.columns.size()) * at.cell + 24;
  const double height = std::clamp(static_cast<double>(map.rows.size()) * at.cell, 100.0, 240.0);
  constexpr int steps = 20;
  for (int step = 0; step < steps; ++step) {
    const double share = (step + 0.5) / steps, y = at.top + height * (1 - (step + 1.0) / steps);
    canvas.rectangle(x, y, legend_width, height / steps, {"first", 0.04 + 0.96 * share});
  }
  for (const double share : {0.0, 0.5, 1.0}) {
    canvas.text(x + legend_width + 6,
                at.top + height * (1 - share) +
                    (share == 1   ? 9
                     : share == 0 ? 0
                                  : 4),
                percent(share * end), {.size = 11, .color = "soft"});
  }
}

}  // namespace

std::string draw(const Heatmap& map) {
  const Layout at = layout_of(map);
  const double end = scale_end(map.values);
  Canvas canvas(at.width, at.height, map.title);
  canvas.text(margin, margin + 18, map.title, {.size = 19, .bold = true});
  canvas.text(margin, margin + 42, map.subtitle, {.size = 13, .color = "soft"});
  draw_words(canvas, map, at);
  draw_cells(canvas, map, at, end);
  draw_legend(canvas, map, at, end);
  return canvas.finish();
}

}  // namespace tandem::svg
