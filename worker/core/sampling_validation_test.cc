#include "worker/core/sampling_validation.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(ValidateSampling, AbsentFieldsTakeDefaults) {
  const auto params = ValidateSampling({}, 100, 77);
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->max_tokens, 0);
  EXPECT_EQ(params->temperature, 1);
  EXPECT_EQ(params->top_k, 0);
  EXPECT_EQ(params->top_p, 1);
  EXPECT_EQ(params->min_p, 0);
  EXPECT_EQ(params->repetition_penalty, 1);
  EXPECT_EQ(params->seed, 77);
  EXPECT_EQ(params->logprobs, -1);
  EXPECT_FALSE(params->ignore_eos);
}

TEST(ValidateSampling, BoundsAreInclusiveAsDocumented) {
  SamplingFields fields;
  fields.max_tokens = std::numeric_limits<uint32_t>::max();
  fields.top_k = std::numeric_limits<uint32_t>::max();
  fields.temperature = 100;
  fields.top_p = 1;
  fields.min_p = 1;
  fields.repetition_penalty = 10;
  fields.logprobs = 20;
  fields.seed = 0;
  fields.stop.assign(16, std::string(256, 'x'));
  fields.stop_token_ids.assign(64, 99);
  const auto params = ValidateSampling(fields, 100, 77);
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->max_tokens, std::numeric_limits<int32_t>::max());
  EXPECT_EQ(params->top_k, std::numeric_limits<int32_t>::max());
  EXPECT_EQ(params->seed, 0);
  EXPECT_EQ(params->logprobs, 20);
  fields.temperature = 0;
  fields.min_p = 0;
  fields.logprobs = 0;
  EXPECT_TRUE(ValidateSampling(fields, 100, 77).ok());
}

struct Bad {
  const char* field;
  std::function<void(SamplingFields&)> set;
};

TEST(ValidateSampling, OutOfRangeNamesTheField) {
  std::vector<Bad> bad = {
      {"max_tokens", [](auto& f) { f.max_tokens = 0; }},
      {"logprobs", [](auto& f) { f.logprobs = 21; }},
      {"top_p", [](auto& f) { f.top_p = 0; }},
      {"repetition_penalty", [](auto& f) { f.repetition_penalty = 0; }},
      {"temperature", [](auto& f) { f.temperature = 100.5f; }},
      {"top_p", [](auto& f) { f.top_p = 1.001f; }},
      {"min_p", [](auto& f) { f.min_p = 1.001f; }},
      {"repetition_penalty", [](auto& f) { f.repetition_penalty = 10.5f; }},
      {"stop ", [](auto& f) { f.stop.assign(17, "x"); }},
      {"stop[1]",
       [](auto& f) {
         f.stop = {"x", ""};
       }},
      {"stop[0]", [](auto& f) { f.stop = {std::string(257, 'x')}; }},
      {"stop_token_ids ", [](auto& f) { f.stop_token_ids.assign(65, 1); }},
      {"stop_token_ids[1]",
       [](auto& f) {
         f.stop_token_ids = {1, 100};
       }},
      {"stop_token_ids[0]", [](auto& f) { f.stop_token_ids = {-1}; }},
  };
  for (float value : {kNan, kInfinity, -kInfinity, -0.5f}) {
    bad.push_back({"temperature", [=](auto& f) { f.temperature = value; }});
    bad.push_back({"top_p", [=](auto& f) { f.top_p = value; }});
    bad.push_back({"min_p", [=](auto& f) { f.min_p = value; }});
    bad.push_back({"repetition_penalty", [=](auto& f) { f.repetition_penalty = value; }});
  }
  for (size_t i = 0; i < bad.size(); ++i) {
    SamplingFields fields;
    bad[i].set(fields);
    const auto params = ValidateSampling(fields, 100, 0);
    ASSERT_FALSE(params.ok()) << i << " " << bad[i].field;
    EXPECT_EQ(params.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(params.status().message()), HasSubstr(bad[i].field));
  }
}

}  // namespace
}  // namespace palimpsest
