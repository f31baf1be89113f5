#include "broker/blocks/block_store.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "broker/blocks/testing/block_worker.h"
#include "broker/device/host_memory.h"
#include "common/file.h"
#include "common/process.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr Bytes kBlock = KiB(64);
constexpr absl::Duration kPatience = absl::Seconds(20);
constexpr TenantId kAlpha(0);
constexpr TenantId kBeta(1);

bool Eventually(const std::function<bool()>& holds) {
  const absl::Time deadline = MonotonicNow() + kPatience;
  while (!holds()) {
    if (MonotonicNow() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

class BlockStoreTest : public ::testing::Test {
 protected:
  BlockStoreTest() {
    std::string pattern = "/tmp/palimpsest_blocks_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    fs::create_directory(shared());
    auto self = ProcessHandle::Open(getpid());
    if (!self.ok()) abort();
    self_ = std::make_shared<const ProcessHandle>(*std::move(self));
  }
  ~BlockStoreTest() override {
    if (store_ != nullptr) {
      const absl::Status consistent = store_->CheckConsistency();
      EXPECT_TRUE(consistent.ok()) << consistent;
    }
    store_.reset();
    fs::remove_all(folder_);
  }

  std::string disk() const { return folder_ + "/disk"; }
  std::string shared() const { return folder_ + "/shared"; }

  // 16 MiB of T1 in chunks of 2 MiB, and these tiers below.
  TiersConfig Tiers(const std::string& lower) const {
    auto yaml = YamlConfig::Parse(
        absl::StrCat("dram: {bytes: 16 MiB, chunk_bytes: 2 MiB, unmap_deadline: 2s}\n",
                     "staging: 8 MiB\npolicy: lru\n", lower),
        "tiers.yaml");
    EXPECT_TRUE(yaml.ok()) << yaml.status();
    TiersConfig config = ReadTiers(yaml->root(), "node");
    const absl::Status finished = yaml->Finish();
    EXPECT_TRUE(finished.ok()) << finished;
    return config;
  }
  std::string Nvme() const { return absl::StrCat("nvme: {bytes: 64 MiB, path: ", disk(), "}\n"); }
  std::string Directory() const {
    return absl::StrCat("directory: {bytes: 64 MiB, path: ", shared(), "}\n");
  }
  static std::string Cxl() {
    return "cxl: {bytes: 32 MiB, emulated: {bytes_per_second: 8 GiB, latency: 1us}}\n";
  }

  absl::Status Start(const std::string& lower) {
    BlockStore::Options options;
    options.tiers = Tiers(lower);
    const SaidBudgets nothing(options.tiers.lower.size() + 1);
    const auto budgets = ShareBudgets(options.tiers, {nothing, nothing});
    if (!budgets.ok()) return budgets.status();
    options.tenants = {{"alpha", (*budgets)[0], kBlock}, {"beta", (*budgets)[1], kBlock}};
    options.memory_back_off = absl::Milliseconds(50);
    options.chunk_maker = [this](Bytes size) -> absl::StatusOr<UniqueFd> {
      if (no_memory_) return absl::ResourceExhaustedError("memfd: no memory");
      return NewHostMemory("test", size, HostPages::kSmall);
    };
    auto store = BlockStore::Open(std::move(options), Clock::Real(), hand_overs_);
    if (!store.ok()) return store.status();
    store_ = *std::move(store);
    return absl::OkStatus();
  }
  void MustStart(const std::string& lower) {
    const absl::Status started = Start(lower);
    ASSERT_TRUE(started.ok()) << started;
    AwaitServing();
  }
  void AwaitServing() {
    EXPECT_TRUE(Eventually([&] {
      const auto status = Status();
      for (const v1::TierMemory& tier : status.tiers()) {
        if (!tier.serving()) return false;
      }
      return true;
    })) << Status().DebugString();
  }
  std::unique_ptr<BlockWorker> Worker(uint64_t session = 1, TenantId tenant = kAlpha) {
    return std::make_unique<BlockWorker>(*store_, hand_overs_, SessionId(session), tenant,
                                         tenant == kAlpha ? "alpha" : "beta", self_, kBlock);
  }

  v1::GetStatusResponse Status() {
    v1::GetStatusResponse status;
    store_->FillStatus(status);
    return status;
  }
  v1::TenantTier Row(const std::string& tier, const std::string& tenant = "alpha") {
    const v1::GetStatusResponse status = Status();
    for (const v1::TierMemory& row : status.tiers()) {
      if (row.tier() != tier) continue;
      for (const v1::TenantTier& of : row.tenants()) {
        if (of.tenant() == tenant) return of;
      }
    }
    ADD_FAILURE() << "no row of " << tenant << " in " << tier;
    return {};
  }

  // T1 has a chunk: a promotion does not wait for one.
  static void WarmUp(BlockWorker& worker) {
    EXPECT_TRUE(Puts(worker, ChainOf("alpha", 1000, 0, 1)));
  }
  // Whether all of them come with their bytes, at the latest when there is a chunk for them.
  bool BringsBack(BlockWorker& worker, const std::vector<BlockIdentity>& chain) {
    return Eventually(
        [&] { return Gets(worker, chain, ++last_request_, kPatience) == chain.size(); });
  }
  // Whether all of them get there: the first time chunks are made.
  static bool Puts(BlockWorker& worker, const std::vector<BlockIdentity>& chain) {
    return Eventually([&] {
      const auto put = worker.Put(chain);
      EXPECT_TRUE(put.ok()) << put.status();
      return !put.ok() || *put == chain.size();
    });
  }
  static size_t Gets(BlockWorker& worker, const std::vector<BlockIdentity>& chain, uint64_t request,
                     absl::Duration wait = absl::ZeroDuration()) {
    const auto got = worker.Get(chain, request, wait);
    EXPECT_TRUE(got.ok()) << got.status();
    return got.value_or(0);
  }

  // Puts sequences 1 .. n of 4 blocks and moves all of them out of T1.
  void PutBelow(BlockWorker& worker, uint64_t sequences) {
    for (uint64_t s = 1; s <= sequences; ++s) {
      ASSERT_TRUE(Puts(worker, ChainOf("alpha", s, 0, 4)));
    }
    ASSERT_TRUE(Eventually([&] {
      EXPECT_TRUE(store_->Trim(blocks::kArenaTier, "alpha", Bytes(0)).ok());
      return Row("dram").blocks() == 0;
    })) << Status().DebugString();
    WarmUp(worker);
  }

  std::string folder_;
  uint64_t last_request_ = 1000;
  std::atomic<bool> no_memory_ = false;
  std::shared_ptr<const ProcessHandle> self_;
  HandOverTable hand_overs_{Clock::Real(), 64};
  std::unique_ptr<BlockStore> store_;
};

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
