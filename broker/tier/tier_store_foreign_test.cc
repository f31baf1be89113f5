// Blocks that other nodes keep in a shared tier, as its store knows them.
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/foreign_catalog.h"
#include "broker/tier/tier_store_fixture.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(ForeignCatalog, ForgetsWhatWasFoundOrUsedLongestAgo) {
  ForeignCatalog catalog(3);
  const auto add = [&](uint64_t number, uint64_t checksum = 1) {
    StoredBlock block;
    block.record = {.id = Identity(number), .length = Bytes(1), .checksum = checksum};
    block.record.expiry = absl::UnixEpoch() + absl::Seconds(number);
    const ForeignCatalog::Added added = catalog.Add(std::move(block));
    EXPECT_EQ(catalog.CheckConsistency(), absl::OkStatus());
    std::vector<uint64_t> forgotten;
    for (const BlockRecord& record : added.forgotten) forgotten.push_back(record.id.key.high);
    return std::pair(added.added, forgotten);
  };
  using Numbers = std::vector<uint64_t>;
  EXPECT_EQ(add(1), std::pair(true, Numbers()));
  EXPECT_EQ(add(2), std::pair(true, Numbers()));
  EXPECT_EQ(add(3), std::pair(true, Numbers()));
  catalog.Touch(Identity(1).key);
  EXPECT_EQ(add(2), std::pair(false, Numbers())) << "it was known";
  EXPECT_EQ(add(4), std::pair(true, Numbers{2}));
  EXPECT_EQ(add(3, /*checksum=*/2), std::pair(true, Numbers{3})) << "replaced";
  EXPECT_EQ(catalog.Expired(absl::UnixEpoch() + absl::Seconds(3), 9),
            (std::vector<BlockKey>{Identity(1).key, Identity(3).key}));
  EXPECT_EQ(catalog.next_expiry(), absl::UnixEpoch() + absl::Seconds(1));
  EXPECT_TRUE(catalog.Forget(Identity(1).key).has_value());
  EXPECT_FALSE(catalog.Forget(Identity(1).key).has_value());
  EXPECT_EQ(catalog.size(), 2);
  EXPECT_EQ(ForeignCatalog(0).Add({}).added, false);
}

class ForeignBlocksTest : public TierStoreTest {
 protected:
  static constexpr absl::Duration kPeriod = absl::Seconds(30);

  ForeignBlocksTest() {
    medium_.shared = true;
    options_.foreign_blocks = 4;
    options_.foreign_period = kPeriod;
    options_.breaker.slow = absl::Hours(1);
  }

  // Another node stores the block.
  StoredBlock Leave(const BlockIdentity& id, absl::Time expiry = absl::InfiniteFuture()) {
    const std::vector<std::byte> bytes = Content(id.key.high);
    const BlockRecord record = {
        .id = id, .length = Bytes(256), .checksum = BlockChecksum(id.key, bytes), .expiry = expiry};
    const uint64_t place = FakeTierBackend::kForeign + id.key.high;
    medium_.of_other_nodes[place] = {record, bytes};
    return {record, TierPlace(place)};
  }
  // Nobody is answered after the test.
  void EndAll() {
    medium_.hold = false;
    medium_.FinishAll();
    Settle();
  }
  // The next look tells of these.
  void Tell(std::vector<StoredBlock> found, std::vector<Discovery::Gone> gone = {}) {
    medium_.looks.push_back({std::move(found), std::move(gone), true});
  }
  void LookAgain() {
    clock_.Advance(kPeriod);
    Settle();
  }
  void Find(const BlockIdentity& id) {
    Tell({Leave(id)});
    LookAgain();
    ASSERT_EQ(watcher_.foreign.back(), id.key);
  }
};

TEST_F(ForeignBlocksTest, AreReportedLoadedAndNotAccountedFor) {
  OpenStore();
  Tell({Leave(Identity(1)), Leave(Identity(2))});
  LookAgain();
  EXPECT_EQ(watcher_.foreign, (std::vector<BlockKey>{Identity(1).key, Identity(2).key}));
  EXPECT_TRUE(watcher_.stored.empty());
  EXPECT_EQ(store_->status().foreign, 2);
  EXPECT_EQ(store_->status().blocks, 0);
  EXPECT_EQ(store_->status().used, Bytes(0));
  EXPECT_TRUE(store_->Records().empty());
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
  // Told once more, it is what it was.
  Tell({Leave(Identity(1))});
  LookAgain();
  EXPECT_EQ(watcher_.foreign.size(), 2);
  EXPECT_TRUE(watcher_.removed.empty());
}

TEST_F(ForeignBlocksTest, ThatAreGoneAreMissesAndForgotten) {
  OpenStore();
  Find(Identity(1));
  Find(Identity(2));
  medium_.of_other_nodes.erase(FakeTierBackend::kForeign + 1);
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kNotFound);
  EXPECT_EQ(watcher_.removed, std::vector<BlockKey>{Identity(1).key});
  // A look tells of the other one; what it tells of other tenants and unknown blocks is nothing.
  Tell({}, {{"berta", Identity(2).key}, {"anna", Identity(7).key}});
  LookAgain();
  EXPECT_EQ(store_->status().foreign, 1);
  Tell({}, {{"anna", Identity(2).key}});
  LookAgain();
  EXPECT_EQ(watcher_.removed.size(), 2);
  EXPECT_EQ(store_->status().foreign, 0);
}

TEST_F(ForeignBlocksTest, ThatAreDamagedAreNeitherServedNorRemoved) {
  OpenStore();
  Find(Identity(1));
  medium_.of_other_nodes.begin()->second.second[3] ^= std::byte{1};
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kDataLoss);
  EXPECT_EQ(watcher_.removed, std::vector<BlockKey>{Identity(1).key});
  EXPECT_EQ(store_->status().foreign, 0);
  EXPECT_EQ(medium_.of_other_nodes.size(), 1);
  EXPECT_EQ(store_->status().quarantined, Bytes(0));
}

TEST_F(ForeignBlocksTest, AreComparedWithWhatIsAskedFor) {
  OpenStore();
  Find(Identity(1));
  for (int i = 0; i < 3; ++i) {
    BlockIdentity other = Identity(1);
    if (i == 0) other.tokens.push_back(9);
    if (i == 1) other.parent = {};
    if (i == 2) other.tenant = "berta";
    EXPECT_EQ(LoadBlock(other), absl::StatusCode::kNotFound) << i;
  }
  Request request;
  EXPECT_TRUE(absl::IsInvalidArgument(TryLoad(&request, Identity(1), absl::Hours(1), 255)));
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
}

TEST_F(ForeignBlocksTest, ThatExpireAreForgottenAndNotServed) {
  options_.longest_life = absl::Hours(1);
  OpenStore();
  Tell({Leave(Identity(1), clock_.Now() + kPeriod + absl::Seconds(1)),
        Leave(Identity(2), clock_.Now() - absl::Seconds(1)), Leave(Identity(3))});
  LookAgain();
  EXPECT_EQ(store_->status().foreign, 2) << "one had expired when it was found";
  clock_.Advance(absl::Seconds(1));
  Request request;
  EXPECT_TRUE(absl::IsNotFound(TryLoad(&request, Identity(1))));
  Settle();
  EXPECT_EQ(watcher_.removed, std::vector<BlockKey>{Identity(1).key});
  clock_.Advance(absl::Hours(1));
  Settle();
  EXPECT_EQ(store_->status().foreign, 0) << "its life was not bounded";
}

TEST_F(ForeignBlocksTest, BeyondTheLimitTheOldestUnusedOneIsForgotten) {
  OpenStore();
  for (uint64_t i = 1; i <= 4; ++i) Find(Identity(i));
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
  Find(Identity(5));
  EXPECT_EQ(watcher_.removed, std::vector<BlockKey>{Identity(2).key});
  EXPECT_EQ(store_->status().foreign, 4);
}

TEST_F(ForeignBlocksTest, AreNoReasonToRefuseAStoreAndGiveWayToIt) {
  options_.capacity = Bytes(320);
  OpenStore();
  Find(Identity(1));
  Find(Identity(2));
  StoreBlock(Identity(3));
  EXPECT_TRUE(store_->Remove(Identity(3).key));
  EXPECT_FALSE(store_->Remove(Identity(1).key)) << "another node's";
  Settle();
  // The medium takes it: the other node has removed its own.
  StoreBlock(Identity(1));
  EXPECT_EQ(watcher_.removed, (std::vector<BlockKey>{Identity(3).key, Identity(1).key}));
  EXPECT_EQ(watcher_.stored.back(), Identity(1).key);
  EXPECT_EQ(store_->status().foreign, 1);
  // A look that is behind does not take it back.
  Tell({Leave(Identity(1))});
  LookAgain();
  EXPECT_EQ(store_->status().foreign, 1);
  EXPECT_EQ(store_->status().blocks, 1);
  EXPECT_EQ(store_->CheckConsistency(), absl::OkStatus());
}

TEST_F(ForeignBlocksTest, FoundWhileTheSameIsWrittenAreKnownWhenThatIsRefused) {
  OpenStore();
  Settle();
  medium_.hold = true;
  Request request;
  ASSERT_EQ(TryStore(&request, Identity(1)), absl::OkStatus());
  Settle();
  ASSERT_EQ(medium_.pending.size(), 1);
  Tell({Leave(Identity(1))});
  LookAgain();
  ASSERT_EQ(medium_.pending.size(), 2);
  medium_.Finish(1);
  Settle();
  medium_.Finish(0, absl::AlreadyExistsError("another node has it"));
  medium_.hold = false;
  Settle();
  EXPECT_EQ(request.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
  EXPECT_EQ(store_->status().foreign, 1);
}

TEST_F(ForeignBlocksTest, OfATenantThatIsPurgedAreForgottenAndNotFoundBeforeThatIsDone) {
  OpenStore();
  Find(Identity(1));
  Find(Identity(2, "berta"));
  medium_.hold = true;
  Request purge, load;
  ASSERT_EQ(store_->Purge("anna", clock_.Now() + absl::Hours(1), purge.done()), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(TryLoad(&load, Identity(1)))) << "it still lies there";
  Settle();
  EXPECT_EQ(watcher_.removed, std::vector<BlockKey>{Identity(1).key});
  // A look from before, and one from after.
  Tell({Leave(Identity(3))});
  LookAgain();
  ASSERT_EQ(medium_.pending.size(), 2);
  medium_.Finish(1);
  Settle();
  EXPECT_EQ(store_->status().foreign, 1);
  EndAll();
  EXPECT_EQ(purge.code(), absl::StatusCode::kOk);
  Find(Identity(3));
  EXPECT_EQ(LoadBlock(Identity(3)), absl::StatusCode::kOk);
}

TEST_F(ForeignBlocksTest, AFindThatWasUnderWayServesNothingOfATenantThatIsPurged) {
  OpenStore();
  Leave(Identity(1));
  medium_.hold = true;
  Request load, purge;
  ASSERT_EQ(TryLoad(&load, Identity(1)), absl::OkStatus());
  Settle();
  ASSERT_EQ(store_->Purge("anna", clock_.Now() + absl::Hours(1), purge.done()), absl::OkStatus());
  medium_.Finish(0);
  Settle();
  EXPECT_EQ(load.code(), absl::StatusCode::kNotFound);
  EndAll();
}

TEST_F(ForeignBlocksTest, LooksComeInRoundsRestAndWaitForLoads) {
  OpenStore();
  LookAgain();
  medium_.hold = true;
  clock_.Advance(kPeriod - absl::Milliseconds(1));
  Settle();
  EXPECT_TRUE(medium_.pending.empty()) << "the round is over";
  clock_.Advance(absl::Milliseconds(1));
  Settle();
  ASSERT_EQ(medium_.pending.size(), 1);
  EXPECT_EQ(medium_.pending[0].kind, FakeTierBackend::Kind::kDiscover);
  Settle();
  EXPECT_EQ(medium_.pending.size(), 1) << "two looks at once";
  // One that takes 50 ms rests 50 ms, within a round.
  medium_.looks.push_back({});
  clock_.Advance(absl::Milliseconds(50));
  medium_.Finish(0);
  Settle();
  EXPECT_TRUE(medium_.pending.empty());
  EXPECT_LE(store_->RunOnce(), clock_.Now() + absl::Milliseconds(50)) << "nobody would wake it";
  clock_.Advance(absl::Milliseconds(50));
  Settle();
  EXPECT_EQ(medium_.pending.size(), 1);
  medium_.Finish(0);
  Settle();
  // All operations in flight are loads: none is left for a look.
  clock_.Advance(kPeriod);
  std::vector<Request> loads(5);
  for (Request& load : loads) ASSERT_EQ(TryLoad(&load, Identity(9)), absl::OkStatus());
  Settle();
  ASSERT_EQ(medium_.pending.size(), 4);
  for (const auto& operation : medium_.pending) {
    EXPECT_EQ(operation.kind, FakeTierBackend::Kind::kFind);
  }
  medium_.Finish(0);
  Settle();
  EXPECT_EQ(medium_.pending.back().kind, FakeTierBackend::Kind::kFind) << "a load waited";
  medium_.Finish(0);
  Settle();
  EXPECT_EQ(medium_.pending.back().kind, FakeTierBackend::Kind::kDiscover);
  EndAll();
}

TEST_F(ForeignBlocksTest, LooksThatFailOrHangOpenNoBreaker) {
  options_.breaker.slow = absl::Seconds(1);
  OpenStore();
  medium_.hold = true;
  for (int i = 0; i < 10; ++i) {
    LookAgain();
    ASSERT_EQ(medium_.pending.size(), 1);
    medium_.Finish(0, absl::UnavailableError("EIO"));
    Settle();
  }
  LookAgain();
  clock_.Advance(absl::Hours(1));
  Settle();
  EXPECT_EQ(store_->status().times_opened, 0);
  EXPECT_TRUE(store_->WaitUntilServing(absl::ZeroDuration()));
}

TEST_F(ForeignBlocksTest, AreNotLookedForWhereNobodyWantsThemOrTheTierIsNotShared) {
  for (const bool shared : {false, true}) {
    medium_.shared = shared;
    options_.foreign_blocks = shared ? 0 : 4;
    OpenStore();
    Tell({Leave(Identity(1))});
    LookAgain();
    EXPECT_EQ(medium_.looks.size(), 1);
    EXPECT_EQ(store_->status().foreign, 0);
    medium_.looks.clear();
  }
}

}  // namespace
}  // namespace palimpsest
