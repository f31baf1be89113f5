#include "tools/palctl/svg_plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace palimpsest::palctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(NiceTicks, AreRoundNumbers) {
  EXPECT_THAT(NiceTicks(0, 10, 6), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(NiceTicks(0, 3, 4), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(NiceTicks(0, 0, 3), ElementsAre(0, 0.5, 1));
  EXPECT_THAT(NiceTicks(0, 430, 6), ElementsAre(0, 100, 200, 300, 400, 500));
}

TEST(NiceTicks, CoverTheirRange) {
  std::minstd_rand random(4);
  for (int round = 0; round < 2000; ++round) {
    const double scale = std::pow(10, static_cast<int>(random() % 13) - 6);
    const double a = scale * (static_cast<double>(random() % 2000) - 1000);
    const double b = a + scale * static_cast<double>(random() % 1000);
    const auto ticks = NiceTicks(a, b, 6);
    ASSERT_GE(ticks.size(), 2u);
    EXPECT_LE(ticks.size(), 6u) << a << " " << b;
    EXPECT_LE(ticks.front(), a + 1e-6 * scale);
    EXPECT_GE(ticks.back(), b - 1e-6 * scale);
  }
}

TEST(DrawSvg, DrawsEverySeriesWithItsColour) {
  const std::vector<PlotSeries> series = {{"remap", {{1, 2}, {2, 3}}}, {"static", {{1, 4}}}};
  const std::string svg =
      DrawSvg("C1",
              {{"latency", "requests/s", "seconds", true, false, series},
               {"output", "requests/s", "tokens/s", false, false, {series[1], series[0]}}},
              2);
  EXPECT_EQ(Count(svg, "<polyline"), 4);
  EXPECT_EQ(Count(svg, "<circle"), 6);
  EXPECT_EQ(Count(svg, "stroke=\"#0072b2\" stroke-dasharray=\"\" points"), 2);
  EXPECT_EQ(Count(svg, "<g "), Count(svg, "</g>"));
  EXPECT_EQ(DrawSvg("", {}, 1), DrawSvg("", {}, 1));
}

TEST(DrawSvg, StacksAreas) {
  PlotPanel panel;
  panel.stacked = true;
  panel.series = {{"below", {{0, 1}, {1, 1}}}, {"above", {{0, 2}, {1, 0}}}};
  const std::string svg = DrawSvg("memory", {panel}, 1);
  EXPECT_EQ(Count(svg, "<polygon"), 2);
  // What is above begins at 3 of 3, the highest place.
  EXPECT_THAT(svg, HasSubstr("points=\"62.0,258.0 62.0,30.0 416.0,182.0 416.0,258.0\""));
}

TEST(DrawSvg, SurvivesHostileData) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  PlotPanel panel;
  panel.title = "<script>&\"";
  for (const bool log : {false, true}) {
    panel.log_y = log;
    panel.series = {{"a", {{1, nan}, {inf, 1}, {nan, nan}, {2, 0}, {3, -1}, {4, 1e300}, {5, 1e11}}},
                    {"empty", {}},
                    {"b", {{1, 1e-300}}}};
    const std::string svg = DrawSvg(panel.title, {panel}, 1);
    for (const char* bad : {"<script>", "nan", "inf"}) EXPECT_EQ(Count(svg, bad), 0) << bad;
    EXPECT_LT(svg.size(), 20'000u);
  }
  panel.series = {{"a", {{1, nan}}}};
  EXPECT_THAT(DrawSvg("", {panel}, 1), HasSubstr("nothing was measured"));
}

}  // namespace
}  // namespace palimpsest::palctl
