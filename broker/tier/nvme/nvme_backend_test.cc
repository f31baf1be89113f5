#include "broker/tier/nvme/nvme_backend.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/nvme/simulated_disk.h"
#include "common/block_checksum.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr uint64_t kDataUnits = 48;
constexpr Bytes kDevice = kIoUnit * 2 + kMinArea * 2 + kIoUnit * kDataUnits;
constexpr Bytes kFirstArea = kIoUnit * 2;
constexpr Bytes kData = kFirstArea + kMinArea * 2;
using Kind = IoRequest::Kind;

std::vector<std::byte> Content(uint64_t id, Bytes length) {
  std::vector<std::byte> bytes(static_cast<size_t>(length.count()));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(id * 31 + i / 7);
  return bytes;
}

BlockRecord Record(uint64_t id, Bytes length, const std::string& tenant = "alpha") {
  BlockRecord record;
  record.id = {{id, 1}, {id, 2}, {1, 2, 3}, tenant};
  record.length = length;
  record.checksum = BlockChecksum(record.id.key, Content(id, length));
  return record;
}

// A back-end over a simulated disk whose requests complete at once.
class Node {
 public:
  absl::StatusOr<std::vector<StoredBlock>> Open(Bytes size = kDevice) {
    if (medium_ == nullptr || medium_->bytes.size() != static_cast<size_t>(size.count())) {
      auto medium = std::make_unique<DiskMedium>(size);
      if (medium_ != nullptr) {
        std::copy_n(medium_->bytes.begin(), std::min(medium_->bytes.size(), medium->bytes.size()),
                    medium->bytes.begin());
      }
      medium_ = std::move(medium);
    }
    backend_ = std::make_unique<NvmeBackend>(
        [this]() -> absl::StatusOr<std::unique_ptr<BlockDevice>> {
          auto disk = std::make_unique<SimulatedDisk>(*medium_, ++seed_);
          disk_ = disk.get();
          disk->set_immediate(true);
          disk->set_fault(fault_);
          return disk;
        },
        clock_, NvmeBackend::Options{kMinArea});
    return backend_->Open();
  }
  void Close() {
    backend_->Close();
    backend_.reset();
  }
  // The keys of the blocks that a restart finds.
  std::vector<uint64_t> Restart() {
    Close();
    const auto found = Open();
    EXPECT_TRUE(found.ok()) << found.status();
    std::vector<uint64_t> keys;
    if (!found.ok()) return keys;
    for (const StoredBlock& block : *found) keys.push_back(block.record.id.key.high);
    return keys;
  }

  absl::StatusOr<TierPlace> Write(const BlockRecord& record) {
    std::optional<absl::StatusOr<TierPlace>> result;
    backend_->Write(record, Content(record.id.key.high, record.length),
                    [&](absl::StatusOr<TierPlace> place) { result = std::move(place); });
    return result.value_or(absl::InternalError("unanswered"));
  }
  bool IsReadable(const BlockRecord& record, TierPlace place) {
    std::vector<std::byte> to(static_cast<size_t>(record.length.count()));
    const absl::Status status =
        Wait([&](auto done) { backend_->Read(record, place, absl::MakeSpan(to), done); });
    return status.ok() && to == Content(record.id.key.high, record.length);
  }
  absl::Status Remove(const BlockRecord& record, TierPlace place,
                      TierBackend::RemoveReason reason = TierBackend::RemoveReason::kUnwanted) {
    return Wait([&](auto done) { backend_->Remove(record, place, reason, done); });
  }
  absl::Status Purge(const std::string& tenant) {
    return Wait([&](auto done) { backend_->Purge(tenant, done); });
  }

  void SetFault(SimulatedDisk::Fault fault) {
    fault_ = std::move(fault);
    if (backend_ != nullptr) disk_->set_fault(fault_);
  }

  NvmeBackend& backend() { return *backend_; }
  SimulatedDisk& disk() { return *disk_; }
  DiskMedium& medium() { return *medium_; }
  FakeClock& clock() { return *clock_owner_; }
  void ReplaceClock(absl::Time now) { clock_owner_ = std::make_unique<FakeClock>(now); }

 private:
  // Shows whatever clock the node has now.
  class Indirect : public Clock {
   public:
    explicit Indirect(const std::unique_ptr<FakeClock>& clock) : clock_(clock) {}
    absl::Time Now() const override { return clock_->Now(); }

   private:
    const std::unique_ptr<FakeClock>& clock_;
  };

  static absl::Status Wait(
      const std::function<void(std::function<void(absl::Status)>)>& operation) {
    std::optional<absl::Status> result;
    operation([&](absl::Status status) { result = std::move(status); });
    return result.value_or(absl::InternalError("unanswered"));
  }

  std::unique_ptr<FakeClock> clock_owner_ = std::make_unique<FakeClock>();
  Indirect clock_{clock_owner_};
  std::unique_ptr<DiskMedium> medium_;
  SimulatedDisk::Fault fault_;
  SimulatedDisk* disk_ = nullptr;
  uint64_t seed_ = 0;
  std::unique_ptr<NvmeBackend> backend_;
};

// The first `count` requests of the kind at or behind `from` fail.
SimulatedDisk::Fault Failing(Kind kind, Bytes from, int error_number, int count = 1 << 30) {
  return [=](const IoRequest& request) mutable {
    const bool hit = request.kind == kind && request.offset >= from && count-- > 0;
    return hit ? absl::ErrnoToStatus(error_number, "injected") : absl::OkStatus();
  };
}

bool IsAreaHeader(const IoRequest& request) {
  return request.kind == Kind::kWrite && std::memcmp(request.data.data(), "PALAREA1", 8) == 0;
}

TEST(NvmeBackend, FullTierRefusesUntilSomethingIsRemoved) {
  Node node;
  ASSERT_TRUE(node.Open().ok());
  std::vector<TierPlace> places;
  for (uint64_t id = 0; id < 4; ++id) places.push_back(*node.Write(Record(id, kIoUnit * 12)));
  EXPECT_EQ(node.Write(Record(9, Bytes(1))).status().code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(node.Remove(Record(2, kIoUnit * 12), places[2]).ok());
  EXPECT_EQ(node.Write(Record(9, kIoUnit * 13)).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(node.Write(Record(9, kIoUnit * 12)).ok());
  EXPECT_EQ(node.Restart(), (std::vector<uint64_t>{0, 1, 9, 3}));
}

// A device that gives out less room than it said it has.
TEST(NvmeBackend, NoSpaceAndErrorsOfDataLeaveNothingBehind) {
  for (const int error : {ENOSPC, EIO}) {
    Node node;
    ASSERT_TRUE(node.Open().ok());
    node.SetFault(Failing(Kind::kWrite, kData, error, 1));
    const absl::Status status = node.Write(Record(1, kIoUnit * 2)).status();
    EXPECT_EQ(status.code(),
              error == ENOSPC ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnknown);
    EXPECT_EQ(node.backend().usage().free, kDataUnits);
    EXPECT_TRUE(node.Write(Record(2, kIoUnit * 2)).ok());
    EXPECT_EQ(node.Restart(), std::vector<uint64_t>{2});
  }
}

TEST(NvmeBackend, FailedReadIsAnErrorAndTheBlockStays) {
  Node node;
  ASSERT_TRUE(node.Open().ok());
  const BlockRecord record = Record(1, Bytes(5000));
  const TierPlace place = *node.Write(record);
  node.SetFault(Failing(Kind::kRead, kData, EIO, 1));
  EXPECT_FALSE(node.IsReadable(record, place));
  EXPECT_TRUE(node.IsReadable(record, place));
}

TEST(NvmeBackend, MetadataThatCannotBeWrittenStopsWritesAndNotReads) {
  Node node;
  ASSERT_TRUE(node.Open().ok());
  const BlockRecord kept = Record(1, kIoUnit), removed = Record(2, kIoUnit);
  const TierPlace kept_at = *node.Write(kept), removed_at = *node.Write(removed);
  node.SetFault(Failing(Kind::kFlush, Bytes(0), EIO));
  const auto unflushed_at = node.Write(Record(3, kIoUnit));
  ASSERT_TRUE(unflushed_at.ok());
  EXPECT_EQ(node.Write(Record(4, kIoUnit)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(node.Remove(removed, removed_at).ok());
  EXPECT_TRUE(node.IsReadable(kept, kept_at));
  EXPECT_TRUE(node.IsReadable(Record(3, kIoUnit), *unflushed_at));
  node.SetFault(nullptr);
  EXPECT_EQ(node.Write(Record(5, kIoUnit)).status().code(), absl::StatusCode::kUnavailable)
      << "before kRetryAfter is over";
  node.clock().Advance(MetadataLog::kRetryAfter);
  EXPECT_TRUE(node.Write(Record(6, kIoUnit)).ok());
  // The removal that failed has been caught up with; what a failed flush was for never counts.
  EXPECT_EQ(node.backend().usage().in_use, 3u);
  EXPECT_EQ(node.Restart(), (std::vector<uint64_t>{1, 6}));
}

// The flush behind a snapshot's header fails, and the header may be durable all the same. The next
// attempt overwrites that snapshot; power lost meanwhile must not leave the header in charge.
TEST(NvmeBackend, HeaderOfAFailedSnapshotNeverCountsForTheNextOne) {
  for (uint64_t cut = 0; cut < 12; ++cut) {
    for (int attempt = 0; attempt < 8; ++attempt) {
      Node node;
      for (int i = 0; i < attempt; ++i) {
        ASSERT_TRUE(node.Open().ok());  // other seeds of the disk
      }
      ASSERT_TRUE(node.Open().ok());
      ASSERT_TRUE(node.Write(Record(1, kIoUnit)).ok());
      node.SetFault(Failing(Kind::kFlush, Bytes(0), EIO, 1));
      ASSERT_TRUE(node.Write(Record(2, kIoUnit)).ok());
      ASSERT_FALSE(node.Write(Record(3, kIoUnit)).ok());
      node.SetFault([header = false](const IoRequest& request) mutable {
        const bool fail = header && request.kind == Kind::kFlush;
        header |= IsAreaHeader(request);
        return fail ? absl::UnknownError("injected") : absl::OkStatus();
      });
      node.clock().Advance(MetadataLog::kRetryAfter);
      (void)node.Write(Record(3, kIoUnit));
      node.SetFault(nullptr);
      node.clock().Advance(MetadataLog::kRetryAfter);
      node.disk().CutPowerAfter(node.disk().completed() + cut);
      (void)node.Write(Record(4, kIoUnit));
      if (!node.disk().off()) node.disk().CutPower();
      const std::vector<uint64_t> keys = node.Restart();
      EXPECT_TRUE(std::count(keys.begin(), keys.end(), 1)) << "cut " << cut;
    }
  }
}

TEST(NvmeBackend, CorruptPlaceIsNotUsedAgainByThisProcess) {
  Node node;
  ASSERT_TRUE(node.Open().ok());
  const BlockRecord record = Record(1, kIoUnit * 4);
  ASSERT_TRUE(node.Remove(record, *node.Write(record), TierBackend::RemoveReason::kCorrupt).ok());
  EXPECT_EQ(node.backend().usage().quarantined, 4u);
  EXPECT_FALSE(node.Write(Record(2, kIoUnit * kDataUnits)).ok());
  EXPECT_TRUE(node.backend().CheckConsistency().ok());
  EXPECT_TRUE(node.Restart().empty());
  EXPECT_EQ(node.backend().usage().free, kDataUnits);
}

TEST(NvmeBackend, PurgeSurvivesSnapshotsAndRestartsBeforeBlocksAreRemoved) {
  Node node;
  ASSERT_TRUE(node.Open().ok());
  ASSERT_TRUE(node.Write(Record(1, kIoUnit, "alpha")).ok());
  ASSERT_TRUE(node.Write(Record(2, kIoUnit, "beta")).ok());
  ASSERT_TRUE(node.Purge("alpha").ok());
  ASSERT_TRUE(node.Purge("gamma").ok());
  ASSERT_TRUE(node.Write(Record(3, kIoUnit, "alpha")).ok());
  for (uint64_t id = 100; id < 200; ++id) {
    const BlockRecord record = Record(id, kIoUnit);
    ASSERT_TRUE(node.Remove(record, *node.Write(record)).ok());
  }
  EXPECT_EQ(node.Restart(), (std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(node.backend().usage().in_use, 2u);
}

TEST(NvmeBackend, RecordsThatFillTheMetadataAreRefused) {
  Node node;
  ASSERT_TRUE(node.Open().ok());
  std::vector<std::pair<BlockRecord, TierPlace>> written;
  absl::Status refused;
  for (uint64_t id = 0; refused.ok(); ++id) {
    ASSERT_LT(id, 10u);
    BlockRecord record = Record(id, kIoUnit);
    record.id.tokens.assign(kMaxBlockTokens, 5);
    const auto place = node.Write(record);
    refused = place.status();
    if (place.ok()) written.emplace_back(record, *place);
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(node.Remove(written[0].first, written[0].second).ok());
  EXPECT_TRUE(node.Write(Record(77, kIoUnit)).ok());
  EXPECT_EQ(node.Restart().size(), written.size());
}

TEST(NvmeBackend, ClockThatWentBackLengthensNoLife) {
  const absl::Time start = absl::FromUnixSeconds(2'000'000'000);
  Node node;
  node.ReplaceClock(start);
  ASSERT_TRUE(node.Open().ok());
  BlockRecord record = Record(1, kIoUnit);
  record.expiry = start + absl::Minutes(10);
  ASSERT_TRUE(node.Write(record).ok());
  node.clock().Advance(absl::Minutes(4));
  ASSERT_TRUE(node.Write(Record(2, kIoUnit)).ok());
  node.Close();
  const absl::Time corrected = start - absl::Hours(5);
  node.ReplaceClock(corrected);
  auto found = node.Open();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ((*found)[0].record.expiry, corrected + absl::Minutes(6));
  EXPECT_EQ((*found)[1].record.expiry, absl::InfiniteFuture());
  node.Close();
  // Forward, everything expires sooner, and stays as it is.
  node.ReplaceClock(start + absl::Hours(50));
  found = node.Open();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ((*found)[0].record.expiry, corrected + absl::Minutes(6));
}

TEST(NvmeBackend, DamageInTheMiddleOfTheLogForgetsAllBlocks) {
  Node node;
  ASSERT_TRUE(node.Open().ok());
  for (uint64_t id = 0; id < 3; ++id) ASSERT_TRUE(node.Write(Record(id, kIoUnit)).ok());
  node.Close();
  // The header, an empty snapshot, and three batches of one unit.
  int damaged = 0;
  for (int area = 0; area < 2; ++area) {
    std::byte* const second_batch =
        node.medium().bytes.data() + (kFirstArea + kMinArea * area + kIoUnit * 2).count();
    if (second_batch[8] == std::byte{0}) continue;
    second_batch[100] ^= std::byte{1};
    ++damaged;
  }
  ASSERT_EQ(damaged, 1);
  const auto found = node.Open();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(found->empty());
  EXPECT_EQ(node.backend().usage().free, kDataUnits);
  EXPECT_TRUE(node.Write(Record(9, kIoUnit)).ok());
  EXPECT_EQ(node.Restart(), std::vector<uint64_t>{9});
}

TEST(NvmeBackend, OneSuperblockIsEnoughAndForeignDataIsRefused) {
  Node node;
  ASSERT_TRUE(node.Open().ok());
  ASSERT_TRUE(node.Write(Record(1, kIoUnit)).ok());
  node.Close();
  node.medium().bytes[20] ^= std::byte{1};
  auto found = node.Open();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->size(), 1u);
  node.Close();
  // It was repaired.
  node.medium().bytes[kIoUnit.count() + 20] ^= std::byte{1};
  ASSERT_TRUE(node.Open().ok());
  node.Close();
  for (const int copy : {0, 1}) node.medium().bytes[kIoUnit.count() * copy + 20] ^= std::byte{1};
  EXPECT_EQ(node.Open().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(NvmeBackend, DeviceOfAnotherSizeIsRefused) {
  Node node;
  ASSERT_TRUE(node.Open().ok());
  node.Close();
  const absl::Status status = node.Open(kDevice + kIoUnit).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
}

TEST(NvmeBackend, ErrorsWhileOpeningAreReported) {
  for (const Kind kind : {Kind::kRead, Kind::kWrite, Kind::kFlush}) {
    Node node;
    node.SetFault(Failing(kind, Bytes(0), EIO));
    EXPECT_FALSE(node.Open().ok());
    node.SetFault(nullptr);
    EXPECT_TRUE(node.Open().ok());
  }
}

}  // namespace
}  // namespace palimpsest
