// A conversation's KV blocks, steered by hints of its client through real processes and watched
// from the broker's events: where they lie is told by nothing else.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "common/grpc_time.h"
#include "common/mutex.h"
#include "proto/palimpsest/v1/block_store.grpc.pb.h"
#include "tests/node.h"
#include "tests/node_tiers.h"

namespace palimpsest {
namespace {

using Keys = std::set<std::pair<uint64_t, uint64_t>>;

// What a reader of the broker's events knows. Thread-safe.
class Watcher {
 public:
  explicit Watcher(v1::BlockAdmin::Stub& admin) : stream_(admin.WatchBlocks(&context_, {})) {
    reader_ = std::thread([this] { Read(); });
  }
  ~Watcher() {
    context_.TryCancel();
    reader_.join();
  }

  Keys In(v1::Tier tier) {
    MutexLock lock(&mu_);
    return keys_[tier];
  }
  // How often blocks were stored, the first snapshot included.
  uint64_t stored() {
    MutexLock lock(&mu_);
    return stored_;
  }
  bool Has(v1::Tier tier, const Keys& keys) {
    const Keys there = In(tier);
    for (const auto& key : keys) {
      if (!there.contains(key)) return false;
    }
    return true;
  }
  bool HasNone(v1::Tier tier, const Keys& keys) {
    const Keys there = In(tier);
    for (const auto& key : keys) {
      if (there.contains(key)) return false;
    }
    return true;
  }

 private:
  void Read() {
    v1::WatchBlocksResponse message;
    while (stream_->Read(&message)) {
      MutexLock lock(&mu_);
      if (message.snapshot().begins()) keys_.clear();
      for (const v1::BlockEvent& event : message.events()) {
        if (!message.has_snapshot()) {
          EXPECT_EQ(event.sequence(), last_ + 1) << "of one tenant alone";
        }
        last_ = event.sequence();
        const std::pair key(event.key().high(), event.key().low());
        if (event.kind() == v1::BlockEvent::KIND_STORED) {
          EXPECT_TRUE(keys_[event.tier()].insert(key).second) << "stored twice";
          ++stored_;
        } else {
          EXPECT_EQ(keys_[event.tier()].erase(key), 1u) << "was not there";
        }
      }
      last_ = message.sequence();
    }
    stream_->Finish();
  }

  grpc::ClientContext context_;
  const std::unique_ptr<grpc::ClientReader<v1::WatchBlocksResponse>> stream_;
  std::thread reader_;
  Mutex mu_;
  uint64_t last_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t stored_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<v1::Tier, Keys> keys_ ABSL_GUARDED_BY(mu_);
};

class ConversationTest : public ::testing::Test {
 protected:
  static NodeOptions Options(bool tiers) {
    NodeOptions options = ScarceKv();
    if (tiers) AddTiers(options);
    return options;
  }

  static Node::Request Turn(const std::string& text) {
    Node::Request request{.tenant = "alpha", .text = text, .max_tokens = 24};
    request.conversation = "trip";
    return request;
  }
  static Generation Ask(Node& node, const Node::Request& request) {
    Generation answer = node.Generate(request);
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    return answer;
  }

  static std::unique_ptr<v1::BlockAdmin::Stub> Admin(Node& node) {
    return v1::BlockAdmin::NewStub(
        grpc::CreateChannel(absl::StrCat("unix:", node.folder(), "/state/operator.sock"),
                            grpc::InsecureChannelCredentials()));
  }

  static void EmptyT1(v1::BlockAdmin::Stub& admin) {
    grpc::ClientContext context;
    context.set_deadline(GrpcTimeout(absl::Seconds(30)));
    v1::TrimRequest trim;
    trim.set_tier(v1::TIER_DRAM);
    v1::TrimResponse trimmed;
    const grpc::Status status = admin.Trim(&context, trim, &trimmed);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

  // How many blocks the hint says to concern.
  static uint64_t Hint(Node& node, const v1::CacheAction& action) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", absl::StrCat("Bearer ", node.token("alpha")));
    context.set_deadline(GrpcTimeout(absl::Seconds(30)));
    v1::HintConversationRequest request;
    request.set_conversation_id("trip");
    *request.mutable_action() = action;
    v1::HintConversationResponse response;
    const grpc::Status status = node.router().HintConversation(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.blocks();
  }
};

TEST_F(ConversationTest, HintsBringItsBlocksBackAndReleaseThem) {
  const std::string first_text = LongText(1);
  const std::string second_text = first_text + " What happened then? ";
  Generation calm;
  {
    Node node(Options(/*tiers=*/false));
    node.Start();
    calm = Ask(node, Turn(second_text));
    EXPECT_TRUE(node.StopAll().ok());
  }
  Node node(Options(/*tiers=*/true));
  node.Start();
  AwaitFastTiers(node);
  const auto admin = Admin(node);
  Watcher watcher(*admin);

  // So short an answer leaves no block on which the second turn does not hang.
  Node::Request first = Turn(first_text);
  first.max_tokens = 1;
  first.hints.set_expected_idle_seconds(3600);
  Ask(node, first);
  node.Await("the first turn in T1", [&] { return watcher.In(v1::TIER_DRAM).size() >= 50; });
  const Keys blocks = watcher.In(v1::TIER_DRAM);

  // Others take T0, and T1 is emptied.
  for (int i = 900; i < 904; ++i) Ask(node, {.tenant = "alpha", .text = LongText(i)});
  EmptyT1(*admin);
  node.Await("the first turn below T1 alone", [&] {
    return watcher.HasNone(v1::TIER_DRAM, blocks) && watcher.Has(v1::TIER_CXL, blocks);
  });
  v1::CacheAction prefetch;
  prefetch.mutable_prefetch()->set_seconds(60);
  EXPECT_GE(Hint(node, prefetch), 50u);
  node.Await("the first turn in T1 again", [&] { return watcher.Has(v1::TIER_DRAM, blocks); });

  const Generation second = Ask(node, Turn(second_text));
  EXPECT_TRUE(SameTokens(NodeBackend::kHost, calm, second));
  EXPECT_GT(second.usage.cached_tokens(), 800u);
  const auto status = node.BrokerStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_GE(status->tiers(0).tenants(0).prefetched_used_blocks(), 50u);

  // The second turn ends when its own blocks are stored; until then it uses the first one's.
  v1::CacheAction release;
  release.mutable_release();
  node.Await("nothing of it anywhere", [&] {
    Hint(node, release);
    return watcher.HasNone(v1::TIER_DRAM, blocks) && watcher.HasNone(v1::TIER_CXL, blocks);
  });
  EXPECT_GE(watcher.In(v1::TIER_CXL).size(), 50u) << "others' blocks stay";
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_F(ConversationTest, ItsBlocksAreBackWhenItIsExpectedToGoOn) {
  Node node(Options(/*tiers=*/true));
  node.Start();
  AwaitFastTiers(node);
  const auto admin = Admin(node);
  Watcher watcher(*admin);
  Node::Request request = Turn(LongText(1));
  request.hints.set_expected_idle_seconds(8);
  Ask(node, request);
  node.Await("the first turn in T1", [&] { return watcher.In(v1::TIER_DRAM).size() >= 50; });
  const Keys blocks = watcher.In(v1::TIER_DRAM);
  EmptyT1(*admin);
  node.Await("the first turn below T1 alone", [&] {
    return watcher.HasNone(v1::TIER_DRAM, blocks) && watcher.Has(v1::TIER_CXL, blocks);
  });
  node.Await("the first turn in T1 again", [&] { return watcher.Has(v1::TIER_DRAM, blocks); });
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_F(ConversationTest, WhatIsToBecomeOfARequestIsDoneAtItsEnd) {
  Node node(Options(/*tiers=*/true));
  node.Start();
  AwaitFastTiers(node);
  const auto admin = Admin(node);
  Watcher watcher(*admin);
  Node::Request request = Turn(LongText(1));
  request.hints.mutable_then()->mutable_release();
  Ask(node, request);
  node.Await("blocks that came and went", [&] {
    return watcher.stored() >= 50 && watcher.In(v1::TIER_DRAM).empty() &&
           watcher.In(v1::TIER_CXL).empty();
  });
  EXPECT_TRUE(node.StopAll().ok());
}

}  // namespace
}  // namespace palimpsest
