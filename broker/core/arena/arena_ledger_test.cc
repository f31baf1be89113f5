#include "broker/core/arena/arena_ledger.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using Reservation = ArenaLedger::Reservation;

constexpr TenantId kAnna(1);
constexpr TenantId kBerta(2);
constexpr SessionId kWorker(10);
constexpr SessionId kOther(11);

BlockIdentity Identity(uint64_t number, TokenId token = 1) {
  return {.key = {number, 0}, .parent = {number - 1, 0}, .tokens = {token}, .tenant = ""};
}

class ArenaLedgerTest : public testing::Test {
 protected:
  ArenaLedgerTest() : ledger_({.max_chunks = 4, .chunk_bytes = KiB(64)}) {
    EXPECT_EQ(ledger_.OpenSession(kWorker, kAnna), absl::OkStatus());
    EXPECT_EQ(ledger_.OpenSession(kOther, kAnna), absl::OkStatus());
  }
  ~ArenaLedgerTest() override { EXPECT_EQ(ledger_.CheckConsistency(), absl::OkStatus()); }

  std::vector<Reservation> Reserve(SessionId session, const std::vector<uint64_t>& numbers,
                                   Bytes length = KiB(16)) {
    std::vector<ArenaLedger::Wanted> wanted;
    for (uint64_t number : numbers) wanted.push_back({Identity(number), length});
    const auto reserved = ledger_.Reserve(session, wanted);
    EXPECT_EQ(reserved.status(), absl::OkStatus());
    std::vector<Reservation> results;
    for (const auto& block : *reserved) results.push_back(block.result);
    return results;
  }
  absl::Status Commit(SessionId session, const std::vector<uint64_t>& numbers) {
    std::vector<ArenaLedger::Committed> blocks;
    for (uint64_t number : numbers) blocks.push_back({{number, 0}, number});
    return ledger_.Commit(session, blocks);
  }
  std::vector<ArenaExtent> Acquire(SessionId session, const std::vector<uint64_t>& numbers) {
    std::vector<BlockIdentity> ids;
    for (uint64_t number : numbers) ids.push_back(Identity(number));
    const auto acquired = ledger_.Acquire(session, ids);
    EXPECT_EQ(acquired.status(), absl::OkStatus());
    std::vector<ArenaExtent> extents;
    for (const auto& block : *acquired) extents.push_back(block.extent);
    return extents;
  }

  ArenaLedger ledger_;
};

TEST_F(ArenaLedgerTest, BlockIsFoundOnceItIsCommitted) {
  ASSERT_TRUE(ledger_.Grant(kAnna).ok());
  EXPECT_EQ(Reserve(kWorker, {1, 2}), std::vector(2, Reservation::kReserved));
  EXPECT_TRUE(Acquire(kOther, {1}).empty());
  EXPECT_EQ(Reserve(kOther, {1}), std::vector{Reservation::kPresent});
  EXPECT_FALSE(Commit(kOther, {1}).ok()) << "another session wrote it";
  EXPECT_FALSE(Commit(kWorker, {1, 3}).ok());
  EXPECT_TRUE(Acquire(kOther, {1}).empty()) << "half of a commit";
  EXPECT_EQ(Commit(kWorker, {1}), absl::OkStatus());
  EXPECT_FALSE(Commit(kWorker, {1}).ok());
  EXPECT_EQ(Acquire(kOther, {1, 2}).size(), 1) << "the longest prefix that is ready";
  EXPECT_EQ((*ledger_.Acquire(kOther, {Identity(1)}))[0].checksum, 1);
}

TEST_F(ArenaLedgerTest, CollisionIsAMissAndEndsAReservation) {
  ASSERT_TRUE(ledger_.Grant(kAnna).ok());
  Reserve(kWorker, {1});
  ASSERT_EQ(Commit(kWorker, {1}), absl::OkStatus());
  EXPECT_TRUE(ledger_.Acquire(kOther, {Identity(1, /*token=*/2)})->empty());
  const std::vector<ArenaLedger::Wanted> wanted = {{Identity(1, 2), KiB(16)},
                                                   {Identity(2), KiB(16)}};
  const auto reserved = *ledger_.Reserve(kOther, wanted);
  ASSERT_EQ(reserved.size(), 1);
  EXPECT_EQ(reserved[0].result, Reservation::kCollision);
}

TEST_F(ArenaLedgerTest, TenantsDoNotMeet) {
  ASSERT_EQ(ledger_.OpenSession(SessionId(20), kBerta), absl::OkStatus());
  ASSERT_TRUE(ledger_.Grant(kAnna).ok());
  EXPECT_EQ(Reserve(SessionId(20), {1}), std::vector{Reservation::kNoRoom});
  Reserve(kWorker, {1});
  ASSERT_EQ(Commit(kWorker, {1}), absl::OkStatus());
  EXPECT_TRUE(Acquire(SessionId(20), {1}).empty()) << "the same key, by accident or not";
  EXPECT_TRUE(absl::IsPermissionDenied(ledger_.Map(SessionId(20), ArenaChunkId(0))));
  ASSERT_TRUE(ledger_.Grant(kBerta).ok());
  EXPECT_EQ(Reserve(SessionId(20), {1}), std::vector{Reservation::kReserved});
}

TEST_F(ArenaLedgerTest, ChunkHoldsNothingBeforeItsMemoryIsThereAndIsFreeAgainWithoutIt) {
  ledger_.SetTenantLimit(kAnna, 1);
  EXPECT_TRUE(ledger_.CanGrant(kAnna));
  const auto chunk = ledger_.BeginGrant(kAnna);
  ASSERT_TRUE(chunk.ok());
  EXPECT_FALSE(ledger_.CanGrant(kAnna)) << "it counts at once";
  EXPECT_EQ(Reserve(kWorker, {1}), std::vector{Reservation::kNoRoom});
  EXPECT_TRUE(absl::IsFailedPrecondition(ledger_.Map(kWorker, *chunk)));
  EXPECT_TRUE(absl::IsFailedPrecondition(ledger_.BeginRevoke(*chunk)));
  ASSERT_EQ(ledger_.CancelGrant(*chunk), absl::OkStatus());
  EXPECT_TRUE(absl::IsFailedPrecondition(ledger_.EndGrant(*chunk)));
  EXPECT_EQ(ledger_.Count(ArenaChunkState::kFree), 4);
  ASSERT_TRUE(ledger_.BeginGrant(kAnna).ok());
  ASSERT_EQ(ledger_.EndGrant(*chunk), absl::OkStatus());
  EXPECT_EQ(Reserve(kWorker, {1}), std::vector{Reservation::kReserved});
  EXPECT_EQ(ledger_.Staying(kAnna), 1);
}

TEST_F(ArenaLedgerTest, FoundBlocksSayWhereTheyAreAndWhoUsesThem) {
  ASSERT_TRUE(ledger_.Grant(kAnna).ok());
  Reserve(kWorker, {2, 1});
  EXPECT_EQ(ledger_.WrittenBy(kWorker), (std::vector<BlockKey>{{1, 0}, {2, 0}}));
  EXPECT_EQ(ledger_.Find(kAnna, {1, 0})->writer, kWorker);
  EXPECT_FALSE(ledger_.Find(kAnna, {1, 0})->ready);
  ASSERT_EQ(Commit(kWorker, {1}), absl::OkStatus());
  const ArenaExtent extent = Acquire(kOther, {1}).front();
  ASSERT_TRUE(ledger_.Drop(kAnna, {1, 0}));
  EXPECT_FALSE(ledger_.Find(kAnna, {1, 0}).has_value());
  const auto dropped = ledger_.At(extent);
  ASSERT_TRUE(dropped.has_value());
  EXPECT_TRUE(dropped->dropped && *dropped->id == Identity(1));
  EXPECT_EQ(dropped->pins, 1);
  ASSERT_EQ(ledger_.Release(kOther, {extent}), absl::OkStatus());
  EXPECT_FALSE(ledger_.At(extent).has_value());
}

TEST_F(ArenaLedgerTest, NoRoomEndsAReservation) {
  ASSERT_TRUE(ledger_.Grant(kAnna).ok());
  EXPECT_EQ(Reserve(kWorker, {1, 2, 3, 4, 5, 6}).back(), Reservation::kNoRoom);
  EXPECT_EQ(ledger_.UsageOf(kAnna).writing, KiB(64));
  EXPECT_FALSE(ledger_.Fits(kAnna, Bytes(1)));
  EXPECT_TRUE(absl::IsInvalidArgument(
      ledger_.Reserve(kWorker, {{Identity(9), KiB(64) + Bytes(1)}}).status()));
  EXPECT_EQ(ledger_.Abort(kWorker, {{2, 0}, {3, 0}}), absl::OkStatus());
  EXPECT_TRUE(ledger_.Fits(kAnna, KiB(32))) << "neighbours that are free are one piece";
  EXPECT_FALSE(ledger_.Fits(kAnna, KiB(33)));
}

TEST_F(ArenaLedgerTest, DroppedBlockStaysWhereItIsUntilNobodyPinsIt) {
  ASSERT_TRUE(ledger_.Grant(kAnna).ok());
  Reserve(kWorker, {1}, KiB(64));
  ASSERT_EQ(Commit(kWorker, {1}), absl::OkStatus());
  const auto extents = Acquire(kOther, {1});
  EXPECT_TRUE(ledger_.Drop(kAnna, {1, 0}));
  EXPECT_FALSE(ledger_.Drop(kAnna, {1, 0}));
  EXPECT_TRUE(Acquire(kWorker, {1}).empty());
  EXPECT_EQ(Reserve(kWorker, {1}, KiB(64)), std::vector{Reservation::kNoRoom});
  EXPECT_EQ(ledger_.UsageOf(kAnna).dropped, KiB(64));
  EXPECT_FALSE(ledger_.Release(kWorker, extents).ok());
  EXPECT_FALSE(ledger_.Release(kOther, {extents[0], extents[0]}).ok());
  EXPECT_EQ(ledger_.Release(kOther, extents), absl::OkStatus());
  EXPECT_FALSE(ledger_.Release(kOther, extents).ok());
  EXPECT_EQ(Reserve(kWorker, {1}, KiB(64)), std::vector{Reservation::kReserved});
}

TEST_F(ArenaLedgerTest, EndOfASessionDropsWhatItWritesAndReleasesItsPins) {
  ASSERT_TRUE(ledger_.Grant(kAnna).ok());
  Reserve(kWorker, {1, 2});
  ASSERT_EQ(Commit(kWorker, {1}), absl::OkStatus());
  Acquire(kWorker, {1});
  Acquire(kWorker, {1});
  EXPECT_TRUE(ledger_.Drop(kAnna, {1, 0}));
  EXPECT_EQ(ledger_.CloseSession(kWorker), absl::OkStatus());
  EXPECT_EQ(ledger_.UsageOf(kAnna).free, KiB(64));
  EXPECT_FALSE(ledger_.CloseSession(kWorker).ok());
  EXPECT_FALSE(ledger_.Acquire(kWorker, {Identity(1)}).ok());
}

TEST_F(ArenaLedgerTest, RevokedChunkRetiresWhenItIsEmptyAndUnmapped) {
  const ArenaChunkId chunk = *ledger_.Grant(kAnna);
  ASSERT_EQ(ledger_.Map(kWorker, chunk), absl::OkStatus());
  Reserve(kWorker, {1, 2});
  ASSERT_EQ(Commit(kWorker, {1}), absl::OkStatus());
  const auto pinned = Acquire(kWorker, {1});
  ASSERT_EQ(ledger_.BeginRevoke(chunk), absl::OkStatus());
  EXPECT_EQ(Reserve(kWorker, {3}), std::vector{Reservation::kNoRoom});
  EXPECT_EQ(ledger_.BlocksIn(chunk).size(), 2);
  EXPECT_FALSE(ledger_.Map(kOther, chunk).ok());
  EXPECT_TRUE(ledger_.Drop(kAnna, {1, 0}));
  EXPECT_TRUE(absl::IsFailedPrecondition(ledger_.Unmap(kWorker, chunk)));
  EXPECT_EQ(Commit(kWorker, {2}), absl::OkStatus()) << "what was begun may be ended";
  EXPECT_TRUE(ledger_.Drop(kAnna, {2, 0}));
  EXPECT_TRUE(ledger_.UnmapsWanted().empty());
  EXPECT_EQ(ledger_.Release(kWorker, pinned), absl::OkStatus());
  ASSERT_EQ(ledger_.UnmapsWanted().size(), 1);
  EXPECT_TRUE(ledger_.Retiring().empty());
  EXPECT_EQ(ledger_.Unmap(kWorker, chunk), absl::OkStatus());
  EXPECT_EQ(ledger_.Retiring(), std::vector{chunk});
  EXPECT_FALSE(ledger_.CancelRevoke(chunk).ok());
  EXPECT_EQ(ledger_.Retired(chunk), absl::OkStatus());
  EXPECT_EQ(ledger_.Count(ArenaChunkState::kFree), 4);
}

TEST_F(ArenaLedgerTest, LimitsBoundWhatIsGrantedAndSayWhatToRevoke) {
  ledger_.SetLimit(3);
  ledger_.SetTenantLimit(kAnna, 2);
  ASSERT_TRUE(ledger_.Grant(kAnna).ok());
  ASSERT_TRUE(ledger_.Grant(kAnna).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(ledger_.Grant(kAnna).status()));
  ASSERT_TRUE(ledger_.Grant(kBerta).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(ledger_.Grant(kBerta).status()));
  Reserve(kWorker, {1});

  ledger_.SetLimit(1);
  ledger_.SetTenantLimit(kAnna, 1);
  EXPECT_EQ(ledger_.Excess(), 2);
  EXPECT_EQ(ledger_.Excess(kAnna), 1);
  const ArenaChunkId cheapest = *ledger_.Cheapest(kAnna);
  EXPECT_TRUE(ledger_.BlocksIn(cheapest).empty());
  EXPECT_EQ(ledger_.BeginRevoke(cheapest), absl::OkStatus());
  EXPECT_EQ(ledger_.Excess(), 1);
  EXPECT_EQ(ledger_.Excess(kAnna), 0);
  EXPECT_EQ(ledger_.Retiring(), std::vector{cheapest});
}

// Random calls, and a picture of the memory in which every block paints its extent: a block that
// can be acquired, or is pinned, must still be the one that was written there.
class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed)
      : random_(seed), ledger_({.max_chunks = kChunks, .chunk_bytes = kChunk, .unit = kUnit}) {
    picture_.resize(kChunks, std::vector<uint64_t>(kChunk / kUnit));
  }

  void Run(int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFatalFailure(); ++i) {
      Step();
      if (i % 16 == 0) {
        ASSERT_EQ(ledger_.CheckConsistency(), absl::OkStatus()) << "step " << i;
      }
      ASSERT_NO_FATAL_FAILURE(CheckPins());
    }
    End();
  }

  uint64_t acquired() const { return acquired_; }
  uint64_t retired() const { return retired_; }

 private:
  static constexpr uint32_t kChunks = 6;
  static constexpr Bytes kUnit{16};
  static constexpr Bytes kChunk{16 * 24};

  struct Pin {
    ArenaExtent extent;
    uint64_t paint = 0;
  };
  struct Session {
    TenantId tenant;
    std::map<BlockKey, ArenaExtent> writing;
    std::vector<Pin> pins;
    std::set<uint32_t> mapped;
  };

  uint64_t Roll(uint64_t n) { return random_() % n; }
  SessionId RollSession() { return SessionId(Roll(5)); }
  // Few keys, two blocks for each.
  BlockIdentity RollBlock() {
    return Identity(1 + Roll(12), static_cast<TokenId>(Roll(10) == 0 ? 2 : 1));
  }

  uint64_t* At(const ArenaExtent& extent) {
    return &picture_[extent.chunk.value()][extent.offset / kUnit];
  }
  int64_t Units(const ArenaExtent& extent) { return CeilDiv(extent.length, kUnit); }
  void Paint(const ArenaExtent& extent, uint64_t paint) {
    std::fill_n(At(extent), Units(extent), paint);
  }
  bool IsPainted(const ArenaExtent& extent, uint64_t paint) {
    return std::all_of(At(extent), At(extent) + Units(extent),
                       [paint](uint64_t p) { return p == paint; });
  }

  void Step() {
    const SessionId id = RollSession();
    const auto found = sessions_.find(id);
    const auto tenant = TenantId(Roll(2));
    const auto chunk = ArenaChunkId(Roll(kChunks));
    switch (Roll(14)) {
      case 0:
        ASSERT_EQ(ledger_.OpenSession(id, tenant).ok(), found == sessions_.end());
        if (found == sessions_.end()) sessions_[id].tenant = tenant;
        break;
      case 1:
        if (Roll(8) != 0) break;
        ASSERT_EQ(ledger_.CloseSession(id).ok(), found != sessions_.end());
        sessions_.erase(id);
        break;
      case 2:
        if (const auto making = ledger_.BeginGrant(tenant); making.ok()) {
          ASSERT_EQ(Roll(3) == 0 ? ledger_.CancelGrant(*making) : ledger_.EndGrant(*making),
                    absl::OkStatus());
        }
        break;
      case 3:
        if (Roll(4) == 0) (void)ledger_.BeginRevoke(chunk);
        if (Roll(4) == 0) (void)ledger_.CancelRevoke(chunk);
        break;
      case 4:
        for (ArenaChunkId retiring : ledger_.Retiring()) {
          for (const auto& [other, session] : sessions_) {
            ASSERT_FALSE(session.mapped.contains(retiring.value())) << "retired under a session";
          }
          std::fill(picture_[retiring.value()].begin(), picture_[retiring.value()].end(), 0);
          ASSERT_EQ(ledger_.Retired(retiring), absl::OkStatus());
          ++retired_;
        }
        break;
      case 5:
        if (ledger_.Map(id, chunk).ok()) sessions_.at(id).mapped.insert(chunk.value());
        break;
      case 6:
        Unmap(id, chunk);
        break;
      case 7:
        ledger_.Drop(tenant, RollBlock().key);
        break;
      case 8:
        ledger_.SetLimit(1 + Roll(kChunks));
        ledger_.SetTenantLimit(tenant, 1 + Roll(kChunks));
        break;
      default:
        if (found != sessions_.end()) UseBlocks(id, found->second);
    }
  }

  void Unmap(SessionId id, ArenaChunkId chunk) {
    if (!ledger_.Unmap(id, chunk).ok()) return;
    Session& session = sessions_.at(id);
    ASSERT_EQ(session.mapped.erase(chunk.value()), 1);
    for (const Pin& pin : session.pins) ASSERT_NE(pin.extent.chunk, chunk);
    for (const auto& [key, extent] : session.writing) ASSERT_NE(extent.chunk, chunk);
  }

  void UseBlocks(SessionId id, Session& session) {
    switch (Roll(5)) {
      case 0: {
        std::vector<ArenaLedger::Wanted> wanted;
        for (uint64_t i = Roll(4); i > 0; --i) {
          wanted.push_back({RollBlock(), Bytes(1 + static_cast<int64_t>(Roll(150)))});
        }
        const auto reserved = ledger_.Reserve(id, wanted);
        ASSERT_TRUE(reserved.ok());
        for (size_t i = 0; i < reserved->size(); ++i) {
          if ((*reserved)[i].result != Reservation::kReserved) continue;
          session.writing[wanted[i].id.key] = (*reserved)[i].extent;
          // The first write: if anybody still needs what was there, CheckPins finds out.
          Paint((*reserved)[i].extent, ++last_paint_);
        }
        break;
      }
      case 1: {
        std::vector<ArenaLedger::Committed> blocks;
        for (const auto& [key, extent] : session.writing) {
          if (Roll(2) == 0) blocks.push_back({key, *At(extent)});
        }
        const bool wrong = Roll(8) == 0;
        if (wrong) blocks.push_back({{999, 999}, 0});
        ASSERT_EQ(ledger_.Commit(id, blocks).ok(), !wrong);
        if (wrong) break;
        for (const auto& block : blocks) session.writing.erase(block.key);
        break;
      }
      case 2:
        if (session.writing.empty()) break;
        ASSERT_EQ(ledger_.Abort(id, {session.writing.begin()->first}), absl::OkStatus());
        session.writing.erase(session.writing.begin());
        break;
      case 3: {
        const std::vector<BlockIdentity> ids = {RollBlock(), RollBlock(), RollBlock()};
        const auto acquired = ledger_.Acquire(id, ids);
        ASSERT_TRUE(acquired.ok());
        for (const auto& block : *acquired) {
          session.pins.push_back({block.extent, block.checksum});
          ++acquired_;
        }
        break;
      }
      case 4: {
        std::vector<ArenaExtent> extents;
        while (!session.pins.empty() && Roll(4) != 0) {
          extents.push_back(session.pins.back().extent);
          session.pins.pop_back();
        }
        ASSERT_EQ(ledger_.Release(id, extents), absl::OkStatus());
      }
    }
  }

  void CheckPins() {
    for (const auto& [id, session] : sessions_) {
      for (const Pin& pin : session.pins) {
        ASSERT_TRUE(IsPainted(pin.extent, pin.paint)) << "a pinned extent was used again";
      }
      for (const auto& [key, extent] : session.writing) {
        ASSERT_TRUE(IsPainted(extent, *At(extent))) << "two write the same memory";
      }
    }
  }

  void End() {
    while (!sessions_.empty()) {
      ASSERT_EQ(ledger_.CloseSession(sessions_.begin()->first), absl::OkStatus());
      sessions_.erase(sessions_.begin());
    }
    for (uint32_t tenant = 0; tenant < 2; ++tenant) {
      EXPECT_EQ(ledger_.UsageOf(TenantId(tenant)).writing, Bytes(0));
      EXPECT_EQ(ledger_.UsageOf(TenantId(tenant)).dropped, Bytes(0));
      ledger_.DropAll(TenantId(tenant));
    }
    for (uint32_t i = 0; i < kChunks; ++i) (void)ledger_.BeginRevoke(ArenaChunkId(i));
    for (ArenaChunkId chunk : ledger_.Retiring()) {
      ASSERT_EQ(ledger_.Retired(chunk), absl::OkStatus());
    }
    EXPECT_EQ(ledger_.Count(ArenaChunkState::kFree), kChunks) << "a chunk leaked";
    EXPECT_EQ(ledger_.CheckConsistency(), absl::OkStatus());
  }

  std::mt19937_64 random_;
  ArenaLedger ledger_;
  std::map<SessionId, Session> sessions_;
  std::vector<std::vector<uint64_t>> picture_;
  uint64_t last_paint_ = 0;
  uint64_t acquired_ = 0;
  uint64_t retired_ = 0;
};

TEST(ArenaLedgerFuzz, RandomCallsNeitherLeakNorReuseWhatIsPinned) {
  uint64_t acquired = 0;
  uint64_t retired = 0;
  for (uint64_t seed = 0; seed < 40 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Fuzzer fuzzer(seed);
    fuzzer.Run(4000);
    acquired += fuzzer.acquired();
    retired += fuzzer.retired();
  }
  EXPECT_GT(acquired, 1000);
  EXPECT_GT(retired, 50);
}

}  // namespace
}  // namespace palimpsest
