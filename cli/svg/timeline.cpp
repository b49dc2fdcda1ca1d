#include "cli/svg/timeline.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/text.h"
#include "cli/svg/canvas.h"

namespace tandem::svg {
namespace {

using vgpu::Activity;
using vgpu::Slice;
using vgpu::Timeline;

constexpr double margin = 20, row_height = 20, bar_height = 16, header = 74, label_size = 10.5;
constexpr const char* kSteps =
    "A step is an instruction of a warp; waits, copies and products are counted, not measured.";
constexpr const char* kClocks = "Clocks of a multiprocessor, modelled, not measured.";

const char* color_of(Activity activity) {
  switch (activity) {
    case Activity::compute: return "first";
    case Activity::matrix: return "second";
    case Activity::copy: return "third";
    case Activity::wait: return "soft";
  }
  return "soft";
}

// Different names in a row have different brightness.
double opacity_of(const Slice& slice) {
  if (slice.activity == Activity::wait) return 0.14;
  constexpr double shades[] = {0.95, 0.6, 0.8, 0.45};
  return slice.activity == Activity::compute ? shades[slice.name % 4] : 0.85;
}

// Narrow slices share one rectangle: each pixel belongs to the slice that covers most of it.
std::vector<Slice> visible(const Timeline& t, int32_t row, double steps_per_pixel) {
  std::vector<Slice> merged;
  std::map<int64_t, std::pair<double, const Slice*>> pixels;
  for (const Slice& slice : t.slices) {
    if (slice.row != row) continue;
    const auto first = static_cast<int64_t>(static_cast<double>(slice.begin) / steps_per_pixel);
    const auto last = static_cast<int64_t>(static_cast<double>(slice.end) / steps_per_pixel);
    for (int64_t pixel = first; pixel <= last; ++pixel) {
      const double from = std::max(static_cast<double>(slice.begin), static_cast<double>(pixel) * steps_per_pixel);
      const double to = std::min(static_cast<double>(slice.end), static_cast<double>(pixel + 1) * steps_per_pixel);
      auto& [most, whose] = pixels[pixel];
      if (to - from > most) most = to - from, whose = &slice;
    }
  }
  for (const auto& [pixel, owner] : pixels) {
    if (owner.second == nullptr) continue;
    Slice* last = merged.empty() ? nullptr : &merged.back();
    const bool goes_on = last != nullptr && last->end == pixel && last->name == owner.second->name &&
                         last->activity == owner.second->activity;
    if (goes_on) {
      ++last->end;
    } else {
      Slice slice = *owner.second;
      slice.begin = pixel;
      slice.end = pixel + 1;
      merged.push_back(slice);
    }
  }
  return merged;
}

struct Plot {
  Canvas& canvas;
  const Timeline& timeline;
  double left, steps_per_pixel;

  double x(int64_t step) const { return left + static_cast<double>(step) / steps_per_pixel; }
  static double y(int32_t row) { return header + row_height * row; }

  void draw_row(int32_t row) {
    canvas.text(left - 10, y(row) + bar_height - 4, timeline.rows[static_cast<size_t>(row)],
                {.size = 11.5, .anchor = Canvas::Anchor::end});
    for (const Slice& slice : visible(timeline, row, steps_per_pixel)) {
      const std::string& name = timeline.names[static_cast<size_t>(slice.name)];
      const double begin = left + static_cast<double>(slice.begin),
                   width = static_cast<double>(slice.end - slice.begin);
      const std::string place = slice.instruction < 0 ? "" : timeline.places[static_cast<size_t>(slice.instruction)];
      const bool can_be_pointed_at = width > 2;
      canvas.rectangle(begin, y(row), width, bar_height,
                       {color_of(slice.activity), opacity_of(slice), 0,
                        can_be_pointed_at ? str_cat(name, place.empty() ? "" : ": ", place) : ""});
      const auto fits = [&](const std::string& text) { return text_width(text, label_size) + 4 < width; };
      const std::string label = fits(name) ? name : name.substr(name.rfind(':') + 1);  // name without its class
      if (slice.activity != Activity::wait && fits(label)) {
        canvas.text(begin + width / 2, y(row) + bar_height - 4, label,
                    {.size = label_size, .color = "on", .anchor = Canvas::Anchor::middle});
      }
    }
  }

  // Draws only arrows that end a visible wait.
  void draw_arrows() {
    for (const vgpu::Arrow& arrow : timeline.arrows) {
      if (arrow.from_row == arrow.to_row || arrow.waited < 6 * steps_per_pixel) continue;
      const double from = y(arrow.from_row) + bar_height / 2, to = y(arrow.to_row) + bar_height / 2;
      canvas.arrow(x(arrow.from), from, x(arrow.to), to);
    }
  }

  void draw_axis() {
    const double bottom = y(static_cast<int32_t>(timeline.rows.size())) + 4;
    const double rough = 150 * steps_per_pixel, power = std::pow(10, std::floor(std::log10(rough)));
    const auto tick = static_cast<int64_t>(power * (rough / power < 2 ? 1 : rough / power < 5 ? 2 : 5));
    for (int64_t step = 0; step <= timeline.steps; step += std::max<int64_t>(1, tick)) {
      canvas.line(x(step), header - 6, x(step), bottom, "rule");
      canvas.text(x(step), bottom + 14, std::to_string(step),
                  {.size = 11, .color = "soft", .anchor = Canvas::Anchor::middle});
    }
  }
};

// Draws the legend of the colours, right-aligned at this x.
void draw_legend(Canvas& canvas, double right) {
  const struct {
    const char* what;
    Activity activity;
  } all[] = {{"products", Activity::matrix},
             {"copies", Activity::copy},
             {"waits", Activity::wait},
             {"code, by function", Activity::compute}};
  constexpr double y = 50, box = 11, size = 12;
  const auto label = [&](const char* what) {
    right -= text_width(what, size);
    canvas.text(right, y, what, {.size = size, .color = "soft"});
  };
  label("what ended a wait");
  right -= 26;
  canvas.arrow(right, y - 4, right + 20, y - 4);
  for (const auto& [what, activity] : all) {
    right -= 16;
    label(what);
    right -= box + 6;
    canvas.rectangle(right, y - box + 1, box, box, {color_of(activity), opacity_of({.activity = activity})});
  }
}

}  // namespace

std::string draw(const Timeline& timeline, const TimelineStyle& style) {
  double labels = 0;
  for (const std::string& row : timeline.rows) labels = std::max(labels, text_width(row, 11.5));
  const double left = margin + labels + 10;
  Canvas canvas(left + style.width + margin, Plot::y(static_cast<int32_t>(timeline.rows.size())) + 50, timeline.title);
  canvas.text(margin, 28, timeline.title, {.size = 17, .bold = true});
  canvas.text(margin, 50, (style.where.empty() ? "" : style.where + ". ") + (style.unit == "clocks" ? kClocks : kSteps),
              {.size = 12, .color = "soft"});
  draw_legend(canvas, left + style.width);
  Plot plot{canvas, timeline, left, std::max<double>(1, static_cast<double>(timeline.steps)) / style.width};
  plot.draw_axis();
  for (size_t row = 0; row < timeline.rows.size(); ++row) plot.draw_row(static_cast<int32_t>(row));
  plot.draw_arrows();
  canvas.text(left + style.width, Plot::y(static_cast<int32_t>(timeline.rows.size())) + 36, style.unit,
              {.size = 11, .color = "soft", .anchor = Canvas::Anchor::end});
  return canvas.finish();
}

}  // namespace tandem::svg
