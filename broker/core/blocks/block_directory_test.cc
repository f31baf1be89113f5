#include "broker/core/blocks/block_directory.h"

#include <memory>
#include <string>
#include <vector>

#include "broker/core/blocks/simulated_store.h"
#include "broker/core/cache/score_policies.h"
#include "gtest/gtest.h"

namespace palimpsest::blocks {
namespace {

constexpr TenantId kAnna(0), kBerta(1);
constexpr SessionId kOne(1), kTwo(2);
constexpr TierIndex kNvme(1);
constexpr Bytes kBlock = KiB(4);

// Block `i` of sequence `name`.
BlockIdentity Id(uint64_t name, uint64_t i, const std::string& tenant = "anna") {
  BlockIdentity id = {.key = {name, i}, .parent = {name, i - 1}};
  id.tokens = {static_cast<TokenId>(i)};
  id.tenant = tenant;
  return id;
}

std::vector<BlockIdentity> Path(uint64_t name, uint64_t blocks,
                                const std::string& tenant = "anna") {
  std::vector<BlockIdentity> path;
  for (uint64_t i = 1; i <= blocks; ++i) path.push_back(Id(name, i, tenant));
  return path;
}

DirectoryOptions Options() {
  DirectoryOptions options;
  // Chunks of 10 blocks.
  options.arena = {.max_chunks = 8, .chunk_bytes = kBlock * 10, .unit = kBlock};
  options.lower = {{.name = "nvme", .capacity = kBlock * 100, .unit = kBlock}};
  options.low_water = 0.2;
  return options;
}

TierState Serving() {
  return {.serving = true,
          .load = {.latency = absl::Milliseconds(1), .bytes_per_second = 1e9},
          .store = {.latency = absl::Microseconds(10), .bytes_per_second = 1e9}};
}

class BlockDirectoryTest : public testing::Test {
 protected:
  // Anna with two sessions and `chunks` of T1, ranked by last use.
  void Start(int64_t chunks, DirectoryOptions options = Options()) {
    store_ = std::make_unique<SimulatedStore>(options, absl::UnixEpoch() + absl::Hours(1));
    BlockTenant anna = {.id = kAnna, .name = "anna", .budgets = {kBlock * 10 * chunks}};
    anna.recompute = {.first = absl::Seconds(1)};
    anna.policy = [](TierIndex) { return std::make_unique<cache::LruPolicy>(); };
    BlockTenant berta = anna;
    berta.id = kBerta;
    berta.name = "berta";
    store_->names = {{kAnna, "anna"}, {kBerta, "berta"}};
    ASSERT_TRUE(directory().AddTenant(anna, now()).ok());
    ASSERT_TRUE(directory().AddTenant(berta, now()).ok());
    directory().OnTierState(kNvme, Serving(), now());
    for (const SessionId session : {kOne, kTwo}) {
      ASSERT_TRUE(directory().OpenSession(session, kAnna, now()).ok());
    }
    store_->PerformAll();
  }

  BlockDirectory& directory() { return store_->directory; }
  absl::Time now() { return store_->now; }

  // Reserves, writes and commits as much as there is room for. Block i of sequence n is n * 100 +
  // i.
  size_t Write(SessionId session, const std::vector<BlockIdentity>& path, uint64_t request = 0) {
    std::vector<ArenaLedger::Wanted> wanted;
    for (const BlockIdentity& id : path) wanted.push_back({id, kBlock});
    const auto reserved = directory().Reserve(session, request, wanted, now());
    EXPECT_TRUE(reserved.ok());
    std::vector<ArenaLedger::Committed> committed;
    for (size_t i = 0; i < reserved->size(); ++i) {
      if ((*reserved)[i].result != Reservation::kReserved) continue;
      const uint64_t bytes = path[i].key.high * 100 + path[i].key.low;
      store_->BytesAt((*reserved)[i].extent) = bytes;
      committed.push_back({path[i].key, bytes});
    }
    EXPECT_TRUE(directory().Commit(session, committed, now()).ok());
    store_->Collect();
    return committed.size();
  }

  AcquireReply Acquire(SessionId session, uint64_t request, const std::vector<BlockIdentity>& path,
                       absl::Duration wait = absl::ZeroDuration()) {
    AcquireRequest wanted = {.request = request, .ids = path};
    if (wait > absl::ZeroDuration()) wanted.deadline = now() + wait;
    const auto reply = directory().Acquire(session, wanted, now());
    EXPECT_TRUE(reply.ok()) << reply.status();
    store_->Collect();
    return *reply;
  }

  void End(SessionId session, uint64_t request) {
    EXPECT_TRUE(directory().EndRequest(session, {.request = request}, now()).ok());
    store_->Collect();
  }

  template <typename Action>
  size_t Pending() const {
    size_t count = 0;
    for (const BlockAction& action : store_->pending)
      count += std::holds_alternative<Action>(action);
    return count;
  }

  // `path` lies in NVMe and not in T1.
  void PutBelow(const std::vector<BlockIdentity>& path) {
    for (const BlockIdentity& id : path) {
      const uint64_t bytes = id.key.high * 100 + id.key.low;
      const BlockRecord record = {.id = id, .length = kBlock, .checksum = bytes};
      store_->tiers[kNvme.value()][id.key] = {record, bytes};
    }
    std::vector<BlockRecord> records;
    // In no particular order.
    for (size_t i = path.size(); i > 0; --i) {
      records.push_back(store_->tiers[kNvme.value()].at(path[i - 1].key).record);
    }
    std::swap(records.front(), records[records.size() / 2]);
    directory().OnRecovered(kNvme, records, now());
    store_->Collect();
  }

  TierCounters Counters(TierIndex tier, TenantId tenant = kAnna) {
    EXPECT_EQ(directory().CheckConsistency(), absl::OkStatus());
    return directory().CountersOf(tenant, tier);
  }
  static uint64_t Refused(const TierCounters& counters, Refusal why) {
    return counters.refusals[static_cast<size_t>(why)];
  }

  std::unique_ptr<SimulatedStore> store_;
};

TEST_F(BlockDirectoryTest, CommittedBlocksAreServedAsThePrefixThatIsReady) {
  Start(1);
  ASSERT_EQ(Write(kOne, Path(1, 3)), 3);
  const AcquireReply reply = Acquire(kTwo, 1, Path(1, 5));
  ASSERT_EQ(reply.blocks.size(), 3);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(reply.blocks[i].checksum, 101 + i);
    EXPECT_EQ(store_->BytesAt(reply.blocks[i].extent), 101 + i);
  }
  EXPECT_TRUE(reply.elsewhere.empty());
  EXPECT_EQ(Counters(kArenaTier).hits, 3);
}

TEST_F(BlockDirectoryTest, KeyOfAnotherBlockIsAMiss) {
  Start(1);
  Write(kOne, Path(1, 2));
  std::vector<BlockIdentity> other = Path(1, 2);
  other[1].tokens = {99};
  EXPECT_EQ(Acquire(kTwo, 1, other).blocks.size(), 1);
  const auto reserved = directory().Reserve(kTwo, 1, {{other[1], kBlock}}, now());
  ASSERT_TRUE(reserved.ok());
  EXPECT_EQ(reserved->front().result, Reservation::kCollision);
  EXPECT_EQ(Refused(Counters(kArenaTier), Refusal::kCollision), 1);
}

TEST_F(BlockDirectoryTest, HeldBlocksAreUsedButNotPinned) {
  Start(1);
  Write(kOne, Path(1, 3));
  AcquireRequest request = {.request = 1};
  const auto path = Path(1, 3);
  request.ids = path;
  request.held = 2;
  const auto reply = directory().Acquire(kOne, request, now());
  ASSERT_TRUE(reply.ok());
  ASSERT_EQ(reply->blocks.size(), 1);
  EXPECT_EQ(reply->blocks[0].checksum, 103);
}

TEST_F(BlockDirectoryTest, SessionThatEndsDropsWhatItWroteAndItsPins) {
  Start(1);
  Write(kOne, Path(1, 2));
  Acquire(kTwo, 1, Path(1, 2));
  ASSERT_TRUE(directory().Reserve(kTwo, 0, {{Id(2, 1), kBlock}}, now()).ok());
  EXPECT_EQ(Counters(kArenaTier).used, kBlock * 3);
  ASSERT_TRUE(directory().CloseSession(kTwo, now()).ok());
  EXPECT_EQ(Counters(kArenaTier).used, kBlock * 2);
  EXPECT_EQ(directory().CloseSession(kTwo, now()).code(), absl::StatusCode::kNotFound);
  // Nothing is pinned any more: all of it may go for others.
  EXPECT_EQ(Write(kOne, Path(3, 10)), 8) << "before anything was demoted";
}

TEST_F(BlockDirectoryTest, EndOfARequestTakesItsPinsBack) {
  Start(1);
  Write(kOne, Path(1, 1));
  const AcquireReply reply = Acquire(kOne, 1, Path(1, 1));
  EXPECT_EQ(directory().Release(kOne, 2, {reply.blocks[0].extent}, now()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(
      directory().Release(kOne, 1, {reply.blocks[0].extent, reply.blocks[0].extent}, now()).code(),
      absl::StatusCode::kFailedPrecondition);
  End(kOne, 1);
  EXPECT_EQ(directory().Release(kOne, 1, {reply.blocks[0].extent}, now()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(directory().EndRequest(kOne, {.request = 1}, now()).ok()) << "not known: no effect";
  EXPECT_EQ(directory().CheckConsistency(), absl::OkStatus());
}

TEST_F(BlockDirectoryTest, OldestBlocksAreDemotedAheadOfNeedAndStayUntilTheirRoomIsNeeded) {
  Start(1);
  ASSERT_EQ(Write(kOne, Path(1, 9)), 9);
  // A fifth is to be free: one block more, the last of the sequence.
  ASSERT_EQ(Pending<StoreBlock>(), 1);
  store_->PerformAll();
  EXPECT_EQ(store_->tiers[kNvme.value()].size(), 1);
  EXPECT_TRUE(store_->tiers[kNvme.value()].contains(Id(1, 9).key));
  EXPECT_EQ(Acquire(kOne, 1, Path(1, 9)).blocks.size(), 9) << "it is still there";
  End(kOne, 1);
  ASSERT_EQ(Write(kOne, Path(2, 2)), 2);
  EXPECT_EQ(Acquire(kOne, 2, Path(1, 9)).blocks.size(), 8) << "its room was needed";
  store_->PerformAll();
  const TierCounters counters = Counters(kNvme);
  EXPECT_EQ(counters.demotions_done, counters.blocks);
  EXPECT_EQ(counters.demotions_failed, 0);
}

TEST_F(BlockDirectoryTest, BlockWithACopyBelowIsNotStoredAgain) {
  Start(1);
  PutBelow(Path(1, 1));
  ASSERT_TRUE(Acquire(kOne, 1, Path(1, 1), absl::Seconds(1)).wait.has_value());
  store_->PerformAll();
  End(kOne, 1);
  ASSERT_EQ(Write(kOne, Path(2, 8)), 8);
  EXPECT_EQ(Pending<StoreBlock>(), 0) << "the oldest one is below already";
  EXPECT_EQ(Write(kOne, Path(3, 2)), 2);
  EXPECT_EQ(Acquire(kOne, 2, Path(1, 1)).blocks.size(), 0);
}

TEST_F(BlockDirectoryTest, AllWhoWaitForABlockAreAnsweredByOneLoad) {
  Start(1);
  PutBelow(Path(1, 3));
  const AcquireReply asked = Acquire(kOne, 1, Path(1, 4));
  ASSERT_EQ(asked.elsewhere.size(), 1);
  EXPECT_EQ(asked.elsewhere[0].tier, kNvme);
  EXPECT_EQ(asked.elsewhere[0].blocks, 3);
  EXPECT_GT(asked.elsewhere[0].expected, absl::Milliseconds(1));
  EXPECT_LT(asked.elsewhere[0].expected, absl::Milliseconds(2));
  const auto one = Acquire(kOne, 1, Path(1, 4), absl::Seconds(1)).wait;
  const auto two = Acquire(kTwo, 1, Path(1, 2), absl::Seconds(1)).wait;
  ASSERT_TRUE(one.has_value() && two.has_value());
  EXPECT_EQ(Pending<LoadBlock>(), 3);
  store_->PerformAll();
  ASSERT_EQ(store_->answers.size(), 2);
  EXPECT_EQ(store_->answers[*one].blocks.size(), 3);
  EXPECT_EQ(store_->answers[*two].blocks.size(), 2);
  EXPECT_EQ(store_->answers[*two].blocks[1].checksum, 102);
  const TierCounters counters = Counters(kNvme);
  EXPECT_EQ(counters.promotions_done, 3);
  EXPECT_EQ(counters.hits, 3) << "of whoever was first";
  EXPECT_EQ(counters.promotions_wasted, 0);
}

TEST_F(BlockDirectoryTest, DeadlineAnswersWithWhatIsThereAndWhatComesLaterStays) {
  Start(1);
  PutBelow(Path(1, 2));
  const auto wait = Acquire(kOne, 1, Path(1, 2), absl::Seconds(1)).wait;
  ASSERT_TRUE(wait.has_value());
  store_->Perform(0);
  EXPECT_TRUE(store_->answers.empty());
  store_->now += absl::Seconds(1);
  directory().Tick(now());
  store_->Collect();
  ASSERT_EQ(store_->answers.size(), 1);
  EXPECT_EQ(store_->answers[*wait].blocks.size(), 1);
  store_->PerformAll();
  EXPECT_EQ(Acquire(kOne, 2, Path(1, 2)).blocks.size(), 2);
}

TEST_F(BlockDirectoryTest, FailedOrWrongLoadIsAMiss) {
  for (const Fault fault : {Fault::kFailed, Fault::kLate, Fault::kMismatch}) {
    Start(1);
    PutBelow(Path(1, 2));
    const auto wait = Acquire(kOne, 1, Path(1, 2), absl::Seconds(1)).wait;
    ASSERT_TRUE(wait.has_value());
    store_->Perform(0, fault);
    ASSERT_EQ(store_->answers.size(), 1) << "nothing is waited for behind it";
    EXPECT_TRUE(store_->answers[*wait].blocks.empty());
    store_->PerformAll();
    EXPECT_EQ(Acquire(kOne, 2, Path(1, 2)).blocks.size(), 0);
    EXPECT_EQ(Counters(kNvme).promotions_failed, 1);
  }
}

TEST_F(BlockDirectoryTest, NothingIsPromotedThatWouldBeLate) {
  Start(1);
  TierState slow = Serving();
  slow.load.latency = absl::Seconds(2);
  directory().OnTierState(kNvme, slow, now());
  PutBelow(Path(1, 1));
  const AcquireReply reply = Acquire(kOne, 1, Path(1, 1), absl::Seconds(1));
  EXPECT_FALSE(reply.wait.has_value());
  EXPECT_EQ(Pending<LoadBlock>(), 0);
  EXPECT_EQ(Refused(Counters(kNvme), Refusal::kLate), 1);
}

TEST_F(BlockDirectoryTest, TierThatDoesNotServeIsLeftAlone) {
  Start(1);
  PutBelow(Path(1, 1));
  directory().OnTierState(kNvme, {}, now());
  const AcquireReply reply = Acquire(kOne, 1, Path(1, 1), absl::Seconds(1));
  EXPECT_FALSE(reply.wait.has_value());
  ASSERT_EQ(reply.elsewhere.size(), 1);
  EXPECT_EQ(reply.elsewhere[0].expected, absl::InfiniteDuration());
  EXPECT_EQ(Write(kOne, Path(2, 10)), 10);
  EXPECT_EQ(Write(kOne, Path(3, 5)), 5) << "the oldest ones are dropped";
  EXPECT_EQ(Pending<StoreBlock>() + Pending<LoadBlock>(), 0);
  EXPECT_GT(Refused(Counters(kNvme), Refusal::kBroken), 0);
}

TEST_F(BlockDirectoryTest, BlockThatIsComputedSoonerThanItIsLoadedGoesNowhere) {
  Start(1);
  ASSERT_TRUE(directory().SetRecompute(kAnna, {.first = absl::Microseconds(100)}).ok());
  ASSERT_EQ(Write(kOne, Path(1, 10)), 10);
  ASSERT_EQ(Write(kOne, Path(2, 5)), 5);
  EXPECT_EQ(Pending<StoreBlock>(), 0);
  EXPECT_GT(Refused(Counters(kNvme), Refusal::kWorthless), 0);
}

TEST_F(BlockDirectoryTest, RecomputingCostsMoreTheLaterABlockComes) {
  Start(1);
  ASSERT_TRUE(directory()
                  .SetRecompute(kAnna, {.first = absl::Microseconds(100),
                                        .per_position = absl::Milliseconds(1)})
                  .ok());
  ASSERT_EQ(Write(kOne, Path(1, 9)), 9);
  ASSERT_EQ(Pending<StoreBlock>(), 1);
  EXPECT_EQ(std::get<StoreBlock>(store_->pending[0]).record.id, Id(1, 9));
}

TEST_F(BlockDirectoryTest, SourceWithWrongBytesIsNotServedAgain) {
  Start(1);
  Write(kOne, Path(1, 9));
  ASSERT_EQ(Pending<StoreBlock>(), 1);
  store_->Perform(0, Fault::kMismatch);
  EXPECT_EQ(Acquire(kOne, 1, Path(1, 9)).blocks.size(), 8);
  EXPECT_EQ(Counters(kNvme).demotions_failed, 1);
}

TEST_F(BlockDirectoryTest, PromotedBlockThatGoesUnusedIsWaste) {
  Start(1);
  PutBelow(Path(1, 1));
  AcquireRequest request = {.request = 1, .promote = true};
  const auto path = Path(1, 1);
  request.ids = path;
  ASSERT_TRUE(directory().Acquire(kOne, request, now()).ok());
  store_->PerformAll();
  EXPECT_EQ(Counters(kNvme).promotions_done, 1);
  for (uint64_t name = 2; name < 6; ++name) {
    Write(kOne, Path(name, 5));
    store_->PerformAll();
  }
  EXPECT_EQ(Counters(kNvme).promotions_wasted, 1);
  EXPECT_EQ(Counters(kNvme).wasted_bytes, kBlock);
}

TEST_F(BlockDirectoryTest, TierBelowKeepsToItsBudgetByWorth) {
  Start(1);
  ASSERT_TRUE(directory().SetBudget(kAnna, kNvme, kBlock * 10, now()).ok());
  for (uint64_t name = 1; name < 20; ++name) {
    Write(kOne, Path(name, 5));
    store_->PerformAll();
    ASSERT_LE(Counters(kNvme).used, kBlock * 10);
  }
  EXPECT_GT(Counters(kNvme).removed, 5);
  EXPECT_GT(Counters(kNvme).price, 0);
  EXPECT_LE(store_->tiers[kNvme.value()].size(), 10);
  const auto trimmed = directory().Trim(kAnna, kNvme, kBlock * 2, now());
  ASSERT_TRUE(trimmed.ok());
  EXPECT_GT(trimmed->blocks, 0);
  store_->PerformAll();
  EXPECT_LE(Counters(kNvme).used, kBlock * 2);
}

TEST_F(BlockDirectoryTest, TenantsUseTheirOwnBudgets) {
  Start(1);
  ASSERT_TRUE(directory().OpenSession(SessionId(3), kBerta, now()).ok());
  store_->PerformAll();
  ASSERT_EQ(Write(SessionId(3), Path(1, 5, "berta")), 5);
  for (uint64_t name = 1; name < 10; ++name) {
    Write(kOne, Path(name, 10));
    store_->PerformAll();
  }
  EXPECT_EQ(Counters(kArenaTier, kBerta).blocks, 5);
  EXPECT_EQ(Acquire(kOne, 1, Path(1, 5)).blocks.size(), 0) << "Berta's are hers";
  EXPECT_EQ(directory().Reserve(kOne, 0, {{Id(1, 1, "berta"), kBlock}}, now()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(BlockDirectoryTest, ChunkIsGivenBackWhenItsBlocksLeftAndSessionsUnmappedIt) {
  Start(2);
  ASSERT_EQ(Write(kOne, Path(1, 6)), 6);
  store_->PerformAll();
  ASSERT_EQ(Write(kOne, Path(2, 6)), 6);
  const AcquireReply reply = Acquire(kOne, 1, Path(1, 6));
  std::vector<ArenaChunkId> chunks;
  for (uint32_t i = 0; i < 8; ++i) {
    if (directory().arena().state(ArenaChunkId(i)) == ArenaChunkState::kGranted) {
      chunks.emplace_back(i);
    }
  }
  ASSERT_EQ(chunks.size(), 2);
  ASSERT_TRUE(directory().Map(kOne, chunks).ok());
  ASSERT_TRUE(directory().SetBudget(kAnna, kArenaTier, Bytes(0), now()).ok());
  store_->PerformAll();
  EXPECT_EQ(directory().Map(kTwo, chunks).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Counters(kArenaTier).blocks, 6) << "pinned ones wait";
  EXPECT_EQ(directory().arena().Count(ArenaChunkState::kFree), 7);
  End(kOne, 1);
  store_->PerformAll();
  EXPECT_EQ(directory().arena().Count(ArenaChunkState::kFree), 8);
  EXPECT_EQ(store_->tiers[kNvme.value()].size(), 12) << "what has left went below";
  EXPECT_TRUE(store_->overdue_sessions.empty());
}

TEST_F(BlockDirectoryTest, SessionThatKeepsARevokedChunkIsOverdue) {
  Start(1);
  Write(kOne, Path(1, 1));
  ASSERT_TRUE(directory().Map(kOne, {ArenaChunkId(0)}).ok());
  store_->stubborn = {kOne};
  ASSERT_TRUE(directory().SetBudget(kAnna, kArenaTier, Bytes(0), now()).ok());
  store_->PerformAll();
  EXPECT_EQ(directory().UnmapsOf(kOne), std::vector<ArenaChunkId>{ArenaChunkId(0)});
  EXPECT_TRUE(directory().UnmapsOf(kTwo).empty());
  while (store_->now < absl::UnixEpoch() + absl::Hours(1) + Options().unmap_deadline) {
    const absl::Time next = directory().Tick(now());
    ASSERT_LT(next, absl::InfiniteFuture());
    store_->now = next;
  }
  directory().Tick(now());
  directory().Tick(now());
  store_->Collect();
  EXPECT_EQ(store_->overdue_sessions, std::vector<SessionId>{kOne});
  ASSERT_TRUE(directory().CloseSession(kOne, now()).ok());
  store_->PerformAll();
  EXPECT_EQ(directory().arena().Count(ArenaChunkState::kFree), 8);
}

TEST_F(BlockDirectoryTest, NoMemoryForAChunkIsTriedAgainLater) {
  Start(2);
  ASSERT_EQ(Write(kOne, Path(1, 6)), 6);
  ASSERT_EQ(Pending<MakeChunk>(), 1);
  store_->Perform(0, Fault::kFailed);
  EXPECT_EQ(Refused(Counters(kArenaTier), Refusal::kNoMemory), 1);
  EXPECT_EQ(Write(kOne, Path(2, 4)), 4);
  EXPECT_EQ(Pending<MakeChunk>(), 0);
  store_->now += Options().memory_back_off;
  EXPECT_EQ(Write(kOne, Path(3, 1)), 0);
  ASSERT_EQ(Pending<MakeChunk>(), 1);
  store_->PerformAll();
  EXPECT_EQ(Write(kOne, Path(3, 1)), 1);
}

TEST_F(BlockDirectoryTest, NothingIsServedAfterAPurgeWhateverWasOnItsWay) {
  Start(1);
  PutBelow(Path(1, 2));
  Write(kOne, Path(2, 8));
  const auto written = directory().Reserve(kTwo, 0, {{Id(3, 1), kBlock}}, now());
  ASSERT_TRUE(written.ok());
  store_->Collect();
  ASSERT_EQ(Pending<StoreBlock>(), 1);
  const auto wait = Acquire(kOne, 1, Path(1, 2), absl::Seconds(1)).wait;
  ASSERT_TRUE(wait.has_value());
  ASSERT_EQ(Pending<LoadBlock>(), 1);
  const auto forgotten = directory().Purge(kAnna, now());
  ASSERT_TRUE(forgotten.ok());
  EXPECT_EQ(*forgotten, 10);
  store_->Collect();
  EXPECT_TRUE(store_->answers.at(*wait).blocks.empty());
  ASSERT_TRUE(directory().Commit(kTwo, {{Id(3, 1).key, 301}}, now()).ok());
  EXPECT_TRUE(directory().Purging(kAnna));
  store_->PerformAll();
  EXPECT_FALSE(directory().Purging(kAnna));
  EXPECT_TRUE(store_->tiers[kNvme.value()].empty());
  for (uint64_t name = 1; name <= 3; ++name) {
    const AcquireReply reply = Acquire(kOne, 10 + name, Path(name, 2), absl::Seconds(1));
    EXPECT_TRUE(reply.blocks.empty() && reply.elsewhere.empty() && !reply.wait.has_value());
  }
  EXPECT_EQ(Write(kOne, Path(2, 1)), 1) << "what is stored anew is served again";
  EXPECT_EQ(Acquire(kOne, 20, Path(2, 1)).blocks.size(), 1);
}

TEST_F(BlockDirectoryTest, PurgeThatFailsIsTriedAgain) {
  Start(1);
  PutBelow(Path(1, 2));
  ASSERT_TRUE(directory().Purge(kAnna, now()).ok());
  store_->Collect();
  ASSERT_EQ(Pending<PurgeTier>(), 1);
  store_->Perform(0, Fault::kFailed);
  EXPECT_TRUE(directory().Purging(kAnna));
  EXPECT_EQ(Pending<PurgeTier>(), 0);
  const absl::Time next = directory().Tick(now());
  ASSERT_LT(next, absl::InfiniteFuture());
  store_->now = next;
  directory().Tick(now());
  store_->PerformAll();
  EXPECT_FALSE(directory().Purging(kAnna));
  EXPECT_TRUE(store_->tiers[kNvme.value()].empty());
}

TEST_F(BlockDirectoryTest, BlocksOfAConversationComeBackBeforeItIsExpectedToGoOn) {
  Start(1);
  PutBelow(Path(1, 3));
  const auto path = Path(1, 3);
  AcquireRequest request = {.request = 1, .conversation = cache::ConversationId(5)};
  request.ids = path;
  ASSERT_TRUE(directory().Acquire(kOne, request, now()).ok());
  ASSERT_TRUE(
      directory().EndRequest(kOne, {.request = 1, .expected_idle = absl::Seconds(16)}, now()).ok());
  store_->now += absl::Seconds(13);
  const absl::Time next = directory().Tick(now());
  store_->Collect();
  EXPECT_EQ(Pending<LoadBlock>(), 0) << "too early";
  EXPECT_EQ(next, now() + absl::Seconds(1));
  store_->now = next;
  directory().Tick(now());
  store_->PerformAll();
  EXPECT_EQ(directory().PrefetchesOf(kAnna).fetched, 3);
  request.request = 2;
  const auto reply = directory().Acquire(kOne, request, now());
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(reply->blocks.size(), 3);
  EXPECT_EQ(directory().PrefetchesOf(kAnna).used, 3);
  EXPECT_EQ(directory().PrefetchesOf(kAnna).wasted, 0);
}

TEST_F(BlockDirectoryTest, ReturnsOfToolCallsAreLearnedAndPreparedForWithinTheBudget) {
  DirectoryOptions options = Options();
  options.prefetch_share = 0.5;
  Start(1, options);
  uint64_t number = 0;
  const auto turn = [&](uint64_t conversation, const std::vector<BlockIdentity>& path) {
    AcquireRequest request = {.request = ++number,
                              .conversation = cache::ConversationId(conversation)};
    request.ids = path;
    ASSERT_TRUE(directory().Acquire(kOne, request, now()).ok());
    ASSERT_TRUE(directory()
                    .EndRequest(kOne, {.request = number, .how = cache::Ending::kToolCall}, now())
                    .ok());
    store_->PerformAll();
  };
  for (int i = 0; i < 20; ++i) {
    turn(7, {});
    store_->now += absl::Seconds(8);
  }
  PutBelow(Path(1, 2));
  // A quarter of it is Anna's: one block takes 1.016 s, and what is expected in about 6.4 s may
  // begin a second before.
  TierState slow = Serving();
  slow.load = {.latency = absl::Seconds(0.5), .bytes_per_second = 4096 * 4};
  directory().OnTierState(kNvme, slow, now());
  turn(100, Path(1, 2));
  const absl::Time end = now();
  store_->now = directory().Tick(now());
  EXPECT_GT(now(), end + absl::Seconds(3));
  EXPECT_LT(now(), end + absl::Seconds(8));
  directory().Tick(now());
  store_->Collect();
  EXPECT_EQ(Pending<LoadBlock>(), 0) << "it would be late";
  EXPECT_GT(directory().PrefetchesOf(kAnna).unaffordable, 0);
  directory().OnTierState(kNvme, Serving(), now());
  turn(101, Path(1, 2));
  store_->now = directory().Tick(now());
  directory().Tick(now());
  store_->Collect();
  EXPECT_EQ(Pending<LoadBlock>(), 2);
}

TEST_F(BlockDirectoryTest, EventsFollowEachOtherAndGapsAreSeen) {
  DirectoryOptions options = Options();
  options.events = 4;
  Start(1, options);
  Write(kOne, Path(1, 2));
  const auto events = directory().events().After(0, 10);
  ASSERT_TRUE(events.has_value());
  ASSERT_EQ(events->size(), 2);
  EXPECT_EQ((*events)[1], (BlockEvent{2, BlockEvent::Kind::kStored, kAnna, kArenaTier, {1, 2}}));
  EXPECT_EQ(directory().events().After(0, 1)->size(), 1);
  EXPECT_FALSE(directory().events().After(3, 10).has_value()) << "not yet";
  Write(kOne, Path(2, 3));
  EXPECT_FALSE(directory().events().After(0, 10).has_value()) << "gone";
  EXPECT_EQ(directory().events().After(1, 10)->size(), 4);
  EXPECT_EQ(directory().Snapshot().size(), 5);
  EXPECT_EQ(directory().Snapshot()[0].sequence, 5);
}

TEST_F(BlockDirectoryTest, HostileCallsAreRefusedAndChangeNothing) {
  Start(1);
  const auto acquire = [&](AcquireRequest request, const std::vector<BlockIdentity>& ids) {
    request.ids = ids;
    return directory().Acquire(kOne, request, now()).status().code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  std::vector<BlockIdentity> twice = {Id(1, 1), Id(1, 2), Id(1, 1)};
  twice[2].parent = twice[1].key;
  EXPECT_EQ(acquire({.request = 1}, twice), kInvalid);
  EXPECT_EQ(acquire({.request = 1}, {Id(1, 1), Id(1, 3)}), kInvalid) << "no chain";
  EXPECT_EQ(acquire({.request = 0}, Path(1, 1)), kInvalid);
  EXPECT_EQ(acquire({.request = 1, .held = 2}, Path(1, 1)), kInvalid);
  EXPECT_EQ(acquire({.request = 1, .deadline = now() + absl::Hours(1)}, Path(1, 1)), kInvalid);
  EXPECT_EQ(acquire({.request = 1}, Path(1, BlockDirectory::kMaxBlocks + 1)), kInvalid);
  const auto reserve = [&](const BlockIdentity& id, Bytes length) {
    return directory().Reserve(kOne, 0, {{id, length}}, now()).status().code();
  };
  EXPECT_EQ(reserve(Id(1, 1), Bytes(0)), kInvalid);
  EXPECT_EQ(reserve(Id(1, 1), kBlock * 10 + Bytes(1)), kInvalid);
  BlockIdentity empty = Id(1, 1);
  empty.tokens.clear();
  EXPECT_EQ(reserve(empty, kBlock), kInvalid);
  EXPECT_EQ(directory().Commit(kOne, {{Id(1, 1).key, 0}}, now()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(directory().OnUnmapped(kOne, {ArenaChunkId(7)}, now()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(directory().OpenSession(SessionId(UINT64_MAX), kAnna, now()).code(), kInvalid);
  EXPECT_EQ(directory().CheckConsistency(), absl::OkStatus());
  EXPECT_EQ(Counters(kArenaTier).used, Bytes(0));
}

TEST_F(BlockDirectoryTest, RunningRequestsAndWaitsAreBounded) {
  DirectoryOptions options = Options();
  options.max_requests = 2;
  options.max_waits = 1;
  Start(1, options);
  PutBelow(Path(1, 1));
  ASSERT_TRUE(Acquire(kOne, 1, Path(1, 1), absl::Seconds(1)).wait.has_value());
  const auto path = Path(1, 1);
  AcquireRequest second = {.request = 2, .deadline = now() + absl::Seconds(1)};
  second.ids = path;
  EXPECT_EQ(directory().Acquire(kOne, second, now()).status().code(),
            absl::StatusCode::kResourceExhausted);
  Acquire(kOne, 2, path);
  AcquireRequest third = {.request = 3};
  third.ids = path;
  EXPECT_EQ(directory().Acquire(kOne, third, now()).status().code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace palimpsest::blocks
