// Canvas: collects the shapes of one SVG picture that is legible on light and on dark pages.
//
// Colours are classes (see canvas.cpp): "paper", "ink", "soft" (secondary text), "rule" (thin lines), "arrow" and
// "head" (of an arrow), "first", "second", "third" (data). Text is set in the reader's sans-serif font; widths are
// estimated generously, so that texts do not overlap.
#pragma once

#include <string>
#include <string_view>

namespace tandem::svg {

std::string escape(std::string_view text);  // for text and attributes; invalid UTF-8 becomes '?'

double text_width(std::string_view text, double size);  // an estimate, in pixels

class Canvas {
 public:
  Canvas(double width, double height, std::string_view title);

  enum class Anchor { start, middle, end };
  struct TextStyle {
    double size = 13;
    const char* color = "ink";
    Anchor anchor = Anchor::start;
    bool bold = false;
    double degrees = 0;  // rotation about (x, y), clockwise
  };
  void text(double x, double y, std::string_view text, const TextStyle& style);

  struct RectangleStyle {
    const char* color;
    double opacity = 1;  // blends the class's colour with the background
    double radius = 0;
    std::string_view hint = {};  // tooltip
  };
  void rectangle(double x, double y, double width, double height, const RectangleStyle& style);
  void line(double x1, double y1, double x2, double y2, const char* color);
  void arrow(double x1, double y1, double x2, double y2);  // points to (x2, y2)

  std::string finish() const { return body_ + "</svg>\n"; }

 private:
  std::string body_;
};

}  // namespace tandem::svg
