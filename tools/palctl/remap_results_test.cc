#include "tools/palctl/remap_results.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace palimpsest::palctl {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

RemapBenchConfig Config() {
  RemapBenchConfig config;
  config.name = "test";
  config.duration = absl::Seconds(10);
  config.objective = {absl::Seconds(1), absl::Milliseconds(100)};
  config.tenants.resize(2);
  config.tenants[0].name = "a";
  config.tenants[1].name = "b";
  config.tenants[1].requests = 3;
  config.systems.resize(2);
  config.systems[0].name = "remap";
  config.systems[1].name = "static";
  config.runs.push_back({.name = "rate",
                         .systems = {"remap", "static"},
                         .rates = {1, 4},
                         .prompt_tokens = {0},
                         .tenants = {2}});
  return config;
}

const RemapTraces kTraces = {.arrivals = {absl::ZeroDuration(), absl::Seconds(1), absl::Seconds(5)},
                             .lengths = {{8, 2}},
                             .conversations = {{{8, 2}, {3, 1}}}};

Json Point(const char* run, const char* system, double rate, double ttft) {
  return {{"run", run},          {"system", system},
          {"tenants", 2},        {"rate", rate},
          {"prompt_tokens", 0},  {"ttft", {{"p50", ttft}, {"p90", ttft}, {"p99", ttft}}},
          {"goodput_share", 0.5}};
}

TEST(LoadOf, SplitsTheRateAmongTenants) {
  const RemapBenchConfig config = Config();
  const auto nodes = ExpandRuns(config);
  const auto load = LoadOf(config, 2, nodes[0].points[1], kTraces);
  EXPECT_EQ(load[0].size(), 10u);
  EXPECT_EQ(load[1].size(), 30u);
}

TEST(LoadOf, MakesTurnsOfConversations) {
  RemapBenchConfig config = Config();
  config.conversations.emplace();
  config.conversations->context_tokens = 10;
  const auto nodes = ExpandRuns(config);
  const auto load = LoadOf(config, 2, nodes[0].points[1], kTraces);
  ASSERT_EQ(load[0].size(), 20u);
  EXPECT_EQ(load[0][0].lengths.prompt_tokens, 18);
  EXPECT_EQ(load[0][1].continues, 0u);
}

TEST(SchedulesJson, HasEachLoadOnce) {
  const Json json = SchedulesJson(Config(), kTraces);
  ASSERT_EQ(json["points"].size(), 2u);
  EXPECT_EQ(json["points"][1]["rate"], 4);
  EXPECT_EQ(json["points"][1]["requests"][0].size(), 10u);
  EXPECT_EQ(json["points"][1]["requests"][0][0], Json({0.0, 8, 2}));
}

TEST(RecordsJson, SumsUpAndListsTenants) {
  RemapBenchConfig config = Config();
  load::RequestRecord good, failed;
  good.outcome = load::Outcome::kFinished;
  good.tokens = {absl::Milliseconds(500), absl::Milliseconds(600)};
  failed.outcome = load::Outcome::kFailed;
  failed.error = "UNAVAILABLE: draining";
  const std::vector<std::vector<load::RequestRecord>> records = {{good, good}, {failed}};
  Json json = RecordsJson(config, records);
  EXPECT_EQ(json["requests"], 3);
  EXPECT_EQ(json["goodput"], 0.2);
  EXPECT_EQ(json["ttft"]["p99"], 0.5);
  EXPECT_EQ(json["by_tenant"][0]["name"], "a");
  EXPECT_EQ(json["by_tenant"][0]["finished"], 2);
  EXPECT_EQ(json["by_tenant"][1]["failed"], 1);
  EXPECT_EQ(json["errors"], Json({"UNAVAILABLE: draining"}));
  EXPECT_FALSE(json.contains("requests_raw"));
  config.raw_requests = true;
  json = RecordsJson(config, records);
  EXPECT_EQ(json["requests_raw"]["a"].size(), 2u);
  EXPECT_EQ(json["requests_raw"]["b"][0][2], nullptr);
}

TEST(PointPanels, DrawsSystemsAgainstWhatVaries) {
  const Json points = {Point("rate", "remap", 4, 0.2), Point("rate", "remap", 1, 0.1),
                       Point("rate", "static", 1, 0.3), Point("single", "remap", 1, 0.3)};
  const auto panels = PointPanels(points);
  ASSERT_EQ(panels.size(), 6u);
  EXPECT_EQ(panels[0].title, "rate: time to first token, P50");
  ASSERT_EQ(panels[0].series.size(), 2u);
  EXPECT_THAT(panels[0].series[0].points,
              ElementsAre(std::make_pair(1.0, 0.1), std::make_pair(4.0, 0.2)));
}

TEST(PointPanels, DrawsMemoryOfTheHighestRate) {
  Json slow = Point("rate", "remap", 1, 0.1), fast = Point("rate", "remap", 4, 0.1);
  slow["memory"] = fast["memory"] = {{"slab_bytes", 1 << 30},
                                     {"seconds", {0, 1}},
                                     {"free", {3, 1}},
                                     {"tenants",
                                      {{{"name", "a"},
                                        {"parameter", {4, 4}},
                                        {"kv", {0, 2}},
                                        {"slot", {0, 0}},
                                        {"workspace", {0, 0}}}}}};
  const auto panels = PointPanels({slow, fast});
  ASSERT_EQ(panels.size(), 7u);
  EXPECT_EQ(panels[6].title, "remap at 4/s: memory");
  ASSERT_EQ(panels[6].series.size(), 3u);
  EXPECT_EQ(panels[6].series[1].label, "a kv");
  EXPECT_THAT(panels[6].series[1].points,
              ElementsAre(std::make_pair(0.0, 0.0), std::make_pair(1.0, 2.0)));
}

TEST(ResultText, HasOnePointALineAndReadsBack) {
  const Json result = {{"name", "x"}, {"points", {Point("r", "s", 1, 2), Point("r", "t", 1, 2)}}};
  const std::string text = ResultText(result);
  EXPECT_EQ(Json::parse(text), result);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 7);
}

TEST(PointTable, SurvivesPointsOfOthers) {
  const std::string table =
      PointTable({{{"system", "vllm"}, {"rate", 2}, {"preempted_share", nullptr}}});
  EXPECT_THAT(table, HasSubstr("vllm"));
  EXPECT_THAT(table, Not(HasSubstr("nan%")));
}

}  // namespace
}  // namespace palimpsest::palctl
