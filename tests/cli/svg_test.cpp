#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cli/svg/bars.h"
#include "cli/svg/canvas.h"
#include "cli/svg/heatmap.h"

namespace tandem::svg {
namespace {

// The text after each occurrence of the word.
std::vector<std::string> parts_after(const std::string& text, const std::string& word) {
  std::vector<std::string> parts;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
    parts.push_back(text.substr(at + word.size(), 40));
  return parts;
}

TEST(SvgTest, EscapesMarkup) {
  EXPECT_EQ(escape("a<b>&\"c\""), "a&lt;b&gt;&amp;&quot;c&quot;");
  EXPECT_EQ(escape("caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"), "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
}

TEST(SvgTest, ReplacesWhatIsNoText) {
  EXPECT_EQ(escape(std::string_view("a\0b\x1b[31m", 8)), "a?b?[31m");
  EXPECT_EQ(escape("\xff\xc3"), "??");
  EXPECT_EQ(escape("\xe2\x82"), "??");
  EXPECT_EQ(escape("\xc0\xaf"), "??");
}

TEST(SvgTest, WiderTextIsWider) {
  EXPECT_GT(text_width("mm", 10), text_width("ii", 10));
  EXPECT_DOUBLE_EQ(text_width("word", 20), 2 * text_width("word", 10));
  EXPECT_DOUBLE_EQ(text_width("", 10), 0);
}

TEST(SvgTest, HeatmapShowsEveryWordAndWeight) {
  Heatmap map;
  map.title = "<title>";
  map.rows = {"the", "cat & dog"};
  map.columns = {"the", "cat & dog"};
  map.values = {0.75, 0.25, 0.5, 0.05};
  const std::string text = draw(map);
  EXPECT_EQ(text.find("<title><title>"), std::string::npos);
  EXPECT_NE(text.find("cat &amp; dog looks at the: 50 %"), std::string::npos);
  EXPECT_NE(text.find(">75</text>"), std::string::npos);
  EXPECT_EQ(text.find(">5</text>"), std::string::npos) << "small weights carry no number";
  EXPECT_TRUE(text.ends_with("</svg>\n"));
}

TEST(SvgTest, HeatmapOfNothingAndOfMuch) {
  EXPECT_TRUE(draw(Heatmap{}).ends_with("</svg>\n"));
  Heatmap large;
  large.rows = large.columns = std::vector<std::string>(200, "word");
  large.values.assign(200 * 200, 1.0 / 200);
  const std::string text = draw(large);
  const size_t words = parts_after(text, ">word</text>").size();
  EXPECT_LT(words, 200u) << "words that would overlap are left out";
  EXPECT_GT(words, 50u);
}

TEST(SvgTest, BarsAreAsHighAsTheirValues) {
  Bars bars;
  bars.series = {{"one", "first", false}, {"two", "second", true}};
  bars.panels = {{"panel", {"512"}, {{100}, {50}}}};
  const std::string text = draw(bars);
  std::vector<double> heights;
  for (const std::string& part : parts_after(text, "width=\"20\" height=\"")) heights.push_back(std::stod(part));
  ASSERT_EQ(heights.size(), 3u) << "two bars, and paper under the pale one";
  EXPECT_NEAR(heights[0], 2 * heights[1], 0.02);
  EXPECT_EQ(heights[1], heights[2]);
}

}  // namespace
}  // namespace tandem::svg
