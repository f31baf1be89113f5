#include "broker/blocks/block_store.h"

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "broker/blocks/testing/block_store_fixture.h"
#include "common/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

TEST_F(BlockStoreTest, WhatIsCommittedComesBackFromT1) {
  MustStart("");
  auto worker = Worker();
  const auto chain = ChainOf("alpha", 1, 0, 8);
  // The first call has chunks made.
  ASSERT_TRUE(Puts(*worker, chain));
  EXPECT_EQ(Gets(*worker, chain, 1), 8u);
  EXPECT_EQ(Row("dram").blocks(), 8u);
  EXPECT_EQ(Row("dram").hit_blocks(), 8u);
  // Another tenant has none of it.
  auto other = Worker(2, kBeta);
  EXPECT_EQ(Gets(*other, ChainOf("beta", 1, 0, 8), 1), 0u);
}

TEST_F(BlockStoreTest, ASessionThatEndsLosesWhatItWroteAndItsToken) {
  MustStart("");
  auto worker = Worker();
  ASSERT_TRUE(Puts(*worker, ChainOf("alpha", 1, 0, 2)));
  const auto reserved = worker->Reserve(ChainOf("alpha", 2, 0, 2));
  ASSERT_TRUE(reserved.ok() && reserved->size() == 2);
  ASSERT_EQ(worker->Acquire(ChainOf("alpha", 1, 0, 2), 1, absl::ZeroDuration())->blocks.size(), 2u);
  worker->End();
  EXPECT_EQ(worker->Put(ChainOf("alpha", 3, 0, 1)).status().code(),
            absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(store_->Identify(SessionId(1), worker->caller().token).status().code(),
            absl::StatusCode::kUnauthenticated);
  auto next = Worker(2);
  EXPECT_EQ(Gets(*next, ChainOf("alpha", 2, 0, 2), 1), 0u);
  EXPECT_EQ(Gets(*next, ChainOf("alpha", 1, 0, 2), 2), 2u);
  EXPECT_EQ(Row("dram").used_bytes(), static_cast<uint64_t>(2 * kBlock.count()));
}

TEST_F(BlockStoreTest, AnAttachmentVoidsTheOneBefore) {
  MustStart("");
  auto worker = Worker();
  ASSERT_TRUE(Puts(*worker, ChainOf("alpha", 1, 0, 2)));
  const BlockStore::Caller before = worker->caller();
  ASSERT_EQ(worker->Acquire(ChainOf("alpha", 1, 0, 2), 1, absl::ZeroDuration())->blocks.size(), 2u);
  worker->Attach();
  EXPECT_EQ(store_->Abort(before, {}).code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(Gets(*worker, ChainOf("alpha", 1, 0, 2), 1), 2u);
}

TEST_F(BlockStoreTest, BlocksGoDownAndComeBackThroughEveryTier) {
  for (const std::string& tier : {Cxl(), Nvme(), Directory()}) {
    SCOPED_TRACE(tier);
    MustStart(tier);
    auto worker = Worker();
    PutBelow(*worker, 8);
    const std::string name = tier.substr(0, tier.find(':'));
    EXPECT_GT(Row(name).blocks(), 0u) << Status().DebugString();
    for (uint64_t s = 1; s <= 8; ++s) {
      EXPECT_TRUE(BringsBack(*worker, ChainOf("alpha", s, 0, 4))) << Status().DebugString();
    }
    EXPECT_GE(Row(name).promoted_blocks(), 32u);
    EXPECT_EQ(Row(name).failed_promotions(), 0u);
    worker->End();
    store_.reset();
  }
}

TEST_F(BlockStoreTest, WhatADiskOrAFolderHasIsThereAfterARestart) {
  for (const std::string& tier : {Nvme(), Directory()}) {
    SCOPED_TRACE(tier);
    MustStart(tier);
    {
      auto worker = Worker();
      PutBelow(*worker, 4);
      worker->End();
    }
    store_.reset();
    MustStart(tier);
    auto worker = Worker(2);
    WarmUp(*worker);
    for (uint64_t s = 1; s <= 4; ++s) {
      EXPECT_TRUE(BringsBack(*worker, ChainOf("alpha", s, 0, 4)));
    }
    worker->End();
    store_.reset();
  }
}

TEST_F(BlockStoreTest, AnEncipheredTierGivesBlocksBackAndNobodyElseReadsThem) {
  fs::create_directory(folder_ + "/keys");
  for (const char* tenant : {"alpha", "beta"}) {
    ASSERT_TRUE(WriteFileAtomically(absl::StrCat(folder_, "/keys/", tenant, ".key"),
                                    Token::Random().ToBytes(), 0600)
                    .ok());
  }
  const std::string tier =
      absl::StrCat("directory: {bytes: 64 MiB, path: ", shared(), ", keys: ", folder_, "/keys}\n");
  MustStart(tier);
  {
    auto worker = Worker();
    PutBelow(*worker, 2);
    EXPECT_TRUE(BringsBack(*worker, ChainOf("alpha", 1, 0, 4)));
    const auto checked = store_->CheckTiers(KiB(256), 2, kPatience);
    ASSERT_TRUE(checked.ok());
    EXPECT_TRUE((*checked)[1].check.status.ok()) << (*checked)[1].check.status;
    worker->End();
  }
  store_.reset();
  // Another key.
  ASSERT_TRUE(
      WriteFileAtomically(folder_ + "/keys/alpha.key", Token::Random().ToBytes(), 0600).ok());
  MustStart(tier);
  auto worker = Worker(2);
  WarmUp(*worker);
  EXPECT_EQ(Gets(*worker, ChainOf("alpha", 2, 0, 4), 1, absl::Seconds(5)), 0u);
  worker->End();
  store_.reset();
  fs::remove(folder_ + "/keys/beta.key");
  EXPECT_THAT(Start(tier).message(), HasSubstr("tiers.directory"));
}

TEST_F(BlockStoreTest, BlocksGoToMemoryThatAnotherStoreLends) {
  MustStart("lend: {bytes: 32 MiB, listen: \"127.0.0.1:0\", transports: tcp}\n");
  const std::unique_ptr<BlockStore> lender = std::move(store_);
  MustStart(absl::StrCat("remote: {bytes: 32 MiB, peer: \"", lender->lending_address(),
                         "\", transports: tcp}\n"));
  auto worker = Worker();
  PutBelow(*worker, 4);
  EXPECT_EQ(Row("remote").blocks(), 16u) << Status().DebugString();
  for (uint64_t s = 1; s <= 4; ++s) {
    EXPECT_TRUE(BringsBack(*worker, ChainOf("alpha", s, 0, 4))) << Status().DebugString();
  }
}

class SharedFolderTest : public BlockStoreTest {
 protected:
  std::string Of(const std::string& node, const std::string& more = "") const {
    return absl::StrCat("directory: {bytes: 64 MiB, path: ", shared(), ", node: ", node,
                        ", foreign_period: 20ms", more, "}\n");
  }
  uint64_t Foreign() {
    const std::vector<BlockStore::Foreign> rows = store_->ForeignBlocks();
    EXPECT_EQ(rows.size(), 2u);
    return rows.empty() ? 0 : rows[0].blocks;
  }
  // The other store gives up all that it has, also what goes down to the folder meanwhile; whether
  // this one then knows nothing of it.
  bool ForgetsWhatIsGivenUpBy(BlockStore& other) {
    return Eventually([&] {
      EXPECT_TRUE(other.Trim(std::nullopt, "", Bytes(0)).ok());
      return Foreign() == 0;
    });
  }
  // A store whose sequences 1 .. n of 4 blocks lie in the folder.
  std::unique_ptr<BlockStore> Writer(const std::string& lower, uint64_t sequences) {
    MustStart(lower);
    auto worker = Worker();
    PutBelow(*worker, sequences);
    EXPECT_EQ(Row("directory").blocks(), 4 * sequences);
    worker->End();
    return std::move(store_);
  }
};

TEST_F(SharedFolderTest, ANodeServesWhatAnotherHasStoredAndAccountsForNothing) {
  const std::unique_ptr<BlockStore> one = Writer(Of("one"), 4);
  MustStart(Of("two"));
  auto worker = Worker(2);
  WarmUp(*worker);
  ASSERT_TRUE(Eventually([&] { return Foreign() == 16; })) << Status().DebugString();
  EXPECT_EQ(Row("directory").used_bytes(), 0u);
  for (uint64_t s = 1; s <= 4; ++s) {
    EXPECT_TRUE(BringsBack(*worker, ChainOf("alpha", s, 0, 4))) << Status().DebugString();
  }
  EXPECT_GE(Row("directory").promoted_blocks(), 16u);
  // Another tenant has none of it.
  auto other = Worker(3, kBeta);
  EXPECT_EQ(Gets(*other, ChainOf("beta", 1, 0, 4), 1, absl::Seconds(1)), 0u);
  // What this node gives up stays where it is, and is not stored a second time.
  ASSERT_TRUE(Eventually([&] {
    EXPECT_TRUE(store_->Trim(std::nullopt, "", Bytes(0)).ok());
    return Row("dram").blocks() == 0 && Row("directory").used_bytes() == 0;
  })) << Status().DebugString();
  EXPECT_EQ(Foreign(), 16u);
  EXPECT_TRUE(BringsBack(*worker, ChainOf("alpha", 1, 0, 4)));
  // What the other one gives up is gone.
  EXPECT_TRUE(ForgetsWhatIsGivenUpBy(*one)) << Status().DebugString();
  EXPECT_EQ(Gets(*worker, ChainOf("alpha", 2, 0, 4), 1, absl::Seconds(1)), 0u);
  EXPECT_TRUE(one->CheckConsistency().ok());
}

TEST_F(SharedFolderTest, BlocksThatComeLaterAreFoundAndThoseOfAPurgeAreLost) {
  MustStart(Of("two"));
  std::unique_ptr<BlockStore> two = std::move(store_);
  const std::unique_ptr<BlockStore> one = Writer(Of("one"), 3);
  store_ = std::move(two);
  ASSERT_TRUE(Eventually([&] { return Foreign() == 12; })) << Status().DebugString();
  ASSERT_TRUE(one->Purge("alpha", kPatience).ok());
  EXPECT_TRUE(Eventually([&] { return Foreign() == 0; })) << Status().DebugString();
  auto worker = Worker(2);
  WarmUp(*worker);
  for (uint64_t s = 1; s <= 3; ++s) {
    EXPECT_EQ(Gets(*worker, ChainOf("alpha", s, 0, 4), s, absl::Seconds(1)), 0u);
  }
}

TEST_F(SharedFolderTest, ADamagedByteInAnotherNodesBlockIsAMissAndStays) {
  const std::unique_ptr<BlockStore> one = Writer(Of("one"), 1);
  size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(shared() + "/blocks")) {
    if (!entry.is_regular_file()) continue;
    ++files;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(20000);
    const char byte = static_cast<char>(file.get() ^ 4);
    file.seekp(20000);
    file.put(byte);
  }
  ASSERT_EQ(files, 4u);
  MustStart(Of("two"));
  auto worker = Worker(2);
  WarmUp(*worker);
  ASSERT_TRUE(Eventually([&] { return Foreign() == 4; })) << Status().DebugString();
  EXPECT_EQ(Gets(*worker, ChainOf("alpha", 1, 0, 4), 1, kPatience), 0u);
  EXPECT_TRUE(Eventually([&] { return Foreign() < 4; })) << Status().DebugString();
  EXPECT_GE(Status().tiers(1).corrupt_blocks(), 1u);
  for (const auto& entry : fs::recursive_directory_iterator(shared() + "/blocks")) {
    files -= entry.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, 0u) << "another node's file was removed";
}

TEST_F(SharedFolderTest, EncipheredBlocksAreServedWhereTheirKeyIsAndNowhereElse) {
  const auto keys = [&](const std::string& name) {
    const std::string folder = absl::StrCat(folder_, "/", name);
    fs::create_directory(folder);
    for (const char* tenant : {"alpha", "beta"}) {
      EXPECT_TRUE(WriteFileAtomically(absl::StrCat(folder, "/", tenant, ".key"),
                                      Token::Random().ToBytes(), 0600)
                      .ok());
    }
    return absl::StrCat(", keys: ", folder);
  };
  const std::string ours = keys("keys"), others = keys("other-keys");
  const std::unique_ptr<BlockStore> one = Writer(Of("one", ours), 2);
  const std::unique_ptr<BlockStore> four = Writer(Of("four", others), 1);
  MustStart(Of("three", others));
  {
    auto worker = Worker(3);
    WarmUp(*worker);
    ASSERT_TRUE(Eventually([&] { return Foreign() == 4; })) << Status().DebugString();
    EXPECT_TRUE(BringsBack(*worker, ChainOf("alpha", 1, 0, 4)));
    EXPECT_EQ(Gets(*worker, ChainOf("alpha", 2, 0, 4), 1, absl::Seconds(1)), 0u);
    EXPECT_EQ(Foreign(), 4u);
    worker->End();
  }
  store_.reset();
  MustStart(Of("two", ours));
  auto worker = Worker(2);
  WarmUp(*worker);
  ASSERT_TRUE(Eventually([&] { return Foreign() == 8; })) << Status().DebugString();
  EXPECT_TRUE(BringsBack(*worker, ChainOf("alpha", 1, 0, 4)));
  EXPECT_TRUE(ForgetsWhatIsGivenUpBy(*one)) << Status().DebugString();
}

TEST_F(BlockStoreTest, APrefetchBringsBlocksThatNobodyHasAskedFor) {
  MustStart(Cxl());
  auto worker = Worker();
  PutBelow(*worker, 1);
  const auto chain = ChainOf("alpha", 1, 0, 4);
  blocks::BlockHint hint;
  hint.action.kind = blocks::CacheAction::Kind::kPrefetch;
  hint.ids = chain;
  hint.action.until = Clock::Real().Now() + absl::Seconds(10);
  const auto hinted = store_->Hint(worker->caller(), hint);
  ASSERT_TRUE(hinted.ok()) << hinted.status();
  EXPECT_TRUE(Eventually([&] { return Row("dram").prefetched_blocks() == 4; }))
      << Status().DebugString();
  EXPECT_TRUE(Eventually([&] { return Row("cxl").promoted_blocks() == 4; }));
  EXPECT_EQ(Gets(*worker, chain, 1), 4u);
  EXPECT_EQ(Row("dram").prefetched_used_blocks(), 4u);
}

TEST_F(BlockStoreTest, APurgeForgetsATenantInEveryTierAlsoOverARestart) {
  MustStart(Nvme() + Directory());
  auto worker = Worker();
  PutBelow(*worker, 4);
  ASSERT_TRUE(Puts(*worker, ChainOf("alpha", 9, 0, 4)));
  auto other = Worker(2, kBeta);
  ASSERT_TRUE(Puts(*other, ChainOf("beta", 77, 0, 4)));
  const auto purged = store_->Purge("alpha", kPatience);
  ASSERT_TRUE(purged.ok()) << purged.status();
  EXPECT_GE(*purged, 20u);
  for (const uint64_t s : {1, 2, 3, 4, 9}) {
    EXPECT_EQ(Gets(*worker, ChainOf("alpha", s, 0, 4), s, absl::Seconds(5)), 0u);
  }
  EXPECT_EQ(Gets(*other, ChainOf("beta", 77, 0, 4), 1), 4u);
  EXPECT_EQ(store_->Purge("gamma", kPatience).status().code(), absl::StatusCode::kNotFound);
  worker->End();
  other->End();
  store_.reset();
  MustStart(Nvme() + Directory());
  auto next = Worker(3);
  WarmUp(*next);
  for (const uint64_t s : {1, 2, 3, 4, 9}) {
    EXPECT_EQ(Gets(*next, ChainOf("alpha", s, 0, 4), s, absl::Seconds(5)), 0u);
  }
}

TEST_F(BlockStoreTest, ALimitTakesChunksBackFromTheirSession) {
  MustStart("");
  auto worker = Worker();
  for (uint64_t s = 1; s <= 20; ++s) {
    ASSERT_TRUE(Puts(*worker, ChainOf("alpha", s, 0, 4)));
  }
  const uint64_t before = Status().tiers(0).used_bytes();
  ASSERT_GT(before, static_cast<uint64_t>(MiB(4).count()));
  const auto used = store_->SetLimit(blocks::kArenaTier, "alpha", MiB(3));
  ASSERT_TRUE(used.ok()) << used.status();
  EXPECT_EQ(used->limit, MiB(2));
  EXPECT_TRUE(Eventually([&] {
    return Status().tiers(0).used_bytes() == static_cast<uint64_t>(MiB(2).count());
  })) << Status().DebugString();
  EXPECT_GE(worker->unmaps(), 1u);
  EXPECT_THAT(store_->SetLimit(blocks::kArenaTier, "", MiB(64)).status().message(),
              HasSubstr("at most that"));
}

TEST_F(BlockStoreTest, EveryTierGivesTheBytesOfACheckBack) {
  MustStart(Cxl() + Nvme() + Directory());
  const auto checked = store_->CheckTiers(KiB(256), 4, kPatience);
  ASSERT_TRUE(checked.ok()) << checked.status();
  std::vector<std::string> names;
  for (const BlockStore::CheckedTier& tier : *checked) {
    names.push_back(tier.name);
    EXPECT_TRUE(tier.check.status.ok()) << tier.name << ": " << tier.check.status;
    EXPECT_EQ(tier.check.blocks, 4u);
    EXPECT_GT(tier.check.store_rate, 0);
    EXPECT_GT(tier.check.load_rate, 0);
  }
  EXPECT_THAT(names, ::testing::ElementsAre("dram", "cxl (emulated)", "nvme", "file-system"));
  EXPECT_EQ(store_->CheckTiers(MiB(2), 17, kPatience).status().code(),
            absl::StatusCode::kInvalidArgument);
  // Nothing of it is left.
  EXPECT_TRUE(Eventually([&] { return Status().tiers(2).used_bytes() == 0; }));
}

TEST_F(BlockStoreTest, BlocksThatDoNotFitAreRefusedAtTheStart) {
  BlockStore::Options options;
  options.tiers = Tiers("");
  options.tenants = {{"alpha", {MiB(16)}, MiB(3)}};
  EXPECT_THAT(BlockStore::Open(std::move(options), Clock::Real(), hand_overs_).status().message(),
              HasSubstr("tiers.dram.chunk_bytes"));
}

}  // namespace
}  // namespace palimpsest
