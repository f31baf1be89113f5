// Random operations on a disk that reorders, tears and drops what was not flushed; power is cut at
// every point, also while the next process opens the tier, and what NvmeBackend promises is
// compared with what it finds.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/nvme/nvme_backend.h"
#include "broker/tier/nvme/simulated_disk.h"
#include "common/block_checksum.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr Bytes kDevice = kIoUnit * 2 + kMinArea * 2 + kIoUnit * 48;
constexpr size_t kMostWrites = 6;

// A block and what its owner knows of it.
struct Known {
  enum class State { kWriting, kThere, kRemoving, kUnknown, kGone };

  BlockRecord record;
  std::vector<std::byte> bytes;
  State state = State::kWriting;
  TierPlace place;
  uint64_t answered = 0;       // the number of its Write among those answered; 0 if it was found
  bool may_be_purged = false;  // a purge that covers it was called
};

class World {
 public:
  explicit World(uint64_t seed) : random_(seed), medium_(kDevice) {}

  // False if power went before it was open; then it stays.
  bool Open(std::optional<uint64_t> cut_after) {
    backend_ = std::make_unique<NvmeBackend>(
        [&]() -> absl::StatusOr<std::unique_ptr<BlockDevice>> {
          auto disk = std::make_unique<SimulatedDisk>(medium_, random_());
          disk_ = disk.get();
          disk->set_immediate(true);
          if (cut_after) disk->CutPowerAfter(*cut_after);
          return disk;
        },
        clock_, NvmeBackend::Options{kMinArea});
    absl::StatusOr<std::vector<StoredBlock>> found = backend_->Open();
    if (!found.ok() || disk_->off()) {
      EXPECT_TRUE(disk_->off()) << found.status();
      backend_.reset();
      return false;
    }
    disk_->CutPowerAfter(UINT64_MAX);
    CompareFound(*found);
    disk_->set_immediate(false);
    return true;
  }

  void Act(int actions) {
    for (int i = 0; i < actions && !disk_->off(); ++i) ActOnce();
  }

  // Ends the process: in order, or without power.
  void End(bool cut) {
    if (cut && !disk_->off()) disk_->CutPower();
    disk_->RunAll();
    EXPECT_EQ(unanswered_, 0);
    if (!disk_->off()) Settled(writes_answered_);
    backend_->Close();
    backend_.reset();
    faults_ = false;
  }

  // Removes everything and sees that nothing leaks.
  void Drain() {
    disk_->RunAll();
    for (auto& [id, known] : blocks_) {
      if (known.state == Known::State::kThere) Remove(known);
    }
    disk_->RunAll();
    EXPECT_EQ(unanswered_, 0);
    const ExtentUsage usage = backend_->usage();
    EXPECT_EQ(usage.blocks, 0u);
    EXPECT_EQ(usage.free, 48u);
    EXPECT_TRUE(backend_->CheckConsistency().ok());
  }

  SimulatedDisk& disk() { return *disk_; }
  uint64_t Random() { return random_(); }

  void SetFaults(bool on) {
    if (!on) return disk_->set_fault(nullptr);
    faults_ = true;
    disk_->set_fault([this](const IoRequest&) {
      return random_() % 15 == 0 ? absl::UnknownError("EIO") : absl::OkStatus();
    });
  }

 private:
  void ActOnce() {
    const uint64_t choice = random_() % 100;
    if (choice < 35 && writes_in_flight_ < kMostWrites) {
      Write();
    } else if (choice < 50) {
      RemoveAny();
    } else if (choice < 53) {
      Purge();
    } else if (choice < 58) {
      ReadAny();
    } else if (choice < 61) {
      clock_.Advance(absl::Seconds(1));
    } else if (choice < 62) {
      disk_->RunAll();
      if (!disk_->off()) Settled(writes_answered_);
    } else {
      disk_->RunOne();
    }
  }

  void Write() {
    const uint64_t id = ++last_id_;
    Known& known = blocks_[id];
    known.bytes.resize(1 + random_() % (5 * kIoUnit.count()));
    if (random_() % 2 == 0) known.bytes.resize(RoundUp(Bytes(known.bytes.size()), kIoUnit).count());
    for (size_t at = 0; at < known.bytes.size(); at += sizeof(uint64_t)) {
      const uint64_t word = (id << 32 | at) * 0x9E3779B97F4A7C15;
      std::memcpy(&known.bytes[at], &word, std::min(sizeof word, known.bytes.size() - at));
    }
    // Some records are large, so that areas fill.
    const size_t tokens = random_() % 3 == 0 ? 2000 + random_() % 2000 : random_() % 100;
    known.record.id = {{id, 1}, {id, 2}, std::vector<TokenId>(tokens, 7), ""};
    known.record.id.tenant = std::string(1, static_cast<char>('a' + random_() % 3));
    known.record.length = Bytes(static_cast<int64_t>(known.bytes.size()));
    known.record.checksum = BlockChecksum(known.record.id.key, known.bytes);
    ++unanswered_;
    ++writes_in_flight_;
    backend_->Write(known.record, known.bytes, [this, &known](absl::StatusOr<TierPlace> place) {
      --unanswered_;
      --writes_in_flight_;
      known.answered = ++writes_answered_;
      if (place.ok()) known.place = *place;
      known.state = place.ok() ? Known::State::kThere : Known::State::kUnknown;
    });
  }

  // The writes answered so far have durable records, unless a flush has failed in this life.
  void Settled(uint64_t writes_answered) {
    if (!faults_) settled_ = std::max(settled_, writes_answered);
  }

  // A random block that is there.
  Known* Any() {
    std::vector<Known*> there;
    for (auto& [id, known] : blocks_) {
      if (known.state == Known::State::kThere && !being_read_.contains(&known)) {
        there.push_back(&known);
      }
    }
    return there.empty() ? nullptr : there[random_() % there.size()];
  }

  void RemoveAny() {
    if (Known* known = Any()) Remove(*known);
  }

  void Remove(Known& known) {
    known.state = Known::State::kRemoving;
    ++unanswered_;
    backend_->Remove(known.record, known.place, TierBackend::RemoveReason::kUnwanted,
                     [this, &known, before = writes_answered_](const absl::Status& status) {
                       --unanswered_;
                       // Of a purged one there may be no record, and nothing to wait for.
                       if (status.ok() && !known.may_be_purged) Settled(before);
                       known.state = status.ok() ? Known::State::kGone : Known::State::kUnknown;
                     });
  }

  void Purge() {
    const std::string tenant(1, static_cast<char>('a' + random_() % 3));
    std::vector<Known*> covered;
    for (auto& [id, known] : blocks_) {
      if (known.record.id.tenant != tenant || known.state == Known::State::kGone) continue;
      known.may_be_purged = true;
      covered.push_back(&known);
    }
    ++unanswered_;
    backend_->Purge(tenant, [this, covered = std::move(covered),
                             before = writes_answered_](const absl::Status& status) {
      --unanswered_;
      if (!status.ok()) return;
      Settled(before);
      for (Known* known : covered) purged_.insert({known, true});
    });
  }

  void ReadAny() {
    Known* known = Any();
    if (known == nullptr) return;
    ++unanswered_;
    auto to = std::make_shared<std::vector<std::byte>>(known->bytes.size());
    being_read_.insert({known, true});
    backend_->Read(known->record, known->place, absl::MakeSpan(*to),
                   [this, known, to](const absl::Status& status) {
                     --unanswered_;
                     being_read_.erase(known);
                     EXPECT_TRUE(!status.ok() || *to == known->bytes);
                   });
  }

  void CompareFound(const std::vector<StoredBlock>& found) {
    uint64_t units = 0;
    std::map<uint64_t, TierPlace> places;
    for (const StoredBlock& block : found) {
      const uint64_t id = block.record.id.key.high;
      ASSERT_TRUE(blocks_.contains(id));
      Known& known = blocks_[id];
      EXPECT_EQ(block.record, known.record);
      EXPECT_NE(known.state, Known::State::kGone) << "block " << id << " came back";
      EXPECT_FALSE(purged_.contains(&known)) << "block " << id << " was purged and came back";
      AlignedBuffer to(RoundUp(known.record.length, kIoUnit));
      const auto bytes = to.span().subspan(0, known.bytes.size());
      backend_->Read(block.record, block.place, bytes,
                     [](const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; });
      EXPECT_EQ(std::memcmp(bytes.data(), known.bytes.data(), bytes.size()), 0)
          << "block " << id << " has other bytes";
      EXPECT_TRUE(places.insert({id, block.place}).second);
      units += CeilDiv(known.record.length, kIoUnit);
    }
    for (auto& [id, known] : blocks_) {
      const auto place = places.find(id);
      if (known.state == Known::State::kThere && !known.may_be_purged &&
          known.answered <= settled_) {
        EXPECT_TRUE(place != places.end()) << "block " << id << " was lost";
      }
      known.state = place == places.end() ? Known::State::kGone : Known::State::kThere;
      known.may_be_purged = false;
      known.answered = 0;
      if (place != places.end()) known.place = place->second;
    }
    purged_.clear();
    std::erase_if(blocks_, [](const auto& block) {
      return block.second.state == Known::State::kGone;  // found again it would be a stranger
    });
    const ExtentUsage usage = backend_->usage();
    EXPECT_EQ(usage.in_use, units);
    EXPECT_EQ(usage.in_use + usage.free, 48u);
    EXPECT_TRUE(backend_->CheckConsistency().ok());
  }

  std::mt19937_64 random_;
  DiskMedium medium_;
  FakeClock clock_;
  std::map<uint64_t, Known> blocks_;
  std::map<Known*, bool> purged_;
  std::map<Known*, bool> being_read_;
  uint64_t last_id_ = 0;
  uint64_t writes_answered_ = 0;
  uint64_t settled_ = 0;
  bool faults_ = false;
  int unanswered_ = 0;
  size_t writes_in_flight_ = 0;
  std::unique_ptr<NvmeBackend> backend_;
  SimulatedDisk* disk_ = nullptr;
};

// Opens until power stays, cutting it at later and later points of opening.
void OpenDespiteCuts(World& world) {
  uint64_t cut_after = world.Random() % 4;
  while (!world.Open(cut_after)) cut_after += 1 + world.Random() % 8;
}

TEST(PowerCut, AtEveryPointWhatWasPromisedIsThere) {
  constexpr int kActions = 400;
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    uint64_t points = 0;
    {
      World world(seed);
      ASSERT_TRUE(world.Open(std::nullopt));
      world.Act(kActions);
      points = world.disk().completed();
      world.End(false);
      ASSERT_GT(points, 100u);
    }
    for (uint64_t point = 0; point <= points; point += seed) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << ", power cut after " << point);
      World world(seed);
      if (world.Open(point)) {
        world.disk().CutPowerAfter(point);
        world.Act(kActions);
        world.End(true);
      }
      OpenDespiteCuts(world);
      world.Drain();
      world.End(false);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(PowerCut, ManyLivesWithFaultsInBetween) {
  for (uint64_t seed = 1; seed <= 16; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    World world(seed);
    for (int life = 0; life < 6; ++life) {
      OpenDespiteCuts(world);
      world.SetFaults(seed % 2 == 0);
      world.Act(static_cast<int>(world.Random() % 1200));
      world.SetFaults(false);
      world.End(world.Random() % 3 != 0);
      if (testing::Test::HasFailure()) return;
    }
    ASSERT_TRUE(world.Open(std::nullopt));
    world.Drain();
    world.End(false);
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace palimpsest
