// Timelines as files: a trace that parses, and a picture of its events.
#include "cli/svg/timeline.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/vgpu/perfetto.h"

namespace tandem::svg {
namespace {

vgpu::Timeline two_rows() {
  vgpu::Timeline t;
  t.title = "kernel \"<1>\", block 0";
  t.rows = {"compute, warp 0", "copies in"};
  t.names = {"step", "wait", "cp"};
  t.places = {"add.f32, a.cuh:1", "cp.async.bulk, b.cuh:2"};
  t.slices = {{0, vgpu::Activity::compute, 0, 400, 0, 0},
              {0, vgpu::Activity::wait, 400, 900, 1, -1},
              {0, vgpu::Activity::compute, 900, 1000, 0, 0},
              {1, vgpu::Activity::copy, 100, 600, 2, 1}};
  t.arrows = {{1, 0, 599, 900, 500}};
  t.steps = 1000;
  return t;
}

TEST(TimelineTest, PerfettoReadsIt) {
  const auto json = nlohmann::json::parse(tool::perfetto_json(two_rows()));
  std::map<std::string, int> phases;
  for (const auto& event : json.at("traceEvents")) ++phases[event.at("ph").get<std::string>()];
  EXPECT_EQ(phases["X"], 4);
  EXPECT_EQ(phases["s"], 1);
  EXPECT_EQ(phases["f"], 1);
  EXPECT_EQ(phases["M"], 5) << "the process, and a name and a place for each row";
  const auto& events = json.at("traceEvents");
  const auto slice = std::ranges::find_if(events, [](const auto& e) { return e.at("ph") == "X"; });
  EXPECT_EQ(slice->at("name"), "step");
  EXPECT_EQ(slice->at("ts"), 0);
  EXPECT_EQ(slice->at("dur"), 400);
  EXPECT_EQ(slice->at("args").at("place"), "add.f32, a.cuh:1");
  EXPECT_EQ(json.at("otherData").at("title"), "kernel \"<1>\", block 0");
}

TEST(TimelineTest, ThePictureHasRowsSlicesAndArrows) {
  const std::string text = draw(two_rows(), {.width = 1000, .where = "on vgpu:h200"});
  for (const char* part : {"kernel &quot;&lt;1&gt;&quot;, block 0", "compute, warp 0", "copies in", ">step</text>",
                           "<title>cp: cp.async.bulk, b.cuh:2</title>", ">on vgpu:h200. A step is", "class=\"arrow\"",
                           "class=\"head\"", ">from the event that ended a wait</text>", ">0 steps</text>"})
    EXPECT_NE(text.find(part), std::string::npos) << part;
  EXPECT_TRUE(text.ends_with("</svg>\n"));
}

TEST(TimelineTest, AModelNamesGpuAndProblemAndEnlargesAnIteration) {
  const std::string text = draw(two_rows(), {.width = 1000,
                                             .title = "NVIDIA H200, backward: batch 1, 16 heads",
                                             .where = "One CTA",
                                             .unit = "clocks",
                                             .iterations = {0, 300, 920, 1000}});
  for (const char* part :
       {"NVIDIA H200, backward: batch 1, 16 heads", ">One CTA. Lengths are clocks of one SM, modelled, not measured.",
        "One iteration enlarged: clocks 300 to 920 of the run above, 620 clocks", ">0 clocks</text>"})
    EXPECT_NE(text.find(part), std::string::npos) << part;
  EXPECT_EQ(text.find("block 0"), std::string::npos) << "the title replaces the timeline's";
  const auto count = [&](std::string_view part) {
    size_t found = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count(">compute, warp 0</text>"), 2u) << "the whole run, and the iteration";
  EXPECT_EQ(count("class=\"head\""), 2u) << "the arrow of the one wait that ends in the iteration, and the legend's";
}

TEST(TimelineTest, AnIterationWithoutAWaitHasNoArrow) {
  const std::string text = draw(two_rows(), {.unit = "clocks", .iterations = {0, 100, 500, 1000}});
  EXPECT_EQ(text.find("class=\"head\""), std::string::npos);
  EXPECT_EQ(text.find("that ended a wait"), std::string::npos);
}

TEST(TimelineTest, ManySlicesBecomeFewShapes) {
  vgpu::Timeline t = two_rows();
  t.slices.clear();
  for (int64_t n = 0; n < 100'000; ++n)
    t.slices.push_back(
        {0, n % 3 == 0 ? vgpu::Activity::wait : vgpu::Activity::compute, n, n + 1, n % 3 == 0 ? 1 : 0, 0});
  t.steps = 100'000;
  EXPECT_LT(draw(t, {.width = 500}).size(), 200'000u);
  EXPECT_TRUE(draw(vgpu::Timeline{}, {}).ends_with("</svg>\n"));
}

}  // namespace
}  // namespace tandem::svg
