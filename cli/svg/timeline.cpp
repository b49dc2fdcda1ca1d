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

constexpr double margin = 20, header = 74, label_size = 10.5;
constexpr size_t kLeastIterations = 3;
constexpr const char* kSteps =
    "A step is an instruction of a warp; waits, copies and products are counted, not measured.";
constexpr const char* kClocks = "Lengths are clocks of one SM, modelled, not measured.";

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

// A part of the run in one rectangle of the picture.
struct Panel {
  Canvas& canvas;
  const Timeline& timeline;
  double left, top, width;
  int64_t begin, end;
  bool enlarged;  // taller rows, with labels and arrows

  double row_height() const { return enlarged ? 26 : 13; }
  double bar_height() const { return enlarged ? 20 : 10; }
  double per_pixel() const { return static_cast<double>(std::max<int64_t>(1, end - begin)) / width; }
  double x(int64_t time) const { return left + static_cast<double>(time - begin) / per_pixel(); }
  double y(int32_t row) const { return top + row_height() * row; }
  double bottom() const { return y(static_cast<int32_t>(timeline.rows.size())); }

  void draw(const std::string& unit) {
    draw_axis(unit);
    for (size_t row = 0; row < timeline.rows.size(); ++row) draw_row(static_cast<int32_t>(row));
    if (enlarged) draw_arrows();
  }

  // Narrow slices share one rectangle: each pixel belongs to the slice that covers most of it.
  std::vector<Slice> visible(int32_t row) const {
    std::vector<Slice> merged;
    std::map<int64_t, std::pair<double, const Slice*>> pixels;
    const auto pixel_of = [&](int64_t time) { return static_cast<double>(time - begin) / per_pixel(); };
    for (const Slice& slice : timeline.slices) {
      if (slice.row != row || slice.end <= begin || slice.begin >= end) continue;
      const double from = std::max(0.0, pixel_of(slice.begin)), to = std::min(width, pixel_of(slice.end));
      for (auto pixel = static_cast<int64_t>(from); static_cast<double>(pixel) < to; ++pixel) {
        const auto first = static_cast<double>(pixel);
        const double covered = std::min(to, first + 1) - std::max(from, first);
        auto& [most, whose] = pixels[pixel];
        if (covered > most) most = covered, whose = &slice;
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

  void draw_row(int32_t row) {
    const double size = enlarged ? 11.5 : 9.5, baseline = y(row) + bar_height() / 2 + 0.36 * size;
    canvas.text(left - 10, baseline, timeline.rows[static_cast<size_t>(row)],
                {.size = size, .anchor = Canvas::Anchor::end});
    for (const Slice& slice : visible(row)) {
      const std::string& name = timeline.names[static_cast<size_t>(slice.name)];
      const double from = left + static_cast<double>(slice.begin),
                   length = static_cast<double>(slice.end - slice.begin);
      const std::string place = slice.instruction < 0 ? "" : timeline.places[static_cast<size_t>(slice.instruction)];
      const bool can_be_pointed_at = length > 2;
      canvas.rectangle(from, y(row), length, bar_height(),
                       {color_of(slice.activity), opacity_of(slice), 0,
                        can_be_pointed_at ? str_cat(name, place.empty() ? "" : ": ", place) : ""});
      if (!enlarged) continue;
      const bool waits = slice.activity == Activity::wait;
      const auto fits = [&](const std::string& text) { return text_width(text, label_size) + 4 < length; };
      const std::string label = fits(name) ? name : name.substr(name.rfind(':') + 1);  // name without its class
      if (fits(label)) {
        canvas.text(from + length / 2, baseline, label,
                    {.size = label_size, .color = waits ? "soft" : "on", .anchor = Canvas::Anchor::middle});
      }
    }
  }

  bool is_drawn(const vgpu::Arrow& arrow) const {
    return arrow.from_row != arrow.to_row && arrow.from >= begin && arrow.to <= end && arrow.waited >= 6 * per_pixel();
  }

  void draw_arrows() {
    for (const vgpu::Arrow& arrow : timeline.arrows) {
      if (!is_drawn(arrow)) continue;
      canvas.arrow(x(arrow.from), y(arrow.from_row) + bar_height() / 2, x(arrow.to),
                   y(arrow.to_row) + bar_height() / 2);
    }
  }

  void draw_axis(const std::string& unit) {
    const double rough = 150 * per_pixel(), power = std::pow(10, std::floor(std::log10(rough)));
    const auto tick = static_cast<int64_t>(power * (rough / power < 2 ? 1 : rough / power < 5 ? 2 : 5));
    for (int64_t time = 0; time <= end - begin; time += std::max<int64_t>(1, tick)) {
      canvas.line(x(begin + time), top - 6, x(begin + time), bottom() + 4, "rule");
      canvas.text(x(begin + time), bottom() + 18, str_cat(time, time == 0 ? " " + unit : ""),
                  {.size = 11, .color = "soft", .anchor = Canvas::Anchor::middle});
    }
  }
};

// Draws the legend of the colours, right-aligned at this x. A colour that the picture lacks has no entry.
void draw_legend(const Panel& panel, double right) {
  const struct {
    const char* what;
    Activity activity;
  } all[] = {{"products of the tensor core", Activity::matrix},
             {"copies", Activity::copy},
             {"waits", Activity::wait},
             {"instructions of a warp", Activity::compute}};
  constexpr double y = 50, box = 11, size = 12;
  Canvas& canvas = panel.canvas;
  const auto label = [&](const char* what) {
    right -= text_width(what, size);
    canvas.text(right, y, what, {.size = size, .color = "soft"});
  };
  if (std::ranges::any_of(panel.timeline.arrows, [&](const vgpu::Arrow& arrow) { return panel.is_drawn(arrow); })) {
    label("from the event that ended a wait");
    right -= 26;
    canvas.arrow(right, y - 4, right + 20, y - 4);
    right -= 16;
  }
  for (const auto& [what, activity] : all) {
    if (std::ranges::none_of(panel.timeline.slices, [&](const Slice& s) { return s.activity == activity; })) continue;
    label(what);
    right -= box + 6;
    canvas.rectangle(right, y - box + 1, box, box, {color_of(activity), opacity_of({.activity = activity})});
    right -= 16;
  }
}

}  // namespace

std::string draw(const Timeline& timeline, const TimelineStyle& style) {
  double labels = 0;
  for (const std::string& row : timeline.rows) labels = std::max(labels, text_width(row, 11.5));
  const double left = margin + labels + 10;
  const std::vector<int64_t>& iterations = style.iterations;
  const bool has_overview = iterations.size() >= kLeastIterations;
  const std::string& title = style.title.empty() ? timeline.title : style.title;
  const double rows = static_cast<double>(timeline.rows.size());
  constexpr double row_in_overview = 13, row_enlarged = 26, between = 78;
  const double top = header + (has_overview ? rows * row_in_overview + between : 0);
  Canvas canvas(left + style.width + margin, top + rows * row_enlarged + 40, title);
  Panel panel{canvas, timeline, left, top, style.width, 0, timeline.steps, true};
  if (has_overview) {
    const size_t middle = (iterations.size() - 1) / 2;
    panel.begin = iterations[middle];
    panel.end = iterations[middle + 1];
    Panel overview{canvas, timeline, left, header, style.width, 0, timeline.steps, false};
    const double from = overview.x(panel.begin), to = overview.x(panel.end);
    canvas.rectangle(from, header - 6, to - from, overview.bottom() - header + 10, {"soft", 0.3});
    canvas.line(from, overview.bottom() + 4, left, top - 6, "rule");
    canvas.line(to, overview.bottom() + 4, left + style.width, top - 6, "rule");
    overview.draw(style.unit);
    canvas.text(left, top - 16,
                str_cat("One iteration enlarged: ", style.unit, " ", panel.begin, " to ", panel.end,
                        " of the run above, ", panel.end - panel.begin, " ", style.unit),
                {.size = 13, .bold = true});
  }
  canvas.text(margin, 28, title, {.size = 17, .bold = true});
  canvas.text(margin, 50, (style.where.empty() ? "" : style.where + ". ") + (style.unit == "clocks" ? kClocks : kSteps),
              {.size = 12, .color = "soft"});
  draw_legend(panel, left + style.width);
  panel.draw(style.unit);
  return canvas.finish();
}

}  // namespace tandem::svg
