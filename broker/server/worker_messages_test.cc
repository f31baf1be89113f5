#include "broker/server/worker_messages.h"

#include <cmath>
#include <random>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kPool = 8;

std::string Refusal(const v1::WorkerMessage& message) {
  const auto event = ParseWorkerMessage(message, kPool);
  EXPECT_EQ(event.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(event.status().message());
}

TEST(ParseWorkerMessage, TakesWhatIsInBounds) {
  v1::WorkerMessage message;
  message.mutable_revoke_done()->set_revoke_id(5);
  message.mutable_revoke_done()->add_slab_ids(7);
  message.mutable_revoke_done()->add_slab_ids(0);
  const auto event = ParseWorkerMessage(message, kPool);
  ASSERT_TRUE(event.ok()) << event.status();
  const auto& done = std::get<RevokeDoneEvent>(*event);
  EXPECT_EQ(done.revoke, RevokeId(5));
  EXPECT_EQ(done.slabs, (std::vector<SlabId>{SlabId(7), SlabId(0)}));
}

TEST(ParseWorkerMessage, RefusesSlabsOutsideThePoolOrNamedTwice) {
  v1::WorkerMessage message;
  message.mutable_release_kv()->add_slab_ids(8);
  EXPECT_THAT(Refusal(message), HasSubstr("slab 8 is not one of the pool's 8"));
  message.mutable_release_kv()->set_slab_ids(0, 3);
  message.mutable_release_kv()->add_slab_ids(3);
  EXPECT_THAT(Refusal(message), HasSubstr("named twice"));
}

TEST(ParseWorkerMessage, TakesUnmappedChunksInBounds) {
  v1::WorkerMessage message;
  message.mutable_chunks_unmapped();
  EXPECT_THAT(Refusal(message), HasSubstr("names 0 chunks, expected 1 to 65536"));
  for (uint32_t i = 0; i < kMaxUnmappedChunks; ++i) {
    message.mutable_chunks_unmapped()->add_chunk_ids(i);
  }
  const auto event = ParseWorkerMessage(message, kPool);
  ASSERT_TRUE(event.ok()) << event.status();
  EXPECT_EQ(std::get<ChunksUnmappedEvent>(*event).chunks.size(), kMaxUnmappedChunks);
  message.mutable_chunks_unmapped()->add_chunk_ids(0);
  EXPECT_THAT(Refusal(message), HasSubstr("names 65537 chunks"));
}

TEST(CheckedRotation, TakesWhatCanBeAndRefusesWhatIsTooLarge) {
  v1::Rotation rotation;
  EXPECT_TRUE(CheckedRotation(rotation)->none());
  for (const uint32_t stage : {2u, 5u, 7u}) rotation.add_stages(stage);
  rotation.set_slots(2);
  const auto checked = CheckedRotation(rotation);
  ASSERT_TRUE(checked.ok()) << checked.status();
  EXPECT_EQ(*checked, (Rotation{{2, 5, 7}, 2}));
  v1::Rotation again;
  RotationToProto(*checked, again);
  EXPECT_EQ(again.SerializeAsString(), rotation.SerializeAsString());
  rotation.set_slots(3);
  EXPECT_THAT(CheckedRotation(rotation).status().message(), HasSubstr("3 slots"));
  rotation.set_slots(2);
  rotation.add_stages(0xffffffff);
  EXPECT_THAT(CheckedRotation(rotation).status().message(), HasSubstr("4294967295"));
}

TEST(ParseWorkerMessage, RefusesTargetsThatCannotBe) {
  v1::WorkerMessage message;
  message.mutable_set_kv_target()->set_target_slabs(9);
  EXPECT_THAT(Refusal(message), HasSubstr("expected needed <= target <= 8"));
  message.mutable_set_kv_target()->set_target_slabs(2);
  message.mutable_set_kv_target()->set_needed_slabs(3);
  Refusal(message);
}

TEST(ParseWorkerMessage, ReadsSpeedsOfAReportAndRefusesWhatIsNone) {
  v1::WorkerMessage message;
  v1::Report& report = *message.mutable_report();
  report.set_decode_step_seconds(0.01);
  report.set_prefill_step_seconds(0.25);
  report.set_prefill_share(0.5);
  report.set_image_bytes_per_second(5e10);
  report.set_image_on_peer(true);
  report.set_rotation_stall_seconds(3);
  report.set_rotation_bytes(7);
  report.set_restored_bytes(8);
  report.set_block_bytes(9);
  report.set_cached_slab_seconds(0.75);
  const auto event = ParseWorkerMessage(message, kPool);
  ASSERT_TRUE(event.ok()) << event.status();
  const auto& load = std::get<SessionLoad>(*event);
  EXPECT_EQ(load.decode_step, absl::Milliseconds(10));
  EXPECT_EQ(load.prefill_step, absl::Milliseconds(250));
  EXPECT_EQ(load.prefill_share, 0.5);
  EXPECT_EQ(load.image_bytes_per_second, 5e10);
  EXPECT_TRUE(load.image_on_peer);
  EXPECT_EQ(load.rotation_stall, absl::Seconds(3));
  EXPECT_EQ(load.rotation_bytes, 7u);
  EXPECT_EQ(load.restored_bytes, 8u);
  EXPECT_EQ(load.block_bytes, 9u);
  EXPECT_EQ(load.cached_slab, absl::Milliseconds(750));
  report.set_prefill_share(1.5);
  EXPECT_THAT(Refusal(message), HasSubstr("prefill_share"));
  report.set_prefill_share(0.5);
  for (const double none : {-1.0, std::nan(""), HUGE_VAL}) {
    report.set_decode_step_seconds(none);
    EXPECT_THAT(Refusal(message), HasSubstr("decode_step_seconds"));
  }
}

TEST(ParseWorkerMessage, RefusesDurationsThatAreNone) {
  for (const double seconds : {-1.0, 86401.0, std::nan(""), HUGE_VAL}) {
    v1::WorkerMessage message;
    message.mutable_grant_mapped()->set_map_seconds(seconds);
    EXPECT_THAT(Refusal(message), HasSubstr("map_seconds"));
    message.mutable_grant_mapped()->set_map_seconds(0);
    message.mutable_grant_mapped()->set_restore_seconds(seconds);
    EXPECT_THAT(Refusal(message), HasSubstr("restore_seconds"));
  }
}

TEST(ParseWorkerMessage, RefusesUnknownReasonsCountsAndKinds) {
  v1::WorkerMessage message;
  EXPECT_THAT(Refusal(message), HasSubstr("no known kind"));
  message.mutable_attach();
  EXPECT_THAT(Refusal(message), HasSubstr("first message"));
  message.mutable_activate();
  EXPECT_THAT(Refusal(message), HasSubstr("reason"));
  message.mutable_activate()->set_reason(static_cast<v1::Activate::Reason>(77));
  Refusal(message);
  message.mutable_report()->set_kv_slabs_used(1u << 31);
  Refusal(message);
}

TEST(ParseWorkerMessage, MutatedBytesNeverNameASlabOutsideThePool) {
  v1::WorkerMessage done;
  done.mutable_revoke_done()->set_revoke_id(1);
  for (const uint32_t id : {1, 5, 7}) done.mutable_revoke_done()->add_slab_ids(id);
  v1::WorkerMessage target;
  target.mutable_set_kv_target()->set_target_slabs(5);
  target.mutable_set_kv_target()->set_needed_slabs(2);
  const std::string originals[] = {done.SerializeAsString(), target.SerializeAsString()};
  std::mt19937 random(1);
  int parsed = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = originals[round % 2];
    for (int flips = 1 + random() % 3; flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    v1::WorkerMessage message;
    if (!message.ParseFromString(bytes)) continue;
    const auto event = ParseWorkerMessage(message, kPool);
    if (!event.ok()) continue;
    ++parsed;
    if (const auto* named = std::get_if<RevokeDoneEvent>(&*event)) {
      for (const SlabId slab : named->slabs) ASSERT_LT(slab.value(), kPool);
    } else if (const auto* wanted = std::get_if<KvTargetEvent>(&*event)) {
      ASSERT_LE(wanted->needed_slabs, wanted->target_slabs);
      ASSERT_LE(wanted->target_slabs, kPool);
    }
  }
  EXPECT_GT(parsed, 100);
}

TEST(CheckedHeldSlabs, TakesEachSlabOnceInAMappableRole) {
  v1::Reattach reattach;
  v1::HeldSlab& slab = *reattach.add_slabs();
  slab.set_slab_id(3);
  slab.set_epoch(9);
  slab.set_role(v1::SLAB_ROLE_KV);
  const auto held = CheckedHeldSlabs(reattach, kPool);
  ASSERT_TRUE(held.ok());
  EXPECT_EQ(held->front().epoch, Epoch(9));
  EXPECT_EQ(held->front().role, SlabRole::kKv);
  *reattach.add_slabs() = slab;
  EXPECT_FALSE(CheckedHeldSlabs(reattach, kPool).ok());
  reattach.mutable_slabs()->RemoveLast();
  reattach.mutable_slabs(0)->set_role(v1::SLAB_ROLE_UNSPECIFIED);
  EXPECT_FALSE(CheckedHeldSlabs(reattach, kPool).ok());
}

}  // namespace
}  // namespace palimpsest
