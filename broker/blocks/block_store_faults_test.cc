// What goes wrong below and beside the block store: tiers, memory, workers.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "broker/blocks/testing/block_store_fixture.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

TEST_F(BlockStoreTest, MemoryThatIsRefusedIsNoRoomAndComesLater) {
  no_memory_ = true;
  MustStart("");
  auto worker = Worker();
  const auto reserved = worker->Reserve(ChainOf("alpha", 1, 0, 1));
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  EXPECT_EQ(reserved->front().result, blocks::Reservation::kNoRoom);
  EXPECT_TRUE(Eventually([&] {
    const v1::TenantTier row = Row("dram");
    for (const v1::TierRefusals& refusals : row.refusals()) {
      if (refusals.reason() == "no_memory") return true;
    }
    return false;
  }));
  no_memory_ = false;
  EXPECT_TRUE(Puts(*worker, ChainOf("alpha", 1, 0, 1)));
}

TEST_F(BlockStoreTest, AWorkerThatDoesNotUnmapIsKilled) {
  MustStart("");
  auto child = ChildProcess::Spawn({.argv = {"/bin/sleep", "600"}});
  ASSERT_TRUE(child.ok()) << child.status();
  auto process = ProcessHandle::Open(child->handle().identity());
  ASSERT_TRUE(process.ok());
  BlockWorker worker(*store_, hand_overs_, SessionId(1), kAlpha, "alpha",
                     std::make_shared<const ProcessHandle>(*std::move(process)), kBlock);
  ASSERT_TRUE(Puts(worker, ChainOf("alpha", 1, 0, 4)));
  worker.set_answers(false);
  ASSERT_TRUE(store_->SetLimit(blocks::kArenaTier, "alpha", Bytes(0)).ok());
  EXPECT_TRUE(child->handle().AwaitExit(kPatience).ok());
  worker.End();
  EXPECT_TRUE(Eventually([&] { return Status().tiers(0).used_bytes() == 0; }));
}

// Overwrites the end of each page of a file but its first ones.
void Damage(const std::string& path, off_t from) {
  const UniqueFd file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_GE(file.get(), 0);
  const off_t size = lseek(file.get(), 0, SEEK_END);
  for (off_t at = from + 4000; at < size; at += 4096) ASSERT_EQ(pwrite(file.get(), "x!", 2, at), 2);
}

TEST_F(BlockStoreTest, ADamagedByteInAFolderIsAMiss) {
  MustStart(Directory());
  auto worker = Worker();
  PutBelow(*worker, 2);
  for (const auto& file : fs::recursive_directory_iterator(shared() + "/blocks")) {
    if (file.is_regular_file()) Damage(file.path(), 4096);
  }
  for (uint64_t s = 1; s <= 2; ++s) {
    EXPECT_EQ(Gets(*worker, ChainOf("alpha", s, 0, 4), s, absl::Seconds(10)), 0u);
  }
  EXPECT_GT(Status().tiers(1).corrupt_blocks(), 0u);
}

TEST_F(BlockStoreTest, ADamagedByteOnADiskIsAMiss) {
  MustStart(Nvme());
  auto worker = Worker();
  PutBelow(*worker, 2);
  // Behind the superblocks and both areas of metadata.
  Damage(disk(), MiB(16).count());
  Damage(disk(), 0);
  for (uint64_t s = 1; s <= 2; ++s) {
    EXPECT_EQ(Gets(*worker, ChainOf("alpha", s, 0, 4), s, absl::Seconds(10)), 0u);
  }
  EXPECT_GT(Status().tiers(1).corrupt_blocks(), 0u);
}

TEST_F(BlockStoreTest, ADamagedByteInT1IsAMissAndNeverGoesDown) {
  MustStart(Directory());
  auto worker = Worker();
  const auto chain = ChainOf("alpha", 1, 0, 2);
  ASSERT_TRUE(Puts(*worker, chain));
  const auto reply = worker->Acquire(chain, 1, absl::ZeroDuration());
  ASSERT_EQ(reply->blocks.size(), 2u);
  (*worker->At(reply->blocks[0].extent))[17] ^= std::byte{1};
  blocks::RequestEnding ending;
  ending.request = 1;
  ASSERT_TRUE(store_->EndRequest(worker->caller(), ending).ok());
  EXPECT_EQ(Gets(*worker, chain, 2), 0u);
  ASSERT_TRUE(Eventually([&] {
    EXPECT_TRUE(store_->Trim(blocks::kArenaTier, "alpha", Bytes(0)).ok());
    return Row("dram").blocks() == 0;
  }));
  EXPECT_EQ(Gets(*worker, chain, 3, absl::Seconds(5)), 0u);
}

TEST_F(BlockStoreTest, ATierThatVanishesIsLeftAloneAndTheOthersGoOn) {
  MustStart(Directory());
  auto worker = Worker();
  PutBelow(*worker, 4);
  fs::remove_all(shared());
  for (uint64_t s = 1; s <= 4; ++s) {
    EXPECT_EQ(Gets(*worker, ChainOf("alpha", s, 0, 4), s, absl::Seconds(2)), 0u);
  }
  ASSERT_TRUE(Puts(*worker, ChainOf("alpha", 50, 0, 4)));
  EXPECT_EQ(Gets(*worker, ChainOf("alpha", 50, 0, 4), 50), 4u);
}

TEST_F(BlockStoreTest, ADiskHasOneOwner) {
  MustStart(Nvme());
  std::unique_ptr<BlockStore> first = std::move(store_);
  const absl::Status second = Start(Nvme());
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(second.message(), HasSubstr("tiers.nvme"));
  store_ = std::move(first);
}

TEST_F(BlockStoreTest, AWaitEndsWhenItIsCancelledOrItsSessionEnds) {
  // So slow that nothing arrives.
  MustStart("cxl: {bytes: 32 MiB, emulated: {bytes_per_second: 8 GiB, latency: 400ms}}\n");
  auto worker = Worker();
  PutBelow(*worker, 2);
  const auto chain = ChainOf("alpha", 1, 0, 4);
  blocks::AcquireRequest ask;
  ask.request = 1;
  ask.ids = chain;
  ask.promote = true;
  std::atomic<int> answers = 0;
  const auto count = [&](const absl::StatusOr<blocks::AcquireReply>&) { ++answers; };
  const auto cancelled = store_->Acquire(worker->caller(), ask, absl::Seconds(30), count);
  ASSERT_TRUE(cancelled.has_value());
  EXPECT_TRUE(store_->CancelWait(worker->caller(), *cancelled));
  EXPECT_FALSE(store_->CancelWait(worker->caller(), *cancelled));
  EXPECT_EQ(answers, 0);
  ask.request = 2;
  const auto waits = store_->Acquire(worker->caller(), ask, absl::Seconds(30), count);
  worker->End();
  EXPECT_EQ(answers, 1);
  if (waits.has_value()) EXPECT_FALSE(store_->CancelWait(worker->caller(), *waits));
}

class FaultyTierTest : public BlockStoreTest {
 protected:
  // Sequences 1 to 8 are put while the tier fares so; then all of T1 goes.
  void PutWith(const std::string& tier, const TierFaults& faults) {
    worker_ = Worker();
    faults_.at(tier).Set(faults);
    for (uint64_t s = 1; s <= 8; ++s) ASSERT_TRUE(Puts(*worker_, ChainOf("alpha", s, 0, 4)));
    ASSERT_TRUE(Eventually([&] {
      EXPECT_TRUE(store_->Trim(blocks::kArenaTier, "alpha", Bytes(0)).ok());
      return Row("dram").blocks() == 0;
    })) << Status().DebugString();
    WarmUp(*worker_);
  }
  // Blocks that come back; the test fails if one comes with other bytes.
  size_t Back() {
    size_t back = 0;
    for (uint64_t s = 1; s <= 8; ++s) {
      back += Gets(*worker_, ChainOf("alpha", s, 0, 4), ++last_request_, kPatience);
    }
    return back;
  }
  // At the end of each test.
  void ExpectNothingLeaks() {
    worker_->End();
    BlockStoreTest::ExpectNothingLeaks();
    worker_ = nullptr;
    store_ = nullptr;
  }

  std::unique_ptr<BlockWorker> worker_;
};

TEST_F(FaultyTierTest, DamagedAndTornBlocksOfEachTierAreMisses) {
  MustStart("lend: {bytes: 32 MiB, listen: \"127.0.0.1:0\", transports: tcp}\n");
  const std::unique_ptr<BlockStore> lender = std::move(store_);
  const std::string remote = absl::StrCat("remote: {bytes: 32 MiB, peer: \"",
                                          lender->lending_address(), "\", transports: tcp}\n");
  for (const std::string& config : {Cxl(), Nvme(), remote, Directory()}) {
    for (const TierFaults& faults : {TierFaults{.damaged_writes = 1}, TierFaults{.torn_writes = 1},
                                     TierFaults{.damaged_reads = 1}}) {
      SCOPED_TRACE(config);
      const std::string tier = config.substr(0, config.find(':'));
      MustStart(config);
      PutWith(tier, faults);
      // Another node compares what it is sent, and takes none of these.
      const bool stored = tier != "remote" || faults.damaged_reads > 0;
      EXPECT_EQ(Row(tier).blocks(), stored ? 32u : 0u) << Status().DebugString();
      EXPECT_EQ(Back(), 0u);
      EXPECT_EQ(Status().tiers(1).corrupt_blocks() > 0, stored);
      EXPECT_EQ(Row(tier).promoted_blocks(), 0u);
      ExpectNothingLeaks();
      faults_.clear();
      fs::remove(disk());
      fs::remove_all(shared());
      fs::create_directory(shared());
    }
  }
}

TEST_F(FaultyTierTest, AFullMediumTakesNothingAndGivesBackWhatItHas) {
  for (const std::string& config : {Nvme(), Directory()}) {
    const std::string tier = config.substr(0, config.find(':'));
    MustStart(config);
    PutWith(tier, {});
    ASSERT_EQ(Row(tier).blocks(), 32u);
    faults_.at(tier).Set({.full_writes = 1});
    ASSERT_TRUE(Puts(*worker_, ChainOf("alpha", 50, 0, 4)));
    ASSERT_TRUE(Eventually([&] {
      EXPECT_TRUE(store_->Trim(blocks::kArenaTier, "alpha", Bytes(0)).ok());
      return Row("dram").blocks() == 0;
    }));
    WarmUp(*worker_);
    EXPECT_EQ(Back(), 32u);
    EXPECT_EQ(Gets(*worker_, ChainOf("alpha", 50, 0, 4), 50, kPatience), 0u);
    EXPECT_TRUE(Status().tiers(1).serving());
    EXPECT_GE(Row(tier).failed_demotions(), 4u);
    ExpectNothingLeaks();
  }
}

TEST_F(FaultyTierTest, AMediumWithErrorsIsLeftAloneUntilItIsWell) {
  MustStart(Nvme());
  PutWith("nvme", {});
  faults_.at("nvme").Set({.failed_reads = 1, .failed_writes = 1});
  EXPECT_EQ(Back(), 0u);
  EXPECT_TRUE(Eventually([&] { return !Status().tiers(1).serving(); }));
  ASSERT_TRUE(Puts(*worker_, ChainOf("alpha", 50, 0, 4))) << "T1 goes on";
  EXPECT_EQ(Gets(*worker_, ChainOf("alpha", 50, 0, 4), 50), 4u);
  faults_.at("nvme").Set({});
  AwaitServing();
  EXPECT_EQ(Back(), 32u);
  ExpectNothingLeaks();
}

TEST_F(FaultyTierTest, WhatComesAfterTheDeadlineIsAMissAndIsThereForTheNextOne) {
  MustStart(Nvme());
  PutWith("nvme", {});
  faults_.at("nvme").Hold(FaultInjector::Stage::kRead);
  const auto chain = ChainOf("alpha", 1, 0, 4);
  EXPECT_EQ(Gets(*worker_, chain, 1, absl::Milliseconds(50)), 0u);
  EXPECT_EQ(faults_.at("nvme").held(), 4u);
  faults_.at("nvme").GoOn();
  EXPECT_TRUE(BringsBack(*worker_, chain));
  ExpectNothingLeaks();
}

TEST_F(FaultyTierTest, ASlowDiskIsNotWaitedFor) {
  MustStart(absl::StrCat("nvme: {bytes: 64 MiB, slow: 1s, path: ", disk(), "}\n"));
  PutWith("nvme", {});
  faults_.at("nvme").Set({.late = 1, .delay = absl::Milliseconds(1500)});
  const absl::Time start = MonotonicNow();
  EXPECT_EQ(Gets(*worker_, ChainOf("alpha", 1, 0, 4), 1, kPatience), 0u);
  EXPECT_LT(MonotonicNow() - start, kPatience / 2) << "whoever waits is released";
  EXPECT_TRUE(Eventually([&] { return !Status().tiers(1).serving(); }));
  faults_.at("nvme").Set({});
  AwaitServing();
  EXPECT_EQ(Back(), 32u);
  ExpectNothingLeaks();
}

}  // namespace
}  // namespace palimpsest
