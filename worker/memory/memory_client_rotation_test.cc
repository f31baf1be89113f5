// Layers that rotate: the client with a broker that asks for it, dies at every stage of it, or asks
// for nonsense.
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "worker/memory/grpc_memory_client_fixture.h"
#include "worker/memory/testing/scripted_pool.h"

namespace palimpsest {
namespace {

constexpr Bytes kSlab = KiB(16);
constexpr uint32_t kLayers = 6;
constexpr uint32_t kStages = kLayers + 2;
constexpr uint32_t kImage = 1 + 2 * kLayers + 1;

FakeBroker::Model MakeModel() {
  FakeBroker::Model model{kSlab, 3 * kImage, std::vector<uint32_t>(kStages, 2), {}};
  model.stages.front() = model.stages.back() = 1;
  std::mt19937_64 random(5);
  model.image.resize(static_cast<size_t>((kSlab * kImage).count()));
  for (size_t i = 0; i < model.image.size(); i += sizeof(uint64_t)) {
    const uint64_t value = random();
    std::memcpy(&model.image[i], &value, sizeof(value));
  }
  return model;
}

class MemoryClientRotationTest : public GrpcMemoryClientTest {
 protected:
  MemoryClientRotationTest() : GrpcMemoryClientTest(MakeModel()) {}

  void Begin() {
    Connect();
    pool_ = std::make_unique<ScriptedPool>(&broker_, MakeModel());
    ASSERT_TRUE(pool_->GrantImage());
    AwaitIdle();
  }

  // Plays the engine: finishes what the broker wants, and runs a step now and then.
  void TakeWorkerTurn() {
    for (const MemoryEvent& event : client_->TakeEvents()) {
      if (const auto* wanted = std::get_if<RotationWanted>(&event)) {
        client_->FinishRotation(wanted->id);
        ++unsettled_;
      }
      if (const auto* settled = std::get_if<RotationSettled>(&event)) {
        --unsettled_;
        settled_ = *settled;
      }
      if (const auto* revoked = std::get_if<ParametersRevoked>(&event)) {
        client_->FinishParameterRevoke(revoked->id);
      }
      if (const auto* mapped = std::get_if<KvMapped>(&event)) {
        kv_.insert(kv_.end(), mapped->indexes.begin(), mapped->indexes.end());
      }
      if (const auto* revoked = std::get_if<KvRevoked>(&event)) {
        const size_t count = std::min(kv_.size(), static_cast<size_t>(revoked->slabs));
        client_->FinishKvRevoke(revoked->id, absl::MakeSpan(kv_).last(count));
        kv_.resize(kv_.size() - count);
      }
    }
  }

  void AwaitIdle() {
    const absl::Time deadline = MonotonicNow() + kPatience;
    while (!pool_->idle() || unsettled_ > 0) {
      ASSERT_LT(MonotonicNow(), deadline);
      TakeWorkerTurn();
      pool_->Pump();
      ASSERT_FALSE(HasFatalFailure());
      std::this_thread::yield();
    }
  }

  bool StageHoldsItsBytes(uint32_t stage) {
    const uint32_t first = stage == 0 ? 0 : 2 * stage - 1;
    const uint32_t count = stage == 0 || stage == kStages - 1 ? 1 : 2;
    for (uint32_t i = first; i < first + count; ++i) {
      const std::string image = broker_.ImageSlab(i);
      const std::byte* at = client_->parameters() + (kSlab * i).count();
      if (std::memcmp(at, image.data(), image.size()) != 0) return false;
    }
    return true;
  }

  // Reads all stages as a runner does, up to one where it gives up.
  void RunStep(uint32_t abandon_at = kStages) {
    for (uint32_t stage = 0; stage < abandon_at; ++stage) {
      const absl::Status status = client_->gate().AwaitStage(static_cast<int>(stage));
      if (absl::IsUnavailable(status)) {
        ASSERT_TRUE(parameters_may_be_missing_) << status;
        return;
      }
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_TRUE(StageHoldsItsBytes(stage)) << "stage " << stage;
      client_->gate().ReleaseStage(static_cast<int>(stage));
    }
  }

  void Rotate(const Rotation& rotation) {
    ASSERT_TRUE(pool_->Rotate(rotation));
    AwaitIdle();
    ASSERT_EQ(pool_->rotation(), rotation);
  }

  std::unique_ptr<ScriptedPool> pool_;
  std::vector<RegionIndex> kv_;
  bool parameters_may_be_missing_ = false;
  int unsettled_ = 0;
  RotationSettled settled_;
};

TEST_F(MemoryClientRotationTest, StepsReadTheirLayersWhateverRotates) {
  Begin();
  const uint32_t whole = pool_->free();
  for (const int32_t slots : {1, 2, 1}) {
    for (const int32_t freed : {1, 3, 4, 2, 0, 4, 1}) {
      SCOPED_TRACE(absl::StrCat(freed, " freed, slots ", slots));
      ASSERT_NO_FATAL_FAILURE(Rotate(EvenRotation(1, kLayers, freed, slots)));
      EXPECT_EQ(pool_->free(), whole + 2 * static_cast<uint32_t>(freed));
      EXPECT_TRUE(settled_.changed);
      EXPECT_EQ(settled_.rotation, pool_->rotation());
      EXPECT_TRUE(client_->ParametersAvailable());
      const MappedSlabs mapped = client_->Mapped();
      EXPECT_EQ(mapped.slots, freed == 0 ? 0 : 2 * slots);
      EXPECT_EQ(mapped.rotating, freed == 0 ? 0 : freed + slots);
      for (int step = 0; step < 3; ++step) ASSERT_NO_FATAL_FAILURE(RunStep());
      ASSERT_NO_FATAL_FAILURE(RunStep(3));
      ASSERT_NO_FATAL_FAILURE(RunStep());
    }
  }
}

TEST_F(MemoryClientRotationTest, DissolvedLayersAreMissingUntilTheyAreActivated) {
  Begin();
  const Rotation rotation = EvenRotation(1, kLayers, 2, 2);
  ASSERT_NO_FATAL_FAILURE(Rotate(rotation));
  ASSERT_TRUE(pool_->Dissolve());
  AwaitIdle();
  EXPECT_FALSE(client_->ParametersAvailable());
  EXPECT_TRUE(client_->gate().AwaitStage(0).ok());
  EXPECT_EQ(client_->Mapped().slots, 0);
  EXPECT_TRUE(absl::IsUnavailable(client_->gate().AwaitStage(rotation.stages.back())));
  client_->RequestActivation(ActivationReason::kRequest);
  broker_.Await(Case::kActivate);
  ASSERT_TRUE(pool_->GrantImage());
  AwaitIdle();
  EXPECT_TRUE(client_->ParametersAvailable());
  ASSERT_NO_FATAL_FAILURE(RunStep());
}

TEST_F(MemoryClientRotationTest, WhatARotationLeavesEmptyMayBeGrantedBeforeItHasSettled) {
  Begin();
  for (int i = 0; i < 50; ++i) {
    ASSERT_NO_FATAL_FAILURE(Rotate(EvenRotation(1, kLayers, 2, 2)));
    ASSERT_TRUE(pool_->Dissolve());
    const absl::Time deadline = MonotonicNow() + kPatience;
    while (!pool_->idle()) {
      ASSERT_LT(MonotonicNow(), deadline);
      TakeWorkerTurn();
      pool_->Pump();
    }
    ASSERT_TRUE(pool_->GrantImage());
    ASSERT_NO_FATAL_FAILURE(AwaitIdle());
    ASSERT_TRUE(client_->ParametersAvailable());
    ASSERT_NO_FATAL_FAILURE(RunStep());
  }
}

TEST_F(MemoryClientRotationTest, SpeedsAndBytesAreReported) {
  Begin();
  ASSERT_NO_FATAL_FAILURE(Rotate(EvenRotation(1, kLayers, 1, 1)));
  ASSERT_NO_FATAL_FAILURE(RunStep());
  client_->SendReport({.active = true,
                       .decode_step_seconds = 0.5,
                       .prefill_step_seconds = 2,
                       .prefill_share = 0.25,
                       .rotation_stall_seconds = 3,
                       .rotation_bytes = Bytes(1),
                       .cached_slab_seconds = 7});
  const v1::Report report = broker_.Await(Case::kReport).report();
  EXPECT_EQ(report.decode_step_seconds(), 0.5);
  EXPECT_EQ(report.prefill_step_seconds(), 2);
  EXPECT_EQ(report.prefill_share(), 0.25);
  EXPECT_EQ(report.rotation_stall_seconds(), 3);
  EXPECT_EQ(report.cached_slab_seconds(), 7);
  EXPECT_GT(report.image_bytes_per_second(), 0);
  // Two layers of two slabs, and what is copied ahead.
  EXPECT_GE(report.rotation_bytes(), static_cast<uint64_t>((kSlab * 4).count()));
  EXPECT_EQ(report.rotation_bytes() % static_cast<uint64_t>((kSlab * 2).count()), 1);
}

// What the next broker finds, and what steps read, when the broker dies at each stage of going from
// one rotation to another.
class BrokerDeathTest : public MemoryClientRotationTest,
                        public ::testing::WithParamInterface<std::tuple<int, int>> {
 protected:
  void Finish() {
    pool_->Restart();
    AwaitIdle();
    ASSERT_TRUE(client_->ParametersAvailable());
    ASSERT_NO_FATAL_FAILURE(RunStep());
    ASSERT_NO_FATAL_FAILURE(Rotate(EvenRotation(1, kLayers, 2, 1)));
    ASSERT_NO_FATAL_FAILURE(RunStep());
    ASSERT_NO_FATAL_FAILURE(Rotate({}));
    ASSERT_NO_FATAL_FAILURE(RunStep());
    EXPECT_EQ(pool_->free(), 2 * kImage);
  }
};

INSTANTIATE_TEST_SUITE_P(FromAndTo, BrokerDeathTest,
                         ::testing::Values(std::tuple(0, 3), std::tuple(3, 1), std::tuple(1, 4),
                                           std::tuple(2, 0)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param), "To",
                                               std::get<1>(info.param));
                         });

TEST_P(BrokerDeathTest, AtEachStageLeavesOneOfBothRotations) {
  const Rotation from = EvenRotation(1, kLayers, std::get<0>(GetParam()), 2);
  const Rotation to = EvenRotation(1, kLayers, std::get<1>(GetParam()), 1);
  Begin();
  for (const int stage : {0, 1, 2, 3, 4}) {
    SCOPED_TRACE(stage);
    ASSERT_NO_FATAL_FAILURE(Rotate(from));
    ASSERT_NO_FATAL_FAILURE(RunStep());
    ASSERT_TRUE(pool_->Rotate(to));
    if (stage == 0) {  // spare slabs were granted, or the worker was just told
      ASSERT_NO_FATAL_FAILURE(Finish());
      continue;
    }
    RotationWanted wanted;
    const absl::Time deadline = MonotonicNow() + kPatience;
    while (wanted.id == RotationId(0)) {
      ASSERT_LT(MonotonicNow(), deadline);
      pool_->Pump();
      for (const MemoryEvent& event : client_->TakeEvents()) {
        if (const auto* found = std::get_if<RotationWanted>(&event)) wanted = *found;
      }
    }
    EXPECT_EQ(wanted.rotation, to);
    ASSERT_NO_FATAL_FAILURE(RunStep());  // a step that is in flight
    if (stage == 1) {                    // the engine has not answered
      broker_.Kill();
      AwaitEvent<BrokerLost>();
      client_->FinishRotation(wanted.id);
      EXPECT_FALSE(AwaitEvent<RotationSettled>().changed);
      ASSERT_NO_FATAL_FAILURE(Finish());
      continue;
    }
    client_->FinishRotation(wanted.id);
    if (stage == 3) broker_.Await(Case::kRotationDone);
    const bool changed = stage == 2 || AwaitEvent<RotationSettled>().changed;
    EXPECT_TRUE(changed);
    if (stage == 4) RunStep();
    pool_->Restart();
    if (stage == 2) {
      EXPECT_TRUE(AwaitEvent<RotationSettled>().changed);
    }
    EXPECT_EQ(pool_->rotation(), to);
    ASSERT_NO_FATAL_FAILURE(Finish());
  }
}

TEST_F(MemoryClientRotationTest, NonsenseEndsTheSessionAndChangesNothing) {
  Begin();
  const Rotation rotation = EvenRotation(1, kLayers, 2, 1);
  ASSERT_NO_FATAL_FAILURE(Rotate(rotation));
  const auto refused = [&](const v1::SetRotation& message, int times = 1) {
    for (int i = 0; i < times; ++i) broker_.SetRotation(message);
    for (bool lost = false; !lost;) {
      for (const MemoryEvent& event : client_->TakeEvents()) {
        lost |= std::holds_alternative<BrokerLost>(event);
        if (const auto* wanted = std::get_if<RotationWanted>(&event)) {
          if (times == 1) client_->FinishRotation(wanted->id);
        }
      }
    }
    pool_->Restart();
    EXPECT_EQ(pool_->rotation(), rotation);
    ASSERT_NO_FATAL_FAILURE(RunStep());
  };
  v1::SetRotation message;
  message.mutable_rotation()->add_stages(77);
  refused(message);
  message.Clear();
  message.add_moves()->set_slab_id(0);
  message.mutable_moves(0)->set_role(v1::SLAB_ROLE_KV);
  refused(message);
  message.mutable_moves(0)->set_role(v1::SLAB_ROLE_UNSPECIFIED);
  message.mutable_moves(0)->set_slab_id(40);  // of nobody
  refused(message);
  message.Clear();
  message.mutable_rotation()->add_stages(1);
  message.mutable_rotation()->add_stages(2);
  message.mutable_rotation()->set_slots(1);
  refused(message);  // they have slabs
  refused(message, 2);
  EXPECT_EQ(client_->Mapped().slots, 2);
}

TEST_F(MemoryClientRotationTest, RandomHistoriesLeaveBothSidesInAgreement) {
  Begin();
  parameters_may_be_missing_ = true;
  std::mt19937 random(17);
  const auto chance = [&](int percent) { return static_cast<int>(random() % 100) < percent; };
  const absl::Time deadline = MonotonicNow() + kPatience;
  while (pool_->rotations() < 80 || pool_->restarts() < 6) {
    ASSERT_LT(MonotonicNow(), deadline);
    if (chance(12)) {
      const int32_t slots = 1 + static_cast<int32_t>(random() % 2);
      const auto freed = static_cast<int32_t>(random() % (kLayers - static_cast<uint32_t>(slots)));
      pool_->Rotate(EvenRotation(1, kLayers, freed, slots));
    }
    if (chance(3)) pool_->Dissolve();
    if (chance(3)) pool_->RevokeStage(random() % kStages);
    if (chance(20)) pool_->GrantImage();
    if (chance(5)) pool_->GrantKv(1 + random() % 4);
    if (chance(5) && pool_->kv_revokes() == 0) pool_->RevokeKv(1 + random() % 4);
    if (chance(40)) TakeWorkerTurn();
    if (chance(40)) pool_->Pump();
    if (unsettled_ == 0 && chance(50)) RunStep(chance(25) ? random() % kStages : kStages);
    if (random() % 200 == 0) pool_->Restart();
    if (HasFatalFailure()) return;
    std::this_thread::yield();
  }
  AwaitIdle();
}

}  // namespace
}  // namespace palimpsest
