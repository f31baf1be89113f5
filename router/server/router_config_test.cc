#include "router/server/router_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace palimpsest::router {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<RouterConfig> Read(const std::string& text) {
  absl::StatusOr<YamlConfig> yaml = YamlConfig::Parse(text, "router.yaml");
  if (!yaml.ok()) return yaml.status();
  return ReadRouterConfig(*yaml);
}

constexpr char kSmall[] = R"(auth_file: tokens
tenants:
  - name: alpha
    models: [{name: m, path: /models/m, workers: ["127.0.0.1:9110"]}]
)";

TEST(RouterConfig, SmallFileGetsDefaults) {
  const RouterConfig config = Read(kSmall).value();
  EXPECT_EQ(config.listen, "127.0.0.1:9100");
  EXPECT_EQ(config.tenants[0].limits.in_flight, 256);
  EXPECT_EQ(config.tenants[0].models[0].workers[0], "127.0.0.1:9110");
  EXPECT_EQ(config.health_interval, absl::Seconds(1));
  EXPECT_TRUE(config.tls_certificate.empty());
}

TEST(RouterConfig, WhatIsPrintedReadsBackTheSame) {
  YamlConfig yaml = YamlConfig::Parse(kSmall, "router.yaml").value();
  ASSERT_TRUE(ReadRouterConfig(yaml).ok());
  YamlConfig printed = YamlConfig::Parse(yaml.EffectiveYaml(), "printed").value();
  const absl::StatusOr<RouterConfig> again = ReadRouterConfig(printed);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(printed.EffectiveYaml(), yaml.EffectiveYaml());
}

TEST(RouterConfig, ErrorsNameTheLine) {
  const struct {
    const char* text;
    const char* line;
    const char* says;
  } kCases[] = {
      {"auth_file: t\n", "router.yaml", "at least one tenant"},
      {"auth_fill: t\n", "router.yaml:1", "auth_fill"},
      {"auth_file: t\ntenants:\n  - name: a\n", "router.yaml:3", "at least one model"},
      {"auth_file: t\ntenants:\n  - name: a\n    request_limit: 0\n    models: []\n",
       "router.yaml:4", "request_limit"},
      {"auth_file: t\ntenants:\n  - name: a\n    models:\n      - {name: m, path: p}\n",
       "router.yaml:5", "at least one address"},
      {"auth_file: t\ntenants:\n  - {name: a, models: [{name: m, path: p, workers: [w]}]}\n"
       "  - {name: a, models: [{name: m, path: p, workers: [w]}]}\n",
       "router.yaml:4", "'a' stands twice"},
      {"auth_file: t\ntls: {cert: c}\n", "router.yaml:2", "key"},
  };
  for (const auto& test : kCases) {
    const absl::Status status = Read(test.text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << test.text;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(test.line), HasSubstr(test.says)));
  }
}

}  // namespace
}  // namespace palimpsest::router
