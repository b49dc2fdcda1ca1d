#include "cli/svg/canvas.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace tandem::svg {
namespace {

std::string px(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  std::string result = text;
  result.erase(result.find_last_not_of('0') + 1);
  if (result.back() == '.') result.pop_back();
  return result == "-0" ? "0" : result;
}

std::string attribute(const char* name, double value) { return std::string(" ") + name + "=\"" + px(value) + "\""; }

// Returns the bytes of the UTF-8 sequence at the front of text, or 0 if it is invalid.
size_t utf8_length(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  const size_t length = lead < 0x80                   ? 1
                        : lead >= 0xc2 && lead < 0xe0 ? 2
                        : (lead & 0xf0) == 0xe0       ? 3
                        : lead >= 0xf0 && lead < 0xf5 ? 4
                                                      : 0;
  if (length == 0 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) return 0;
  }
  return length;
}

constexpr const char* style = R"(<style>
text { font-family: -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Helvetica, Arial, sans-serif; }
.paper { fill: #ffffff; } .ink { fill: #1f2328; } .soft { fill: #59636e; } .rule { stroke: #d1d9e0; stroke-width: 1; }
.first { fill: #0b5cad; } .second { fill: #c2570c; } .third { fill: #1a7f5a; } .on { fill: #ffffff; }
.arrow { stroke: #59636e; stroke-width: 0.7; } .head { fill: #59636e; }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; } .ink { fill: #e6edf3; } .soft { fill: #9198a1; } .rule { stroke: #3d444d; }
.first { fill: #58a6ff; } .second { fill: #f0883e; } .third { fill: #3fb98a; } .on { fill: #0d1117; }
.arrow { stroke: #9198a1; } .head { fill: #9198a1; }
}
</style>
)";

}  // namespace

std::string escape(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    const char c = text[0];
    if (length == 0 || (length == 1 && static_cast<unsigned char>(c) < 0x20)) {
      result += '?';
    } else if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else if (c == '"') {
      result += "&quot;";
    } else {
      result += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

double text_width(std::string_view text, double size) {
  double width = 0;
  for (const char c : text) {
    if ((c & 0xc0) == 0x80) continue;  // a continuation byte of a counted character
    const auto byte = static_cast<unsigned char>(c);
    width += byte >= 0xe0                                                           ? 1.0
             : std::string_view("ijl.,:;'|!()[]").find(c) != std::string_view::npos ? 0.4
             : std::string_view("mwMW%@").find(c) != std::string_view::npos         ? 0.98
             : byte < 'a'                                                           ? 0.7
                                                                                    : 0.63;
  }
  return width * size;
}

Canvas::Canvas(double width, double height, std::string_view title) {
  body_ = "<svg xmlns=\"http://www.w3.org/2000/svg\"" + attribute("width", width) + attribute("height", height) +
          " viewBox=\"0 0 " + px(width) + " " + px(height) + "\" role=\"img\">\n<title>" + escape(title) +
          "</title>\n" + style;
  rectangle(0, 0, width, height, {"paper", 1, 8});
}

void Canvas::text(double x, double y, std::string_view text, const TextStyle& how) {
  body_ += "<text" + attribute("x", x) + attribute("y", y) + attribute("font-size", how.size);
  body_ += " class=\"";
  body_ += how.color;
  body_ += "\"";
  if (how.anchor == Anchor::middle) body_ += " text-anchor=\"middle\"";
  if (how.anchor == Anchor::end) body_ += " text-anchor=\"end\"";
  if (how.bold) body_ += " font-weight=\"600\"";
  if (how.degrees != 0)
    body_.append(" transform=\"rotate(").append(px(how.degrees) + " " + px(x) + " " + px(y)).append(")\"");
  body_.append(">").append(escape(text)).append("</text>\n");
}

void Canvas::rectangle(double x, double y, double width, double height, const RectangleStyle& how) {
  body_ += "<rect" + attribute("x", x) + attribute("y", y) + attribute("width", width) + attribute("height", height) +
           " class=\"" + how.color + "\"";
  if (how.opacity < 1) body_ += " fill-opacity=\"" + px(how.opacity) + "\"";
  if (how.radius > 0) body_ += attribute("rx", how.radius);
  body_ += how.hint.empty() ? "/>\n" : "><title>" + escape(how.hint) + "</title></rect>\n";
}

void Canvas::line(double x1, double y1, double x2, double y2, const char* color) {
  body_ += "<line" + attribute("x1", x1) + attribute("y1", y1) + attribute("x2", x2) + attribute("y2", y2) +
           " class=\"" + color + "\"/>\n";
}

void Canvas::arrow(double x1, double y1, double x2, double y2) {
  constexpr double length = 5, half_width = 2;
  line(x1, y1, x2, y2, "arrow");
  const double whole = std::max(1e-6, std::hypot(x2 - x1, y2 - y1)), dx = (x2 - x1) / whole, dy = (y2 - y1) / whole;
  const auto point = [&](double back, double side) {
    return px(x2 - back * dx - side * dy) + " " + px(y2 - back * dy + side * dx);
  };
  body_ += "<path class=\"head\" d=\"M" + point(0, 0) + "L" + point(length, half_width) + "L" +
           point(length, -half_width) + "z\"/>\n";
}

}  // namespace tandem::svg
