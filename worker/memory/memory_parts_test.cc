// The parts of the memory client that need no broker: regions, gate, slab states, restoring.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/memory_file.h"
#include "common/mutex.h"
#include "common/slab_checksum.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/memory/host_image_restorer.h"
#include "worker/memory/host_memory.h"
#include "worker/memory/parameter_gate.h"
#include "worker/memory/parameter_slabs.h"
#include "worker/memory/regions.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;
using Stage = ParameterGateImpl::Stage;
using State = ParameterSlabs::State;

constexpr Bytes kSlab = KiB(64);
constexpr absl::Duration kLong = absl::Seconds(30);

UniqueFd Memfd(Bytes size, int seals, char content = 0) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const std::string bytes(static_cast<size_t>(size.count()), content);
  EXPECT_EQ(::write(fd.get(), bytes.data(), bytes.size()), bytes.size());
  EXPECT_TRUE(SealMemory(fd.get(), seals).ok());
  return fd;
}

UniqueFd Slab(char content = 0) { return Memfd(kSlab, kSlabSeals, content); }

UniqueFd ReadOnly(const UniqueFd& fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd.get());
  return UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

std::unique_ptr<SlabRegion> Region(uint32_t places) {
  return std::make_unique<SlabRegion>(*HostMemory(1).Reserve(places, kSlab), 0, places, kSlab);
}

void Add(uint32_t slab, uint64_t epoch, UniqueFd memory, std::vector<SlabRegion::Arrival>& slabs) {
  slabs.push_back({SlabId(slab), Epoch(epoch), 0, OneDescriptor(std::move(memory))});
}

std::vector<SlabRegion::Arrival> One(uint32_t slab, UniqueFd memory) {
  std::vector<SlabRegion::Arrival> slabs;
  Add(slab, slab * 10, std::move(memory), slabs);
  return slabs;
}

absl::Status Put(SlabRegion& region, uint32_t place, uint32_t slab, UniqueFd memory = Slab()) {
  return region.Map(One(slab, std::move(memory)), {RegionIndex(place)});
}

TEST(SlabRegion, KeepsTrackOfWhatIsWhere) {
  auto region = Region(3);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(region->base()) % MiB(2).count(), 0);
  ASSERT_TRUE(Put(*region, 1, 7, Slab('b')).ok());
  std::vector<SlabRegion::Arrival> two = One(8, Slab('a'));
  Add(9, 90, Slab('c'), two);
  const auto places = region->MapAnywhere(std::move(two));
  ASSERT_TRUE(places.ok()) << places.status();
  EXPECT_THAT(*places, ::testing::ElementsAre(RegionIndex(0), RegionIndex(2)));
  EXPECT_TRUE(absl::IsResourceExhausted(region->MapAnywhere(One(1, Slab())).status()));
  EXPECT_TRUE(absl::IsAlreadyExists(Put(*region, 1, 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(Put(*region, 3, 1)));
  EXPECT_EQ(static_cast<char>(*region->at(RegionIndex(1))), 'b');

  EXPECT_TRUE(absl::IsNotFound(region->Unmap({RegionIndex(1), RegionIndex(9)}).status()));
  EXPECT_THAT(*region->Unmap({RegionIndex(1)}), ::testing::ElementsAre(SlabId(7)));
  EXPECT_TRUE(absl::IsNotFound(region->Unmap({RegionIndex(1)}).status()));
  EXPECT_EQ(region->mapped(), 2);
  const std::vector<SlabRegion::Held> held = region->held();
  ASSERT_EQ(held.size(), 2);
  EXPECT_EQ(held[1].slab, SlabId(9));
  EXPECT_EQ(held[1].epoch, Epoch(90));
  EXPECT_EQ(held[1].index, RegionIndex(2));
  EXPECT_TRUE(CheckSlabFile(held[1].memory->front().get(), kSlab).ok());
}

TEST(SlabRegion, TwoRegionsLieBehindEachOtherInOneRange) {
  auto memory = *HostMemory(1).Reserve(5, kSlab);
  SlabRegion front(memory, 0, 3, kSlab), back(memory, 3, 2, kSlab);
  EXPECT_EQ(back.base(), front.base() + 3 * kSlab.count());
  ASSERT_TRUE(Put(back, 0, 7, Slab('b')).ok());
  ASSERT_TRUE(Put(front, 2, 8, Slab('a')).ok());
  EXPECT_EQ(static_cast<char>(*front.at(RegionIndex(3))), 'b');
  EXPECT_FALSE(front.IsMapped(RegionIndex(3)));
  EXPECT_TRUE(absl::IsInvalidArgument(Put(front, 3, 9)));
}

TEST(SlabRegion, OneRefusedSlabLeavesAllPlacesFree) {
  auto region = Region(2);
  std::vector<SlabRegion::Arrival> slabs = One(4, Slab());
  Add(5, 1, Memfd(kSlab * 2, kSlabSeals), slabs);
  const absl::Status status = region->Map(std::move(slabs), {RegionIndex(0), RegionIndex(1)});
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("slab 5"));
  EXPECT_FALSE(Put(*region, 0, 5, ReadOnly(Slab())).ok());
  EXPECT_FALSE(Put(*region, 0, 5, UniqueFd()).ok());
  EXPECT_EQ(region->mapped(), 0);
  EXPECT_TRUE(Put(*region, 0, 5).ok());
  EXPECT_TRUE(Put(*region, 1, 6).ok());
}

TEST(SlabRegion, AliasesShowASlabAtSeveralPlacesAndAreNobodys) {
  auto region = Region(4);
  ASSERT_TRUE(Put(*region, 0, 7, Slab('a')).ok());
  const SlabRegion::Held slab = region->held()[0];
  ASSERT_TRUE(region->Vacate({RegionIndex(0)}).ok());
  EXPECT_TRUE(region->held().empty());
  const auto at = [&](uint32_t place) {
    SlabRegion::Held alias = slab;
    alias.index = RegionIndex(place);
    return alias;
  };
  ASSERT_TRUE(region->Occupy({at(1)}, {at(0), at(3)}).ok());
  *region->at(RegionIndex(3)) = std::byte{'z'};
  EXPECT_EQ(static_cast<char>(*region->at(RegionIndex(0))), 'z');
  EXPECT_EQ(static_cast<char>(*region->at(RegionIndex(1))), 'z');
  EXPECT_EQ(region->mapped(), 1);
  ASSERT_EQ(region->held().size(), 1);
  EXPECT_EQ(region->held()[0].index, RegionIndex(1));
  EXPECT_EQ(region->held()[0].memory, slab.memory);
  EXPECT_TRUE(region->IsTaken(RegionIndex(3)));
  EXPECT_FALSE(region->IsMapped(RegionIndex(3)));

  EXPECT_TRUE(absl::IsNotFound(region->Unmap({RegionIndex(3)}).status()));
  EXPECT_TRUE(absl::IsAlreadyExists(region->Occupy({at(2)}, {at(3)})));
  EXPECT_TRUE(absl::IsAlreadyExists(region->Occupy({at(2)}, {at(2)})));
  EXPECT_FALSE(region->IsTaken(RegionIndex(2)));
  EXPECT_TRUE(absl::IsNotFound(region->Vacate({RegionIndex(0), RegionIndex(2)})));
  ASSERT_TRUE(region->Vacate({RegionIndex(0), RegionIndex(1)}).ok());
  EXPECT_EQ(static_cast<char>(*region->at(RegionIndex(3))), 'z');  // whatever its own place is
  EXPECT_TRUE(Put(*region, 0, 8).ok());
  ASSERT_TRUE(region->UnmapAll().ok());
  EXPECT_FALSE(region->IsTaken(RegionIndex(3)));
}

TEST(ParameterGate, PassesReadyStagesAndRefusesAbsentOnes) {
  ParameterGateImpl gate(2, kLong);
  gate.Set(1, Stage::kReady);
  EXPECT_TRUE(absl::IsUnavailable(gate.AwaitStage(0)));
  EXPECT_TRUE(gate.AwaitStage(1).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(gate.AwaitStage(2)));
  EXPECT_TRUE(absl::IsInvalidArgument(gate.AwaitStage(-1)));
}

TEST(ParameterGate, WaitersGoOnWhenTheStageComesLeavesOrFails) {
  for (const int outcome : {0, 1, 2}) {
    std::atomic<int> waits = 0;
    ParameterGateImpl gate(1, kLong, [&](absl::Duration) { ++waits; });
    gate.Set(0, Stage::kComing);
    absl::Status result;
    std::thread runner([&] { result = gate.AwaitStage(0); });
    if (outcome == 0) gate.Set(0, Stage::kReady);
    if (outcome == 1) gate.Set(0, Stage::kAbsent);
    if (outcome == 2) gate.Fail(absl::DataLossError("damaged"));
    runner.join();
    EXPECT_EQ(result.code(), outcome == 0   ? absl::StatusCode::kOk
                             : outcome == 1 ? absl::StatusCode::kUnavailable
                                            : absl::StatusCode::kDataLoss);
    EXPECT_LE(waits, 1);
  }
}

TEST(ParameterGate, PatienceEndsAndIsMeasured) {
  absl::Duration waited;
  ParameterGateImpl gate(1, absl::Milliseconds(1), [&](absl::Duration d) { waited = d; });
  gate.Set(0, Stage::kComing);
  EXPECT_TRUE(absl::IsDeadlineExceeded(gate.AwaitStage(0)));
  EXPECT_GE(waited, absl::Milliseconds(1));
}

TEST(ParameterGate, QueuedStagesAreOpenToWhoeverWaitsForTheirEvents) {
  int marks[2][2];
  ParameterGateImpl gate(2, absl::Milliseconds(1), nullptr,
                         [&](int stage, int rank) { return &marks[stage][rank]; });
  gate.Set(0, Stage::kQueued, true);
  gate.Set(1, Stage::kReady);
  std::vector<void*> events(2);
  ASSERT_TRUE(gate.StageEvents(0, absl::MakeSpan(events)).ok());
  EXPECT_EQ(events, (std::vector<void*>{&marks[0][0], &marks[0][1]}));
  ASSERT_TRUE(gate.StageEvents(1, absl::MakeSpan(events)).ok());
  EXPECT_EQ(events, (std::vector<void*>{nullptr, nullptr}));
  EXPECT_TRUE(absl::IsDeadlineExceeded(gate.AwaitStage(0)));
  // Passed, but not proved yet, even after it was taken away.
  EXPECT_TRUE(absl::IsDeadlineExceeded(gate.CheckPassed()));
  gate.Set(0, Stage::kAbsent, true);
  EXPECT_TRUE(absl::IsDeadlineExceeded(gate.CheckPassed()));
  gate.Set(0, Stage::kReady);
  EXPECT_TRUE(gate.CheckPassed().ok());
}

TEST(ParameterGate, WrongBytesInUseAreFoundBeforeTheyAreBelieved) {
  int mark = 0;
  ParameterGateImpl gate(1, kLong, nullptr, [&](int, int) { return &mark; });
  gate.Set(0, Stage::kQueued, true);
  void* event = nullptr;
  ASSERT_TRUE(gate.StageEvents(0, absl::MakeSpan(&event, 1)).ok());
  absl::Status result;
  std::thread runner([&] { result = gate.CheckPassed(); });
  gate.Fail(absl::DataLossError("damaged"));
  gate.Set(0, Stage::kComing);
  runner.join();
  EXPECT_TRUE(absl::IsDataLoss(result));
}

class RecordingStages : public RotatingStages {
 public:
  absl::Status Await(int stage) override {
    said += absl::StrCat("await ", stage, ";");
    return status;
  }
  void Release(int stage) override { absl::StrAppend(&said, "release ", stage, ";"); }
  void Restart() override { said += "restart;"; }
  void Fail(absl::Status) override { said += "fail;"; }

  absl::Status status;
  std::string said;
};

TEST(ParameterGate, RotatingStagesAreLeftToWhoCopiesThem) {
  RecordingStages rotating;
  ParameterGateImpl gate(3, kLong, nullptr, nullptr, &rotating);
  gate.Set(0, Stage::kReady);
  gate.Set(1, Stage::kRotating);
  EXPECT_TRUE(gate.AwaitStage(0).ok());
  gate.ReleaseStage(0);
  EXPECT_TRUE(gate.AwaitStage(1).ok());
  gate.ReleaseStage(1);
  EXPECT_EQ(std::exchange(rotating.said, ""), "await 1;release 1;");
  // However a step fails, the next one begins anew.
  EXPECT_TRUE(absl::IsUnavailable(gate.AwaitStage(2)));
  EXPECT_EQ(std::exchange(rotating.said, ""), "restart;");
  rotating.status = absl::DeadlineExceededError("slow");
  EXPECT_TRUE(absl::IsDeadlineExceeded(gate.AwaitStage(1)));
  EXPECT_EQ(std::exchange(rotating.said, ""), "await 1;restart;");
  gate.Fail(absl::DataLossError("damaged"));
  EXPECT_TRUE(absl::IsDataLoss(gate.AwaitStage(1)));
  EXPECT_EQ(rotating.said, "fail;restart;");
}

TEST(ParameterGate, RotatingStagesOfAGpuPassWithoutAnEvent) {
  ParameterGateImpl gate(1, kLong, nullptr, [](int, int) { return nullptr; });
  gate.Set(0, Stage::kRotating);
  int mark = 0;
  void* event = &mark;
  ASSERT_TRUE(gate.StageEvents(0, absl::MakeSpan(&event, 1)).ok());
  EXPECT_EQ(event, nullptr);
  EXPECT_TRUE(gate.CheckPassed().ok());
}

TEST(ParameterSlabs, RandomTransitionsKeepTheGateRight) {
  const std::vector<ParameterSlabs::StageSpan> spans = {{0, 1}, {1, 3}, {4, 2}};
  ParameterGateImpl gate(3, kLong);
  ParameterSlabs slabs(spans, &gate);
  std::mt19937 random(5);
  std::array<int, 6> seen = {};
  for (int step = 0; step < 20'000; ++step) {
    const RegionIndex i(random() % slabs.size());
    const State state = slabs.state(i);
    switch (random() % 9) {
      case 0:
        if (state == State::kAbsent) slabs.Promise(i);
        break;
      case 8: {
        // A whole stage rotates, or ceases to.
        const auto& span = spans[random() % spans.size()];
        const State first = slabs.state(RegionIndex(span.first));
        bool alike = first == State::kAbsent || first == State::kRotating;
        for (uint32_t k = 0; k < span.count; ++k) {
          alike &= slabs.state(RegionIndex(span.first + k)) == first;
        }
        for (uint32_t k = 0; alike && k < span.count; ++k) {
          const RegionIndex index(span.first + k);
          first == State::kAbsent ? slabs.Rotate(index) : slabs.Unmapped(index);
        }
        break;
      }
      case 1:
        if (state == State::kPromised) slabs.Mapped(i);
        break;
      case 2:
        EXPECT_EQ(slabs.BeginRestore(i), state == State::kMapped && !slabs.revoked(i));
        break;
      case 3:
        if (state == State::kRestoring && random() % 2 == 0) {
          slabs.Queued(i);
        } else if (slabs.BeingWritten(i)) {
          slabs.Restored(i);
        }
        break;
      case 4:
        if (random() % 8 == 0) slabs.AbandonRestore(i);
        break;
      case 5:
        if (random() % 4 == 0 && state != State::kAbsent && state != State::kRotating) {
          slabs.Revoke(i);
        }
        break;
      case 6:
        if (random() % 2 == 0) slabs.Unrevoke(i);
        break;
      default:
        if (slabs.revoked(i) && (state == State::kMapped || state == State::kRestored)) {
          slabs.Unmapped(i);
        } else if (random() % 64 == 0) {
          slabs.LosePromises();
        }
    }
    bool available = true;
    uint32_t restored = 0;
    for (size_t s = 0; s < spans.size(); ++s) {
      bool missing = false, ready = true, queued = true, rotating = true;
      for (uint32_t k = 0; k < spans[s].count; ++k) {
        const RegionIndex index(spans[s].first + k);
        missing |= slabs.state(index) == State::kAbsent || slabs.revoked(index);
        rotating &= slabs.state(index) == State::kRotating;
        ready &= slabs.state(index) == State::kRestored;
        queued &= slabs.state(index) == State::kRestored || slabs.state(index) == State::kQueued;
        restored += slabs.state(index) == State::kRestored;
      }
      const Stage expected = missing    ? Stage::kAbsent
                             : rotating ? Stage::kRotating
                             : ready    ? Stage::kReady
                             : queued   ? Stage::kQueued
                                        : Stage::kComing;
      ASSERT_EQ(gate.Get(static_cast<int>(s)), expected) << "step " << step;
      available &= !missing;
      ++seen[static_cast<size_t>(expected)];
    }
    ASSERT_EQ(slabs.Available(), available);
    ASSERT_EQ(slabs.restored(), restored);
  }
  for (const Stage stage :
       {Stage::kAbsent, Stage::kComing, Stage::kQueued, Stage::kReady, Stage::kRotating}) {
    EXPECT_GT(seen[static_cast<size_t>(stage)], 100);
  }
}

TEST(ParameterSlabsDeathTest, IllegalTransitionsAbort) {
  ParameterGateImpl gate(1, kLong);
  ParameterSlabs slabs({{0, 1}}, &gate);
  EXPECT_DEATH(slabs.Mapped(RegionIndex(0)), "without a promise");
  EXPECT_DEATH(slabs.Unmapped(RegionIndex(0)), "unmapped");
  EXPECT_DEATH(slabs.Revoke(RegionIndex(0)), "not here");
}

class ImageRestorerTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kSlabs = 64;

  ImageRestorerTest() : content_((kSlab * kSlabs).count(), 0), target_(content_.size(), 9) {
    std::mt19937_64 random(3);
    for (char& c : content_) c = static_cast<char>(random());
    for (uint32_t i = 0; i < kSlabs; ++i) {
      checksums_.push_back(SlabChecksum(absl::MakeConstSpan(
          reinterpret_cast<const std::byte*>(&content_[i * kSlab.count()]), kSlab.count())));
      all_.push_back(RegionIndex(i));
    }
  }

  UniqueFd Image(int seals = kImageSeals) {
    UniqueFd writable(::memfd_create("image", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(::write(writable.get(), content_.data(), content_.size()), content_.size());
    EXPECT_TRUE(SealMemory(writable.get(), seals).ok());
    return ReadOnly(writable);
  }
  absl::StatusOr<std::unique_ptr<HostImageRestorer>> Open(int threads, bool verify) {
    return HostImageRestorer::Open(Image(), {kSlab, checksums_, {0}, verify}, threads);
  }
  std::byte* target() { return reinterpret_cast<std::byte*>(target_.data()); }
  bool Equal(uint32_t slab) {
    return std::memcmp(&target_[slab * kSlab.count()], &content_[slab * kSlab.count()],
                       kSlab.count()) == 0;
  }

  std::string content_, target_;
  std::vector<uint64_t> checksums_;
  std::vector<RegionIndex> all_;
};

TEST_F(ImageRestorerTest, CopiesWhatIsWantedOnAnyNumberOfThreads) {
  for (const int threads : {1, 4}) {
    for (const bool verify : {true, false}) {
      std::fill(target_.begin(), target_.end(), 9);
      auto restorer = *Open(threads, verify);
      Mutex mu;
      std::vector<RegionIndex> done;
      const absl::Status status =
          restorer->Restore({target()}, all_,
                            {.wanted = [](RegionIndex slab) { return slab.value() % 3 != 0; },
                             .queued = nullptr,
                             .done =
                                 [&](RegionIndex slab) {
                                   MutexLock lock(&mu);
                                   done.push_back(slab);
                                 }});
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(done.size(), kSlabs - (kSlabs + 2) / 3);
      for (uint32_t i = 0; i < kSlabs; ++i) EXPECT_EQ(Equal(i), i % 3 != 0) << i;
    }
  }
}

TEST_F(ImageRestorerTest, OneWrongBitIsFoundAndItsSlabIsNeverDone) {
  content_[kSlab.count() * 40 + 12345] ^= 0x10;
  auto restorer = *Open(3, true);
  std::atomic<bool> wrong_done = false;
  const absl::Status status = restorer->Restore(
      {target()}, all_,
      {.wanted = [](RegionIndex) { return true; },
       .queued = nullptr,
       .done = [&](RegionIndex slab) { wrong_done = wrong_done || slab == RegionIndex(40); }});
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("slab 40 "));
  EXPECT_FALSE(wrong_done);
}

TEST_F(ImageRestorerTest, FilesThatAreNoSealedImageAreRefused) {
  const auto open = [&](UniqueFd image, size_t slabs = kSlabs) {
    checksums_.resize(slabs);
    return HostImageRestorer::Open(std::move(image), {kSlab, checksums_, {0}}, 1).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(open(Image(F_SEAL_SHRINK | F_SEAL_GROW))));
  EXPECT_TRUE(absl::IsInvalidArgument(open(Image(), kSlabs - 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(open(Memfd(kSlab * kSlabs, kImageSeals))));  // writable
  EXPECT_TRUE(absl::IsInvalidArgument(open(UniqueFd(::open("/proc/self/exe", O_RDONLY)))));
  EXPECT_TRUE(open(Image()).ok());
}

}  // namespace
}  // namespace palimpsest
