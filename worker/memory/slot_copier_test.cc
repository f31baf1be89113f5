#include "worker/memory/slot_copier.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/mutex.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr Bytes kSlab = Bytes(64);
constexpr uint32_t kStages = 8;  // of two slabs each
constexpr uint32_t kSlabs = 2 * kStages;

// Slab i of the image is full of i. Places of rotating stages show their slot's memory, as mappings
// would.
class Memory : public ImageRestorer {
 public:
  Memory() : region_((kSlab * kSlabs).count()), shows_(kSlabs) {}

  std::byte* base() { return region_.data(); }
  void Show(const Rotation& rotation) {
    for (uint32_t i = 0; i < kSlabs; ++i) shows_[i] = i;
    for (size_t i = 0; i < rotation.stages.size(); ++i) {
      const auto first = static_cast<uint32_t>(2 * rotation.stages[i]);
      const auto slot =
          static_cast<uint32_t>(2 * rotation.stages[static_cast<size_t>(rotation.SlotOf(i))]);
      for (uint32_t k = 0; k < 2; ++k) shows_[first + k] = slot + k;
    }
    std::memset(region_.data(), 0xff, region_.size());
  }
  // Whether the stage's addresses show the image's bytes.
  bool Holds(int stage) const {
    for (auto i = static_cast<uint32_t>(2 * stage); i < static_cast<uint32_t>(2 * stage + 2); ++i) {
      const std::byte* slab = region_.data() + (kSlab * shows_[i]).count();
      for (int64_t k = 0; k < kSlab.count(); ++k) {
        if (slab[k] != static_cast<std::byte>(i)) return false;
      }
    }
    return true;
  }

  // Copies wait for this to be open.
  void Hold(bool hold) {
    MutexLock lock(&mu_);
    held_ = hold;
    changed_.SignalAll();
  }
  void DamageStage(int stage) { damaged_ = stage; }
  int copies() const { return copies_; }

  bool copies_slabs() const override { return true; }
  absl::Status CopySlab(std::byte* base, RegionIndex slab) const override {
    EXPECT_EQ(base, region_.data());
    {
      MutexLock lock(&mu_);
      while (held_) changed_.Wait(&mu_);
    }
    ++copies_;
    if (damaged_ == static_cast<int>(slab.value() / 2)) return absl::DataLossError("damaged");
    std::byte* to = base + (kSlab * shows_[slab.value()]).count();
    std::memset(to, static_cast<int>(slab.value()), static_cast<size_t>(kSlab.count()));
    return absl::OkStatus();
  }
  absl::Status Restore(absl::Span<std::byte* const>, absl::Span<const RegionIndex>,
                       const Progress&) override {
    return absl::UnimplementedError("not of this test");
  }
  const UniqueFd& image() const override { return image_; }

 private:
  std::vector<std::byte> region_;
  std::vector<uint32_t> shows_;
  UniqueFd image_;
  std::atomic<int> damaged_ = -1;
  mutable std::atomic<int> copies_ = 0;
  mutable Mutex mu_;
  mutable CondVar changed_;
  bool held_ ABSL_GUARDED_BY(mu_) = false;
};

class SlotCopierTest : public ::testing::Test {
 protected:
  SlotCopier::Options Options() {
    SlotCopier::Options options;
    options.restorer = &memory_;
    options.base = memory_.base();
    options.slab_bytes = kSlab;
    for (uint32_t i = 0; i < kStages; ++i) options.stages.push_back({2 * i, 2});
    options.on_copied = [this](Bytes bytes, absl::Duration) { copied_ += bytes.count(); };
    options.on_failure = [this](const absl::Status&) { ++failures_; };
    return options;
  }

  void Start(SlotCopier& copier, const Rotation& rotation) {
    copier.Stop();
    memory_.Show(rotation);
    copier.Start(rotation);
  }

  // Runs rotating stages up to the one where the step is abandoned; -1: none.
  void RunStep(SlotCopier& copier, const Rotation& rotation, int abandon_at = -1) {
    for (size_t i = 0; i < rotation.stages.size(); ++i) {
      const int stage = rotation.stages[i];
      if (static_cast<int>(i) == abandon_at) return copier.Restart();
      const absl::Status status = copier.Await(stage);
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_TRUE(memory_.Holds(stage)) << stage;
      copier.Release(stage);
    }
  }

  Memory memory_;
  std::atomic<int64_t> copied_ = 0;
  std::atomic<int> failures_ = 0;
};

TEST_F(SlotCopierTest, EveryStageHoldsItsBytesWhenItIsRead) {
  SlotCopier copier(Options());
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE(round);
    const int32_t slots = 1 + static_cast<int32_t>(random() % 2);
    const Rotation rotation = EvenRotation(
        0, kStages, static_cast<int32_t>(random() % (kStages + 1 - static_cast<uint32_t>(slots))),
        slots);
    Start(copier, rotation);
    for (uint32_t step = random() % 6; step > 0; --step) {
      const int abandon_at = random() % 3 == 0 && !rotation.none()
                                 ? static_cast<int>(random() % rotation.stages.size())
                                 : -1;
      ASSERT_NO_FATAL_FAILURE(RunStep(copier, rotation, abandon_at));
    }
  }
  EXPECT_GT(copied_, 0);
  EXPECT_EQ(failures_, 0);
}

TEST_F(SlotCopierTest, AStepMayBeginAnewWithoutNotice) {
  SlotCopier copier(Options());
  const Rotation rotation = {{1, 3, 5}, 1};
  Start(copier, rotation);
  ASSERT_TRUE(copier.Await(1).ok());
  copier.Release(1);
  ASSERT_TRUE(copier.Await(3).ok());
  ASSERT_NO_FATAL_FAILURE(RunStep(copier, rotation));
}

TEST_F(SlotCopierTest, StagesOutOfTurnAreRefused) {
  SlotCopier copier(Options());
  EXPECT_TRUE(absl::IsOutOfRange(copier.Await(1)));
  Start(copier, {{1, 3, 5}, 1});
  EXPECT_TRUE(absl::IsOutOfRange(copier.Await(2)));
  EXPECT_TRUE(absl::IsOutOfRange(copier.Await(3)));
  copier.Release(2);
}

TEST_F(SlotCopierTest, NothingIsWrittenAfterStop) {
  SlotCopier copier(Options());
  memory_.Hold(true);
  Start(copier, {{0, 4}, 1});
  std::thread stopper([&] { copier.Stop(); });
  memory_.Hold(false);
  stopper.join();
  const int copies = memory_.copies();
  EXPECT_LE(copies, 2);
  memory_.Show({});
  EXPECT_FALSE(memory_.Holds(0));
  EXPECT_EQ(memory_.copies(), copies);
}

TEST_F(SlotCopierTest, PatienceEnds) {
  SlotCopier::Options options = Options();
  options.patience = absl::Milliseconds(1);
  SlotCopier copier(options);
  memory_.Hold(true);
  Start(copier, {{0, 4}, 1});
  EXPECT_TRUE(absl::IsDeadlineExceeded(copier.Await(0)));
  memory_.Hold(false);
}

TEST_F(SlotCopierTest, DamagedBytesAreNeverLetThrough) {
  SlotCopier copier(Options());
  memory_.DamageStage(4);
  Start(copier, {{0, 4}, 1});
  const absl::Status first = copier.Await(0);
  if (first.ok()) {  // it came before the damage was found
    copier.Release(0);
    EXPECT_TRUE(absl::IsDataLoss(copier.Await(4)));
  }
  EXPECT_TRUE(absl::IsDataLoss(copier.Await(0)));
  EXPECT_EQ(failures_, 1);
}

TEST_F(SlotCopierTest, FailureWakesWhoWaits) {
  SlotCopier copier(Options());
  memory_.Hold(true);
  Start(copier, {{0, 4}, 1});
  absl::Status result;
  std::thread runner([&] { result = copier.Await(0); });
  copier.Fail(absl::CancelledError("over"));
  runner.join();
  EXPECT_TRUE(absl::IsCancelled(result));
  memory_.Hold(false);
}

// Whoever computes ahead of the copies waits, and the layers between are what hides them.
TEST_F(SlotCopierTest, TwoSlotsAreFilledWhileNobodyUsesThem) {
  SlotCopier copier(Options());
  Start(copier, {{0, 2, 4, 6}, 2});
  ASSERT_TRUE(copier.Await(0).ok());
  copier.Release(0);
  ASSERT_TRUE(copier.Await(2).ok());
  // The other slot gets stage 4 while this one is in use.
  while (copied_ < 3 * 2 * kSlab.count()) std::this_thread::yield();
  EXPECT_TRUE(memory_.Holds(2));
  EXPECT_TRUE(memory_.Holds(4));
  EXPECT_EQ(memory_.copies(), 6);
  copier.Release(2);
}

}  // namespace
}  // namespace palimpsest
