// KV blocks that go down in parts, by groups of KV heads, through real processes: what is worth
// least lies below tier 1 while the rest stays, and the second turn has the tokens of a node
// without tiers.
#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "gtest/gtest.h"
#include "tests/node.h"
#include "tests/node_tiers.h"
#include "worker/core/head_profile.h"

namespace palimpsest {
namespace {

Node::Request Ask(const std::string& text, int max_tokens = 24) {
  return {.tenant = "alpha", .text = text, .max_tokens = max_tokens};
}

class HeadGroupsTest : public ::testing::Test {
 protected:
  // Of the nodes' model. Its 16 heads are in four groups by their masses, and each group has so
  // much less than the next one that no time that a test takes changes their order.
  static HeadProfile Profile() {
    HeadProfile profile;
    profile.layers = 8;
    profile.kv_heads = 2;
    profile.recent_tokens = 256;
    profile.samples = 1;
    for (int head = 0; head < 16; ++head) {
      const int rank = head * 7 % 16;
      const int exponent = 10 * (rank / 4 - 3);
      profile.mass.push_back(std::exp2(static_cast<float>(exponent)));
    }
    profile.effect = profile.mass;
    return profile;
  }

  static std::vector<Node::Request> Requests() {
    return {Ask(LongText(1)), Ask(LongText(1) + " What happened then? ")};
  }

  // What a node without tiers answers.
  static std::vector<Generation> Calm() {
    Node node(Options("", ""));
    node.Start();
    std::vector<Generation> answers;
    for (const Node::Request& request : Requests()) answers.push_back(node.Generate(request));
    return answers;
  }

  // So that T0 has nothing of earlier requests.
  static void Evict(Node& node) {
    for (int i = 900; i < 904; ++i) {
      EXPECT_TRUE(node.Generate(Ask(LongText(i), 8)).status.ok());
    }
  }

  static NodeOptions Options(const std::string& heads, const std::string& tier_one) {
    NodeOptions options = ScarceKv();
    if (heads.empty()) return options;
    const std::string file = ::testing::TempDir() + "head_profile.json";
    EXPECT_TRUE(WriteFileAtomically(file, Profile().ToJson()).ok());
    options.engine.push_back(absl::StrCat("heads: {profile: ", file, ", ", heads, "}"));
    AddTiers(options, absl::StrCat("bytes: ", tier_one, ", chunk_bytes: 4 MiB"));
    return options;
  }

  static void ExpectSame(const Generation& expected, const Generation& got) {
    ASSERT_TRUE(got.status.ok()) << got.status;
    EXPECT_TRUE(SameTokens(NodeBackend::kHost, expected, got));
  }
};

// Blocks of 64 KiB in four parts.
constexpr uint64_t kPartBytes = 16 << 10;

TEST_F(HeadGroupsTest, BlocksComeBackFromTheirParts) {
  const std::vector<Generation> calm = Calm();
  // By masses as they are sampled, once there are enough.
  Node node(Options("groups: 4, tier_1_bytes: 1 MiB, sample_every: 1", "64 MiB"));
  node.Start();
  AwaitFastTiers(node);
  ExpectSame(calm[0], node.Generate(Requests()[0]));
  // The parts of 56 full blocks of the prompt at least, of which 64 have room.
  node.Await("parts below", [&] { return TierRow(node, "cxl").blocks() >= 4 * 56 - 64; });
  EXPECT_GE(TierRow(node, "dram").blocks(), 4 * 56u) << "none is gone before its room is needed";
  Evict(node);
  const Generation again = node.Generate(Requests()[1]);
  ExpectSame(calm[1], again);
  EXPECT_GT(again.usage.cached_tokens(), 800u);
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_F(HeadGroupsTest, HottestPartsStayInATierOneThatHasNoRoomForAll) {
  const std::vector<Generation> calm = Calm();
  Node node(Options("groups: 4, tier_1_bytes: 6 MiB", "12 MiB"));
  node.Start();
  AwaitFastTiers(node);
  ExpectSame(calm[0], node.Generate(Requests()[0]));
  Evict(node);
  // Five conversations of 56 full blocks at least; the parts that are worth most have 6 MiB.
  const uint64_t kept = (6u << 20) / kPartBytes;
  node.Await("what has no room below",
             [&] { return TierRow(node, "cxl").blocks() >= uint64_t{5 * 4 * 56} - kept; });
  const v1::TenantTier above = TierRow(node, "dram"), below = TierRow(node, "cxl");
  EXPECT_LE(above.used_bytes(), 12u << 20);
  std::cout << "tier 1 has " << above.blocks() << " parts in " << above.used_bytes()
            << " bytes, the tier below " << below.blocks() << " in " << below.used_bytes() << "\n";
  ExpectSame(calm[1], node.Generate(Requests()[1]));
  // The hot part of each block was where it had been, though its conversation idled longest; what
  // was missing came up.
  EXPECT_GE(TierRow(node, "dram").hit_blocks(), above.hit_blocks() + 50);
  EXPECT_GT(TierRow(node, "cxl").promoted_blocks(), 0u);
  EXPECT_TRUE(node.StopAll().ok());
}

}  // namespace
}  // namespace palimpsest
