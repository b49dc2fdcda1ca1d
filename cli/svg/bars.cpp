#include "cli/svg/bars.h"

#include <algorithm>
#include <cmath>

#include "cli/svg/canvas.h"

namespace tandem::svg {
namespace {

using Anchor = Canvas::Anchor;

constexpr double margin = 24, axis_room = 58, plot_height = 170, panel_gap = 26, row_height = plot_height + 84;
constexpr double bar_width = 20, bar_gap = 2, group_gap = 18;

// Returns a step of 1, 2 or 5 times a power of ten, so that about four lines span the range.
double tick_step(double most) {
  const double rough = most / 4, power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

std::string short_number(double value) {
  if (value >= 10 || value == std::floor(value)) return std::to_string(std::llround(value));
  std::string text = std::to_string(value);
  return text.substr(0, text.find('.') + 2);
}

struct Scale {
  double step = 1, top = 1;
};

Scale scale_of(const Bars& bars) {
  double most = 0;
  for (const auto& panel : bars.panels) {
    for (const auto& series : panel.values) {
      for (const double value : series) most = std::max(most, value);
    }
  }
  if (most <= 0) return {};
  Scale scale;
  scale.step = tick_step(most);
  scale.top = std::ceil(most * 1.05 / scale.step) * scale.step;
  return scale;
}

double panel_width(const Bars& bars) {
  size_t categories = 1;
  double title = 0;
  for (const auto& panel : bars.panels) {
    categories = std::max(categories, panel.categories.size());
    title = std::max(title, text_width(panel.title, 13));
  }
  const double group = static_cast<double>(bars.series.size()) * (bar_width + bar_gap) + group_gap;
  return std::max(static_cast<double>(categories) * group + group_gap, title);
}

struct PanelPlace {
  double left, top, width;
  bool first_column;
};

void draw_panel(Canvas& canvas, const Bars& bars, const Bars::BarPanel& panel, const PanelPlace& place,
                const Scale& scale) {
  const auto [left, top, width, first_column] = place;
  canvas.text(left, top + 14, panel.title, {.size = 13, .bold = true});
  const double base = top + 26 + plot_height;
  const auto height_of = [&](double value) { return plot_height * value / scale.top; };
  for (double tick = 0; tick <= scale.top * 1.0001; tick += scale.step) {
    const double y = base - height_of(tick);
    canvas.line(left, y, left + width, y, "rule");
    if (first_column)
      canvas.text(left - 8, y + 4, short_number(tick), {.size = 11, .color = "soft", .anchor = Anchor::end});
  }
  const double group = static_cast<double>(bars.series.size()) * (bar_width + bar_gap);
  for (size_t c = 0; c < panel.categories.size(); ++c) {
    const double x = left + group_gap + static_cast<double>(c) * (group + group_gap);
    for (size_t s = 0; s < bars.series.size(); ++s) {
      const double value = panel.values[s][c];
      if (value <= 0) continue;
      const double bar_x = x + static_cast<double>(s) * (bar_width + bar_gap);
      if (bars.series[s].pale)  // hides the lines below a pale bar
        canvas.rectangle(bar_x, base - height_of(value), bar_width, height_of(value), {"paper", 1, 2});
      canvas.rectangle(bar_x, base - height_of(value), bar_width, height_of(value),
                       {bars.series[s].color, bars.series[s].pale ? 0.35 : 1, 2,
                        bars.series[s].name + ", " + panel.categories[c] + ": " + short_number(value)});
      canvas.text(bar_x + bar_width / 2, base - height_of(value) - 4, short_number(value),
                  {.size = 9.5, .color = "soft", .anchor = Anchor::middle});
    }
    canvas.text(x + group / 2, base + 16, panel.categories[c], {.size = 11, .color = "soft", .anchor = Anchor::middle});
  }
  canvas.text(left + width / 2, base + 34, bars.category_label,
              {.size = 11, .color = "soft", .anchor = Anchor::middle});
}

void draw_legend(Canvas& canvas, const Bars& bars, double y) {
  double x = margin;
  for (const auto& series : bars.series) {
    canvas.rectangle(x, y - 10, 12, 12, {series.color, series.pale ? 0.35 : 1, 2});
    canvas.text(x + 18, y, series.name, {.size = 12});
    x += 18 + text_width(series.name, 12) + 22;
  }
}

double legend_length(const Bars& bars) {
  double length = 0;
  for (const auto& series : bars.series) length += 40 + text_width(series.name, 12);
  return length;
}

}  // namespace

std::string draw(const Bars& bars) {
  const Scale scale = scale_of(bars);
  const double panel = panel_width(bars);
  const size_t columns = std::max<size_t>(1, std::min(bars.columns, bars.panels.size()));
  const size_t rows = (bars.panels.size() + columns - 1) / columns;
  const double left = margin + axis_room, top = margin + 92;
  const double width = std::max({left + static_cast<double>(columns) * (panel + panel_gap) - panel_gap + margin,
                                 2 * margin + text_width(bars.title, 19), 2 * margin + text_width(bars.subtitle, 13),
                                 2 * margin + legend_length(bars)});
  const double height = top + static_cast<double>(rows) * row_height + margin - 20;
  Canvas canvas(width, height, bars.title);
  canvas.text(margin, margin + 18, bars.title, {.size = 19, .bold = true});
  canvas.text(margin, margin + 42, bars.subtitle, {.size = 13, .color = "soft"});
  draw_legend(canvas, bars, margin + 70);
  for (size_t n = 0; n < bars.panels.size(); ++n) {
    const size_t row = n / columns, column = n % columns;
    const double x = left + static_cast<double>(column) * (panel + panel_gap);
    const double y = top + static_cast<double>(row) * row_height;
    draw_panel(canvas, bars, bars.panels[n], {x, y, panel, column == 0}, scale);
    if (column == 0)
      canvas.text(margin + 10, y + 26 + plot_height / 2, bars.value_label,
                  {.size = 12, .color = "soft", .anchor = Anchor::middle, .degrees = -90});
  }
  return canvas.finish();
}

}  // namespace tandem::svg
