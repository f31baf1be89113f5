// `palctl replay --serve` against a node of real processes: what it sends comes back from the tiers
// as the trace's structure says, and what it reports is what the node counted.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/fd.h"
#include "common/file.h"
#include "common/process.h"
#include "tests/node.h"

namespace palimpsest {
namespace {

using nlohmann::json;

constexpr int kConversations = 6;
constexpr int kTurns = 3;

// As Mooncake's: conversations of 8 blocks that go on by turns, one block more each time, and one
// request that no node can have.
std::string Trace() {
  std::vector<std::string> lines;
  int milliseconds = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    for (int conversation = 0; conversation < kConversations; ++conversation) {
      std::vector<int> blocks;
      for (int i = 0; i < 8 + turn; ++i) blocks.push_back(100 * conversation + i);
      lines.push_back(absl::StrCat(
          R"({"timestamp": )", milliseconds += 500, R"(, "input_length": )", 512 * blocks.size(),
          R"(, "output_length": 1000, "hash_ids": [)", absl::StrJoin(blocks, ", "), "]}"));
    }
  }
  lines.push_back(absl::StrCat(R"({"timestamp": )", milliseconds,
                               R"(, "input_length": 100000, "output_length": 1, "hash_ids": []})"));
  return absl::StrJoin(lines, "\n");
}

// T0 as small as the test's node has it; a block has 64 tokens here.
constexpr char kTiers[] =
    "recompute: {per_token: 100us}\n"
    "tiers:\n"
    "  - {name: T0, blocks: 40}\n"
    "  - {name: T1, blocks: 256, latency: 100us, bytes_per_second: 5e9}\n"
    "  - {name: T3, blocks: 1024, latency: 1ms, bytes_per_second: 1e9}\n";

class ReplayServeTest : public ::testing::Test {
 protected:
  static NodeOptions Options() {
    NodeOptions options;
    options.tenants = {{.name = "alpha", .quota_slabs = Node::kImageSlabs + 5}};
    options.pool_slabs = Node::kImageSlabs + 5;
    options.engine = {"kv_low_water_slabs: 0", "kv_high_water_slabs: 4"};
    options.tiers = {"dram: {bytes: 64 MiB, chunk_bytes: 16 MiB}",
                     "nvme: {bytes: 256 MiB, path: blocks}", "staging: 16 MiB", "policy: lru"};
    return options;
  }

  // What it printed; fails the test if it did not end well.
  static std::string Serve(Node& node, const std::vector<std::string>& more) {
    const auto file = [&node](const std::string& name) { return node.folder() + "/" + name; };
    EXPECT_TRUE(WriteFileAtomically(file("trace.jsonl"), Trace()).ok());
    EXPECT_TRUE(WriteFileAtomically(file("tiers.yaml"), kTiers).ok());
    EXPECT_TRUE(WriteFileAtomically(file("client-token"), node.token("alpha"), 0600).ok());
    const UniqueFd out(
        ::open(file("output").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    SpawnOptions client;
    client.argv = {"/bin/sh",
                   "-c",
                   absl::StrCat("exec \"$@\" 2>", file("progress")),
                   "sh",
                   Node::Program("palctl", "tools/palctl"),
                   "--router",
                   absl::StrCat("unix:", file("router.sock")),
                   "--broker",
                   file("broker.sock"),
                   "--token-file",
                   file("client-token"),
                   "replay",
                   "--serve",
                   "--trace",
                   file("trace.jsonl"),
                   "--format",
                   "mooncake",
                   "--tiers",
                   file("tiers.yaml"),
                   "--block-tokens",
                   "64",
                   "--most-output",
                   "8",
                   "--speed",
                   "5"};
    client.argv.insert(client.argv.end(), more.begin(), more.end());
    client.output = out.get();
    absl::StatusOr<ChildProcess> process = ChildProcess::Spawn(client);
    EXPECT_TRUE(process.ok()) << process.status();
    const absl::Status ended = process->Wait(absl::Seconds(60));
    const auto errors = ReadFile(file("progress"), MiB(1));
    EXPECT_TRUE(ended.ok()) << ended << "\n" << errors.value_or("");
    return ReadFile(file("output"), MiB(1)).value_or("");
  }
};

TEST_F(ReplayServeTest, ConversationsComeBackFromTheTiersAsTheReplayExpects) {
  Node node(Options());
  node.Start();
  const json result = json::parse(Serve(node, {"--json", "--salt", "1"}));
  const json& served = result["served"];
  EXPECT_EQ(served["requests"], kConversations * kTurns);
  EXPECT_EQ(served["finished"], kConversations * kTurns) << served["error"];
  EXPECT_EQ(served["too_long"], 1);
  EXPECT_EQ(served["output_tokens"], 8 * kConversations * kTurns);
  EXPECT_EQ(served["prompt_tokens"], 64 * kConversations * (8 + 9 + 10));
  EXPECT_GT(served["ttft_seconds"]["p50"], 0);
  EXPECT_GE(served["ttft_seconds"]["p99"], served["ttft_seconds"]["p50"]);
  // No block is there for a first turn, and at most those of the turn before for another.
  const double most = (8 + 9) / static_cast<double>(8 + 9 + 10);
  EXPECT_DOUBLE_EQ(result["tiers"]["hit_rate_tokens"], most);
  // Where the machine is busy, computing may be expected to be faster than loading.
  EXPECT_GT(served["hit_rate_tokens"], 0) << served.dump(1);
  EXPECT_LE(served["hit_rate_tokens"], most);
  ASSERT_EQ(served["by_tier"].size(), 3u);
  EXPECT_EQ(served["by_tier"][1]["tier"], "T1 dram");
  EXPECT_GT(served["by_tier"][1]["hit_rate_tokens"], 0) << served.dump(1);
  EXPECT_GT(served["by_tier"][1]["expected"], 0);
  EXPECT_EQ(served["by_tier"][2]["expected"], 0);

  // Another run's tokens are others, and the same run's are the same.
  const json other = json::parse(Serve(node, {"--json", "--requests", "2"}));
  EXPECT_EQ(other["served"]["requests"], 2);
  EXPECT_EQ(other["served"]["cached_tokens"], 0);
  const json again = json::parse(Serve(node, {"--json", "--requests", "2", "--salt", "1"}));
  EXPECT_GT(again["served"]["cached_tokens"], 0);
  EXPECT_TRUE(node.StopAll().ok());
}

}  // namespace
}  // namespace palimpsest
