#include "broker/tier/nvme/nvme_format.h"

#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/nvme/area_replay.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

const NvmeLayout kLayout{0x1234, MiB(4), kMinArea};
const absl::Time kNow = absl::FromUnixSeconds(1'700'000'000);

BlockRecord Record(uint64_t id, int tokens, const std::string& tenant = "alpha") {
  BlockRecord record;
  record.id = {{id, ~id}, {id - 1, 5}, {}, tenant};
  for (int i = 0; i < tokens; ++i) record.id.tokens.push_back(i * 7 - 3);
  record.length = Bytes(static_cast<int64_t>(id % 5 * 4096 + 100));
  record.checksum = id * 99;
  record.expiry = id % 2 == 0 ? absl::InfiniteFuture() : kNow + absl::Seconds(id);
  return record;
}

// An area in memory, written as a log would.
class Area {
 public:
  explicit Area(const std::vector<std::string>& snapshot) {
    bytes_.resize(kLayout.area.count());
    Append(snapshot);
    header_ = {3, kNonce, position_ - 1};
    bytes_.replace(0, kIoUnit.count(), EncodeAreaHeader(kLayout.volume, header_));
  }

  // Returns where the batch begins.
  uint64_t Append(const std::vector<std::string>& records) {
    FrameWriter writer(kNonce, position_, kNow);
    for (const std::string& record : records) writer.Add(record);
    const std::string frames = writer.Finish();
    bytes_.replace(position_ * kIoUnit.count(), frames.size(), frames);
    return std::exchange(position_, position_ + frames.size() / kIoUnit.count());
  }

  void Corrupt(uint64_t unit) { bytes_[unit * kIoUnit.count() + 60] ^= 1; }

  absl::StatusOr<AreaContent> Replay() const { return ReplayArea(kLayout, header_, bytes_); }
  // Keys of the blocks found.
  std::set<uint64_t> Keys() const {
    std::set<uint64_t> keys;
    const auto content = Replay();
    EXPECT_TRUE(content.ok()) << content.status();
    if (!content.ok()) return keys;
    for (const StoredBlock& block : content->blocks) keys.insert(block.record.id.key.high);
    return keys;
  }

  std::string& bytes() { return bytes_; }

 private:
  static constexpr uint64_t kNonce = 77;

  std::string bytes_;
  uint64_t position_ = 1;
  AreaHeader header_;
};

using Keys = std::set<uint64_t>;

TEST(NvmeFormat, EverythingComesBackAsItWas) {
  EXPECT_EQ(DecodeSuperblock(EncodeSuperblock(kLayout)), kLayout);
  const AreaHeader header{5, 6, 7};
  EXPECT_EQ(DecodeAreaHeader(9, EncodeAreaHeader(9, header)), header);
  EXPECT_EQ(DecodeAreaHeader(8, EncodeAreaHeader(9, header)), std::nullopt);
  for (const int tokens : {0, 1, 16, static_cast<int>(kMaxBlockTokens)}) {
    for (const std::string& tenant : {std::string("a"), std::string(kMaxTenantName, 'x')}) {
      const BlockRecord record = Record(tokens + 1, tokens, tenant);
      const std::string encoded = EncodePut(record, 42);
      absl::string_view in = encoded;
      const std::optional<Change> change = DecodeChange(in);
      ASSERT_TRUE(change);
      EXPECT_EQ(change->kind, Change::Kind::kPut);
      EXPECT_EQ(change->place, 42u);
      EXPECT_EQ(change->record, record);
      EXPECT_TRUE(in.empty());
    }
  }
}

TEST(NvmeFormat, CutAndChangedRecordsAreRefusedOrStayWithinBounds) {
  std::mt19937 random(5);
  const std::string whole =
      EncodePut(Record(3, 16), 1) + EncodeRemove({3, 4}, 1) + EncodePurge("alpha");
  for (int round = 0; round < 20000; ++round) {
    std::string mutated = whole.substr(0, random() % (whole.size() + 1));
    for (uint32_t i = 0; i < random() % 4 && !mutated.empty(); ++i) {
      mutated[random() % mutated.size()] = static_cast<char>(random());
    }
    absl::string_view in = mutated;
    while (!in.empty()) {
      const std::optional<Change> change = DecodeChange(in);
      if (!change) break;
      EXPECT_LE(change->record.id.tokens.size(), kMaxBlockTokens);
      EXPECT_LE(change->record.id.tenant.size(), kMaxTenantName);
    }
  }
}

TEST(NvmeFormat, LayoutsThatHoldNothingAreRefused) {
  EXPECT_TRUE(ValidateLayout(kLayout).ok());
  EXPECT_TRUE(ValidateLayout({1, kIoUnit * 3 + kMinArea * 2, kMinArea}).ok());
  EXPECT_FALSE(ValidateLayout({1, kIoUnit * 2 + kMinArea * 2, kMinArea}).ok());
  EXPECT_FALSE(ValidateLayout({1, MiB(4) + Bytes(1), kMinArea}).ok());
  EXPECT_FALSE(ValidateLayout({1, GiB(400), kMaxArea + kIoUnit}).ok());
  for (const Bytes device : {MiB(1), MiB(100), GiB(7) + kIoUnit, GiB(1000), GiB(100'000)}) {
    EXPECT_TRUE(ValidateLayout({1, device, DefaultArea(device)}).ok());
  }
}

TEST(AreaReplay, SnapshotAndLogApplyInOrder) {
  Area area({EncodePut(Record(1, 16), 0), EncodePut(Record(2, 16, "beta"), 10)});
  area.Append({EncodeRemove(Record(1, 0).id.key, 0), EncodePut(Record(3, 16), 0)});
  area.Append({EncodePut(Record(4, 16, "beta"), 20), EncodePurge("beta")});
  area.Append({EncodePut(Record(6, 16, "beta"), 10)});
  EXPECT_EQ(area.Keys(), (Keys{3, 6}));
  const auto content = area.Replay();
  EXPECT_EQ(content->blocks[0].record, Record(3, 16));
  EXPECT_EQ(content->last_written, kNow);
  EXPECT_EQ(content->log_frames, 3u);
}

// A removal names its block: the record of one that used the place before does not hit the next.
TEST(AreaReplay, RemovalOfAnotherBlockAtThePlaceIsIgnored) {
  Area area({EncodePut(Record(1, 16), 0)});
  area.Append({EncodeRemove(Record(7, 0).id.key, 0)});
  EXPECT_EQ(area.Keys(), Keys{1});
}

TEST(AreaReplay, LastBatchThatIsTornEndsTheLog) {
  const std::vector<std::string> large = {
      EncodePut(Record(5, 4096), 50), EncodePut(Record(6, 4096), 60),
      EncodePut(Record(7, 4096), 70), EncodePut(Record(8, 4096), 80)};
  // Two frames: whichever is torn, what is in front of it stays.
  Area first({EncodePut(Record(1, 16), 0)});
  first.Corrupt(first.Append(large));
  EXPECT_EQ(first.Keys(), Keys{1});
  Area second({EncodePut(Record(1, 16), 0)});
  second.Corrupt(second.Append(large) + 16);
  EXPECT_EQ(second.Keys(), (Keys{1, 5, 6, 7}));
}

TEST(AreaReplay, DamageInTheMiddleLeavesNothingToTrust) {
  Area log({EncodePut(Record(1, 16), 0)});
  const uint64_t damaged = log.Append({EncodeRemove(Record(1, 0).id.key, 0)});
  log.Append({EncodePut(Record(2, 16), 0)});
  EXPECT_EQ(log.Keys(), Keys{2});
  log.Corrupt(damaged);
  EXPECT_EQ(log.Replay().status().code(), absl::StatusCode::kDataLoss);
  Area snapshot({EncodePut(Record(1, 16), 0)});
  snapshot.Corrupt(1);
  EXPECT_EQ(snapshot.Replay().status().code(), absl::StatusCode::kDataLoss);
}

TEST(AreaReplay, ContradictionsAreDamage) {
  Area overlap({EncodePut(Record(3, 16), 0), EncodePut(Record(1, 16), 2)});
  EXPECT_EQ(overlap.Replay().status().code(), absl::StatusCode::kDataLoss);
  Area outside({EncodePut(Record(3, 16), kLayout.data_units() - 1)});
  EXPECT_EQ(outside.Replay().status().code(), absl::StatusCode::kDataLoss);
  Area far({EncodePut(Record(3, 16), UINT64_MAX)});
  EXPECT_EQ(far.Replay().status().code(), absl::StatusCode::kDataLoss);
}

// Frames of another use of the area, and of another place, are none.
TEST(AreaReplay, FramesBelongToOneSnapshotAndPlace) {
  FrameWriter writer(1, 4, kNow);
  writer.Add(EncodePurge("alpha"));
  std::string area(4 * kIoUnit.count(), '\0');
  area += writer.Finish();
  EXPECT_TRUE(DecodeFrame(area, 1, 4));
  EXPECT_FALSE(DecodeFrame(area, 2, 4));
  EXPECT_FALSE(DecodeFrame(area, 1, 3));
  EXPECT_FALSE(DecodeFrame(area, 1, 5));
  EXPECT_FALSE(DecodeFrame(area.substr(kIoUnit.count()), 1, 3));
}

TEST(AreaReplay, AnyBytesAreRefusedOrReplayed) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    Area area({EncodePut(Record(1, 16), 0), EncodePut(Record(2, 900), 10)});
    for (uint64_t id = 3; id < 9; ++id) area.Append({EncodePut(Record(id, 300), id * 10)});
    for (uint64_t i = 0; i < 1 + random() % 3; ++i) {
      area.bytes()[random() % (10 * kIoUnit.count())] = static_cast<char>(random());
    }
    const auto content = area.Replay();
    if (!content.ok()) continue;
    for (const StoredBlock& block : content->blocks) {
      EXPECT_EQ(block.record.checksum, block.record.id.key.high * 99);
    }
  }
}

}  // namespace
}  // namespace palimpsest
