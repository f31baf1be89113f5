#include "common/yaml_config.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

enum class Mode { kFast, kSafe };

YamlConfig Parse(absl::string_view text) {
  absl::StatusOr<YamlConfig> yaml = YamlConfig::Parse(text, "test.yaml");
  EXPECT_TRUE(yaml.ok()) << yaml.status();
  return *std::move(yaml);
}

std::string ParseError(absl::string_view text) {
  const absl::Status status = YamlConfig::Parse(text, "test.yaml").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << text;
  return std::string(status.message());
}

struct Settings {
  std::string name;
  bool pin;
  int64_t priority;
  double share;
  Bytes pool;
  absl::Duration deadline;
  Mode mode;
  std::vector<std::string> list;
  std::vector<std::string> tenants;
  std::vector<int64_t> ports;
};

Settings ReadAll(YamlConfig& yaml) {
  Settings s;
  ConfigReader root = yaml.root();
  s.name = root.String("name", "none");
  s.pin = root.Bool("pin", false);
  s.priority = root.Int("priority", 0, 9, 5);
  ConfigReader memory = root.Map("memory");
  s.share = memory.Double("share", 0, 1, 0.3);
  s.pool = memory.Size("pool", MiB(2), GiB(64), MiB(512));
  s.deadline = root.Duration("deadline", absl::Milliseconds(1), absl::Hours(1), absl::Seconds(2));
  s.mode = root.Choice<Mode>("mode", {{"fast", Mode::kFast}, {"safe", Mode::kSafe}}, Mode::kSafe);
  s.list = root.Strings("list", 4);
  for (auto& [name, tenant] : root.NamedMaps("tenants", 3)) {
    s.tenants.push_back(absl::StrCat(name, "=", tenant.Int("slabs", 1, 100)));
  }
  for (ConfigReader& worker : root.Maps("workers", 3)) {
    s.ports.push_back(worker.Int("port", 0, 65535));
  }
  return s;
}

TEST(YamlConfig, EmptyFileGivesDefaults) {
  for (const char* text : {"", "# nothing\n", "---\n", "{}", "name:\nmemory: ~\n"}) {
    YamlConfig yaml = Parse(text);
    const Settings s = ReadAll(yaml);
    EXPECT_TRUE(yaml.Finish().ok()) << text;
    EXPECT_EQ(s.name, "none");
    EXPECT_EQ(s.priority, 5);
    EXPECT_EQ(s.pool, MiB(512));
    EXPECT_EQ(s.mode, Mode::kSafe);
    EXPECT_TRUE(s.tenants.empty());
  }
}

TEST(YamlConfig, NamesMapToStrings) {
  YamlConfig yaml = Parse("tokens: {alpha: a.token, beta: 'b c'}\n");
  EXPECT_THAT(yaml.root().NamedStrings("tokens", 2),
              ElementsAre(std::make_pair("alpha", "a.token"), std::make_pair("beta", "b c")));
  EXPECT_TRUE(yaml.Finish().ok());

  for (const char* text : {"tokens: [a]\n", "tokens: {a: b, c: d, e: f}\n", "tokens: {a: {}}\n"}) {
    YamlConfig bad = Parse(text);
    bad.root().NamedStrings("tokens", 2);
    EXPECT_THAT(std::string(bad.Finish().message()), HasSubstr("test.yaml:1")) << text;
  }
}

constexpr absl::string_view kFull = R"(
name: "grüße \"x\"\n"
pin: true
priority: 7
memory:
  share: 0.1
  pool: 1.5 GiB
deadline: 250ms
mode: fast
list: [a, "true", "1.5", c d]
tenants:
  alpha: {slabs: 3}
  "be ta":
    slabs: 4
workers:
  - port: 80
  - {port: 0}
)";

TEST(YamlConfig, EveryTypeIsRead) {
  YamlConfig yaml = Parse(kFull);
  const Settings s = ReadAll(yaml);
  EXPECT_TRUE(yaml.Finish().ok()) << yaml.Finish();
  EXPECT_EQ(s.name, "grüße \"x\"\n");
  EXPECT_TRUE(s.pin);
  EXPECT_EQ(s.priority, 7);
  EXPECT_EQ(s.share, 0.1);
  EXPECT_EQ(s.pool, MiB(1536));
  EXPECT_EQ(s.deadline, absl::Milliseconds(250));
  EXPECT_EQ(s.mode, Mode::kFast);
  EXPECT_THAT(s.list, ElementsAre("a", "true", "1.5", "c d"));
  EXPECT_THAT(s.tenants, ElementsAre("alpha=3", "be ta=4"));
  EXPECT_THAT(s.ports, ElementsAre(80, 0));
}

TEST(YamlConfig, EffectiveConfigReadsBackAsItself) {
  for (absl::string_view text : {kFull, absl::string_view("")}) {
    YamlConfig yaml = Parse(text);
    ReadAll(yaml);
    const std::string effective = yaml.EffectiveYaml();
    YamlConfig again = Parse(effective);
    ReadAll(again);
    EXPECT_TRUE(again.Finish().ok()) << again.Finish() << "\n" << effective;
    EXPECT_EQ(again.EffectiveYaml(), effective);
  }
  YamlConfig yaml = Parse(kFull);
  ReadAll(yaml);
  EXPECT_THAT(yaml.EffectiveYaml(), HasSubstr("memory:\n  share: 0.1\n  pool: 1536 MiB\n"));
}

TEST(YamlConfig, UnknownKeysAreRefusedWithTheirLine) {
  YamlConfig yaml = Parse("name: x\nmemory:\n  share: 0.5\n  poool: 3\nprority: 1\n");
  ReadAll(yaml);
  EXPECT_EQ(yaml.Finish().message(),
            "test.yaml:4: unknown key 'poool'\ntest.yaml:5: unknown key 'prority'");
}

TEST(YamlConfig, UnknownKeysInsideListsAndNamedMapsAreRefused) {
  YamlConfig yaml =
      Parse("tenants:\n  alpha: {slabs: 1, x: 2}\nworkers:\n  - port: 1\n    host: y\n");
  ReadAll(yaml);
  EXPECT_EQ(yaml.Finish().message(),
            "test.yaml:2: unknown key 'x'\ntest.yaml:5: unknown key 'host'");
}

TEST(YamlConfig, WrongTypesAndBoundsNameExpectationAndValue) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"priority: 10", "'priority': expected a whole number from 0 to 9, got '10'"},
      {"priority: 1.5", "got '1.5'"},
      {"priority: \"3\"", "got the string '3'"},
      {"priority: [1]", "expected a whole number, got a list"},
      {"priority: 99999999999999999999", "got '99999999999999999999'"},
      {"pin: yes", "expected true or false, got 'yes'"},
      {"name: {a: b}", "expected a string, got a map"},
      {"memory: 3", "expected a map, got '3'"},
      {"memory: {share: nan}", "expected a number from 0 to 1, got 'nan'"},
      {"memory: {pool: 1 MiB}", "from 2 MiB to 64 GiB, got '1 MiB'"},
      {"memory: {pool: lots}", "got 'lots'"},
      {"deadline: 5", "expected a duration (as \"250ms\") from 1ms to 1h, got '5'"},
      {"mode: slow", "expected one of fast, safe, got 'slow'"},
      {"list: x", "expected a list of at most 4 strings"},
      {"list: [1,2,3,4,5]", "expected a list of at most 4 strings"},
      {"list: [[]]", "expected a list of strings"},
      {"tenants: [1]", "expected a map of at most 3 names to maps"},
      {"tenants: {a: 1}", "expected a map, got '1'"},
      {"workers: [1]", "expected a list of maps"},
  };
  for (const auto& [text, message] : cases) {
    YamlConfig yaml = Parse("\n" + text);
    ReadAll(yaml);
    const absl::Status status = yaml.Finish();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("test.yaml:2: ")) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message)) << text;
  }
}

TEST(YamlConfig, MissingRequiredKeysAreReportedTogether) {
  YamlConfig yaml = Parse("tenants:\n  alpha: {}\n");
  ConfigReader root = yaml.root();
  root.String("model");
  ReadAll(yaml);
  EXPECT_EQ(yaml.Finish().message(),
            "test.yaml:1: 'model': is required and missing\n"
            "test.yaml:2: 'slabs': is required and missing");
}

TEST(YamlConfig, CallersCanAddErrors) {
  YamlConfig yaml = Parse("name: x\npriority: 3\n");
  ReadAll(yaml);
  yaml.root().Error("priority", "must exceed that of beta");
  EXPECT_EQ(yaml.Finish().message(), "test.yaml:2: 'priority': must exceed that of beta");
}

TEST(YamlConfig, SyntaxErrorsNameTheirLine) {
  EXPECT_THAT(ParseError("a: 1\nb: [1, 2\n"), HasSubstr("test.yaml:"));
  EXPECT_THAT(ParseError("a: 1\n\t b: 2\n"), HasSubstr("test.yaml:2:"));
  EXPECT_THAT(ParseError("a: 1\na: 2\n"), HasSubstr("test.yaml:2: found a second 'a'"));
  EXPECT_THAT(ParseError("- 1\n- 2\n"), HasSubstr("expected 'key: value' lines, got a list"));
  EXPECT_THAT(ParseError("just text"), HasSubstr("got 'just text'"));
  EXPECT_THAT(ParseError("[a]: 1"), HasSubstr("a key that is not a string"));
}

TEST(YamlConfig, WhatCouldExplodeIsRefused) {
  EXPECT_THAT(ParseError("a: &x 1\nb: *x\n"), HasSubstr("test.yaml:1: found an anchor"));
  EXPECT_THAT(ParseError("a: &x [*x]"), HasSubstr("an anchor"));
  EXPECT_THAT(ParseError("a: !!python/object x"), HasSubstr("a tag"));
  EXPECT_THAT(ParseError("a: 1\n---\nb: 2\n"), HasSubstr("second YAML document"));
  EXPECT_THAT(ParseError("a: " + std::string(17, '[') + std::string(17, ']')),
              HasSubstr("more than 16 levels"));
  EXPECT_THAT(ParseError("a: " + std::string(100'000, '[')), HasSubstr("test.yaml:1:"));
  std::string many = "a: [";
  for (int i = 0; i < 30'000; ++i) many += "1,";
  EXPECT_THAT(ParseError(many + "1]"), HasSubstr("more than 20000 values"));
  EXPECT_THAT(ParseError("a: " + std::string(2 << 20, 'x')), HasSubstr("longer than the 1 MiB"));
}

TEST(YamlConfig, ManyErrorsAreCut) {
  std::string text;
  for (int i = 0; i < 100; ++i) absl::StrAppend(&text, "key", i, ": 1\n");
  YamlConfig yaml = Parse(text);
  EXPECT_THAT(std::string(yaml.Finish().message()), HasSubstr("and 80 more"));
}

}  // namespace
}  // namespace palimpsest
