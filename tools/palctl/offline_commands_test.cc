// What palctl answers without a node: from files alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/file.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/palctl_fixture.h"

namespace palimpsest::palctl {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

TEST_F(Palctl, BenchRemapSaysWhatIsMissing) {
  EXPECT_EQ(Run({"bench", "remap"}), kUsage);
  EXPECT_THAT(err_, HasSubstr("--config or --from"));
  EXPECT_EQ(Run({"bench", "remap", "--config", "/nowhere.yaml"}), kFailed);
  EXPECT_THAT(err_, HasSubstr("/nowhere.yaml"));
  const std::string other = ::testing::TempDir() + "/other.json";
  ASSERT_TRUE(WriteFileAtomically(other, "{\"points\": 1}").ok());
  EXPECT_EQ(Run({"bench", "remap", "--from", other}), kUsage);
  EXPECT_THAT(err_, HasSubstr("expected a result of palctl bench remap"));
}

TEST_F(Palctl, PlanSaysWhatFitsAndWhatMultiHeadSizingWould) {
  const std::string config = Write("config.json", R"({"model_type": "llama",
      "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
      "num_key_value_heads": 8, "max_position_embeddings": 8192})");
  std::vector<std::string> command = {"plan",     "--config", config,     "--memory", "T0=640GB",
                                      "--memory", "T1=80GiB", "--tokens", "131072"};
  ASSERT_EQ(Run(command), kDone) << err_;
  EXPECT_THAT(out_, HasSubstr("42949672960 B (40 GiB)"));
  EXPECT_THAT(out_, HasSubstr("sequences in T0"));
  EXPECT_THAT(out_, HasSubstr("configuration ends at 8192 tokens"));
  command.push_back("--json");
  ASSERT_EQ(Run(command), kDone) << err_;
  json plan = json::parse(out_);
  EXPECT_EQ(plan["bytes_per_token_layer"], 4096);
  EXPECT_EQ(plan["bytes_per_sequence"], int64_t{40} << 30);
  EXPECT_EQ(plan["mha_bytes_per_token_layer"], 32768);
  EXPECT_EQ(plan["max_sequences"], 14 + 2);
  EXPECT_EQ(plan["mha_max_sequences"], 1);
  EXPECT_EQ(plan["memory"][0]["max_sequences"], 14);
  EXPECT_EQ(plan["memory"][1]["name"], "T1");
  EXPECT_EQ(plan["memory"][1]["max_tokens"], 262144);
  command.insert(command.end(), {"--tp", "8", "--kv-dtype", "int8"});
  ASSERT_EQ(Run(command), kDone) << err_;
  EXPECT_EQ(json::parse(out_)["bytes_per_token_layer"], 2 * (128 + 4));
}

TEST_F(Palctl, PlanRefusesWhatItCannotSize) {
  const std::string config = Write("config.json", R"({"num_hidden_layers": 2})");
  const auto plan = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", "--config", config, "--tokens", "100"});
    return Run(more);
  };
  EXPECT_EQ(plan({}), kUsage) << "no memory";
  EXPECT_EQ(plan({"--memory", "1GiB"}), kUsage);
  EXPECT_THAT(err_, HasSubstr("num_attention_heads: expected"));
  EXPECT_EQ(plan({"--memory", "much"}), kUsage);
  EXPECT_THAT(err_, HasSubstr("'much' is not a size"));
  EXPECT_EQ(plan({"--memory", "1GiB", "--memory", "2GiB"}), kUsage);
  EXPECT_THAT(err_, HasSubstr("different names"));
  EXPECT_EQ(plan({"--memory", "1GiB", "--kv-dtype", "fp16"}), kUsage);
  EXPECT_THAT(err_, HasSubstr("expected one of bf16"));
  EXPECT_EQ(Run({"plan", "--config", "/nowhere.json", "--memory", "1GiB", "--tokens", "1"}),
            kFailed);
}

TEST_F(Palctl, ReplayRunsATraceUnderAPolicyBesideItsBounds) {
  const std::string trace =
      Write("trace.jsonl",
            R"({"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]}
{"timestamp": 5, "input_length": 512, "output_length": 1, "hash_ids": [4]}
{"timestamp": 9, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]})");
  const std::vector<std::string> command = {"replay",   "--trace",  trace, "--format",
                                            "mooncake", "--blocks", "3"};
  ASSERT_EQ(Run(command), kDone) << err_;
  EXPECT_THAT(out_, HasSubstr("3 requests in 9ms, 7 blocks of 512 tokens, 4 of them distinct"));
  std::vector<std::string> more = command;
  more.insert(more.end(), {"--policy", "gdsf", "--leaves-first", "--json"});
  ASSERT_EQ(Run(more), kDone) << err_;
  const json result = json::parse(out_);
  EXPECT_EQ(result["policy"], "gdsf");
  EXPECT_DOUBLE_EQ(result["hit_rate_blocks"], 2.0 / 7);
  EXPECT_DOUBLE_EQ(result["hit_rate_tokens"], 2.0 / 7);
  EXPECT_DOUBLE_EQ(result["lru"], 0);
  EXPECT_DOUBLE_EQ(result["belady"], 3.0 / 7);
  EXPECT_DOUBLE_EQ(result["infinite"], 3.0 / 7);
  more = command;
  more.back() = "0";
  EXPECT_EQ(Run(more), kUsage);
  more = command;
  more.resize(5);
  EXPECT_EQ(Run(more), kUsage);
  EXPECT_THAT(err_, HasSubstr("--blocks or --tiers"));
  more.insert(more.end(),
              {"--policy", "predictive", "--hints", "idle", "--json", "--tiers",
               Write("tiers.yaml",
                     "recompute: {per_token: 1ms}\n"
                     "tiers: [{name: T0, blocks: 3}, {name: T1, blocks: 4, latency: 1ms, "
                     "bytes_per_second: 1e11}]\n")});
  ASSERT_EQ(Run(more), kDone) << err_;
  const json tiers = json::parse(out_);
  EXPECT_EQ(tiers["blocks"], 7);
  EXPECT_EQ(tiers["hints"], "idle");
  EXPECT_EQ(tiers["tiers"]["by_tier"][1]["name"], "T1");
  more.back() = "/nowhere.yaml";
  EXPECT_EQ(Run(more), kFailed);
  more = command;
  more[4] = "claude-code";
  EXPECT_EQ(Run(more), kFailed) << "when sessions start is not there";
  EXPECT_THAT(err_, HasSubstr("claude_code_starts.csv"));
}

}  // namespace
}  // namespace palimpsest::palctl
