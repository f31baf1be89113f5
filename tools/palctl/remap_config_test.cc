#include "tools/palctl/remap_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace palimpsest::palctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kConfig[] = R"(
name: test
device: cpu
memory: 100 MiB
traces: {arrivals: a.csv, lengths: l.json, most_prompt: 400, most_output: 50}
duration: 10s
objective: {ttft: 1s, tbt: 100ms}
tenants:
  - {name: one, shape: tiny, share: 0.5}
  - {name: two, model: folder, share: 0.25, requests: 3, settings: "priority: 1"}
systems:
  - {name: remap, policy: "memory_policy: remap", pool: "peer: {gpu: 1, bytes: 1 GiB}"}
  - {name: static, fixed_shares: true, engine: "threads: 1"}
runs:
  - {name: rate, rates: [4, 0.5, 2]}
  - {name: sweep, systems: [remap], rates: [2], prompt_tokens: [100, 200], tenants: [1, 2]}
)";

absl::StatusOr<RemapBenchConfig> Read(const std::string& text) {
  auto yaml = YamlConfig::Parse(text, "bench.yaml");
  if (!yaml.ok()) return yaml.status();
  return ReadRemapBenchConfig(*yaml);
}

// What is said about the configuration with one text replaced.
std::string Refusal(absl::string_view from, absl::string_view to) {
  const auto config = Read(absl::StrReplaceAll(kConfig, {{from, to}}));
  EXPECT_FALSE(config.ok()) << from << " became " << to;
  return std::string(config.status().message());
}

TEST(ReadRemapBenchConfig, ReadsTenantsSystemsAndRuns) {
  const auto config = Read(kConfig);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->memory, MiB(100));
  EXPECT_EQ(config->drain, absl::Seconds(5));
  ASSERT_EQ(config->tenants.size(), 2u);
  EXPECT_EQ(config->tenants[0].shape, "tiny");
  EXPECT_EQ(config->tenants[1].folder, "folder");
  EXPECT_EQ(config->tenants[1].requests, 3);
  EXPECT_EQ(config->tenants[1].settings, "priority: 1");
  ASSERT_EQ(config->systems.size(), 2u);
  EXPECT_EQ(config->systems[0].policy, "memory_policy: remap");
  EXPECT_FALSE(config->systems[0].floors);
  EXPECT_EQ(config->systems[0].pool, "peer: {gpu: 1, bytes: 1 GiB}");
  EXPECT_TRUE(config->systems[1].fixed_shares);
  EXPECT_TRUE(config->systems[1].floors);
  ASSERT_EQ(config->runs.size(), 2u);
  EXPECT_THAT(config->runs[0].systems, ElementsAre("remap", "static"));
  EXPECT_THAT(config->runs[0].rates, ElementsAre(0.5, 2, 4));
  EXPECT_THAT(config->runs[0].tenants, ElementsAre(2));
  EXPECT_THAT(config->runs[1].prompt_tokens, ElementsAre(100, 200));
}

TEST(ReadRemapBenchConfig, TenantsMayHaveWorkspacesOfTheirOwnOnAGpu) {
  const auto config =
      Read(absl::StrReplaceAll(kConfig, {{"device: cpu", "device: cuda\nworkspace: 64 MiB"},
                                         {"share: 0.25,", "share: 0.25, workspace: 96 MiB,"}}));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->tenants[0].workspace, MiB(64));
  EXPECT_EQ(config->tenants[1].workspace, MiB(96));
  EXPECT_THAT(Refusal("share: 0.25,", "share: 0.25, workspace: 96 MiB,"),
              HasSubstr("only for device: cuda"));
}

TEST(ReadRemapBenchConfig, RefusesWhatCannotBeMeasured) {
  EXPECT_THAT(Refusal("share: 0.5}", "share: 0.8}"), HasSubstr("more than 1 together"));
  EXPECT_THAT(Refusal("shape: tiny", "shape: giant"), HasSubstr("no shape 'giant'"));
  EXPECT_THAT(Refusal("shape: tiny, ", ""), HasSubstr("either a shape or a model"));
  EXPECT_THAT(Refusal("name: one", "name: \"../one\""), HasSubstr("expected 1 to 40 of"));
  EXPECT_THAT(Refusal("name: static", "name: remap"), HasSubstr("two are 'remap'"));
  EXPECT_THAT(Refusal("systems: [remap]", "systems: [rmap]"), HasSubstr("no system 'rmap'"));
  EXPECT_THAT(Refusal("[4, 0.5, 2]", "[4, x]"), HasSubstr("'x'"));
  EXPECT_THAT(Refusal("[4, 0.5, 2]", "[4, 0]"), HasSubstr("above 0"));
  EXPECT_THAT(Refusal("[4, 0.5, 2]", "[nan]"), HasSubstr("'nan'"));
  EXPECT_THAT(Refusal("tenants: [1, 2]", "tenants: [3]"), HasSubstr("'3'"));
  EXPECT_THAT(Refusal("tenants: [1, 2]", "tenants: [0]"), HasSubstr("at least one tenant"));
  EXPECT_THAT(Refusal("[100, 200]", "[2000]"), HasSubstr("exceeds max_sequence_tokens"));
  EXPECT_THAT(Refusal("most_prompt: 400", "most_prompt: 2040"), HasSubstr("max_sequence_tokens"));
  EXPECT_THAT(Refusal("device: cpu", "device: cpu\ncontext: 1 MiB"), HasSubstr("only for device"));
  EXPECT_THAT(Refusal("duration: 10s", "duraton: 10s"), HasSubstr("duraton"));
}

TEST(ReadRemapBenchConfig, ReadsConversationsAndTiers) {
  constexpr absl::string_view kSweep =
      "  - {name: sweep, systems: [remap], rates: [2], prompt_tokens: [100, 200], tenants: [1, "
      "2]}\n";
  const std::string text = absl::StrReplaceAll(
      kConfig,
      {{kSweep, ""},
       {"duration: 10s",
        "duration: 10s\nwarm_up: 4s\nconversations: {system_tokens: 5, context_tokens: 1500, "
        "tool_share: 0.5, human_wait: 3s}"},
       {"{name: remap,", "{name: remap, tiers: \"dram: {bytes: 64 MiB}\","}});
  const auto config = Read(text);
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_TRUE(config->conversations.has_value());
  EXPECT_EQ(config->conversations->context_tokens, 1500);
  EXPECT_EQ(config->conversations->human_wait, absl::Seconds(3));
  EXPECT_EQ(config->warm_up, absl::Seconds(4));
  EXPECT_EQ(config->systems[0].tiers, "dram: {bytes: 64 MiB}");
  EXPECT_EQ(config->systems[1].tiers, "");
  const auto refusal = [&](absl::string_view from, absl::string_view to) {
    const auto refused = Read(absl::StrReplaceAll(text, {{from, to}}));
    EXPECT_FALSE(refused.ok()) << from << " became " << to;
    return std::string(refused.status().message());
  };
  EXPECT_THAT(refusal("context_tokens: 1500", "context_tokens: 1600"),
              HasSubstr("context_tokens of conversations"));
  EXPECT_THAT(refusal("warm_up: 4s", "warm_up: 10s"), HasSubstr("less than duration"));
  EXPECT_THAT(refusal("[4, 0.5, 2]}", "[4], prompt_tokens: [9]}"), HasSubstr("not with conv"));
}

TEST(ExpandRuns, HasEveryPointOnceAndFewNodes) {
  const auto config = Read(kConfig);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto nodes = ExpandRuns(*config);
  std::vector<std::string> seen;
  for (const RemapNodeRun& node : nodes) {
    for (const RemapPoint& point : node.points) {
      seen.push_back(absl::StrCat(node.system->name, " ", node.tenants, " ", point.run->name, " ",
                                  point.prompt_tokens, " ", point.rate));
    }
  }
  EXPECT_THAT(seen, ElementsAre("remap 2 rate 0 0.5", "remap 2 rate 0 2", "remap 2 rate 0 4",
                                "remap 2 sweep 100 2", "remap 2 sweep 200 2", "static 2 rate 0 0.5",
                                "static 2 rate 0 2", "static 2 rate 0 4", "remap 1 sweep 100 2",
                                "remap 1 sweep 200 2"));
}

TEST(ExpandRuns, EverySystemHasTheSameLoads) {
  const auto config = Read(kConfig);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto nodes = ExpandRuns(*config);
  ASSERT_EQ(nodes.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(nodes[0].points[i].load, nodes[1].points[i].load);
  EXPECT_NE(nodes[0].points[0].load, nodes[0].points[1].load);
  EXPECT_NE(nodes[0].points[3].load, nodes[2].points[0].load);
}

}  // namespace
}  // namespace palimpsest::palctl
