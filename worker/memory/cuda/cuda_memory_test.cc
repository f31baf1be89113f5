// Over the test double of the driver; tools/gpu-check does the same on a GPU.
#include "worker/memory/cuda/cuda_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "common/cuda/virtual_memory.h"
#include "common/memory_file.h"
#include "common/slab_checksum.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/memory/cuda/testing/fake_kernels.h"
#include "worker/memory/regions.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Bytes kSlab = MiB(2);
constexpr auto kSlabSize = static_cast<size_t>(kSlab.count());

// With one GPU, and with two.
class CudaMemoryTest : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  // A slab as a broker makes it; the broker's own handles.
  using Slab = std::vector<CudaAllocation>;

  CudaMemoryTest() {
    FakeCuda::Reset();
    RegisterFakeKernels();
    auto memory = CudaMemory::Open(
        {.driver = &FakeCudaDriver(), .gpus = GetParam(), .restore_window = kSlab * 3});
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
  }

  static int ranks() { return static_cast<int>(GetParam().size()); }

  static Slab MakeSlab(Bytes size = kSlab) {
    Slab slab;
    for (const int gpu : GetParam()) {
      slab.push_back(*CudaAllocation::Create(FakeCudaDriver(), gpu, size));
    }
    return slab;
  }
  static SlabDescriptors Export(const Slab& slab) {
    SlabDescriptors descriptors;
    for (const CudaAllocation& piece : slab) descriptors.push_back(*piece.Export());
    return descriptors;
  }
  static void Add(std::vector<SlabRegion::Arrival>& slabs, uint32_t slab, uint64_t memory_id,
                  SlabDescriptors memory) {
    slabs.push_back({SlabId(slab), Epoch(1), memory_id, std::move(memory)});
  }
  std::unique_ptr<SlabRegion> Region(uint32_t places) {
    return std::make_unique<SlabRegion>(*memory_->Reserve(places, kSlab), 0, places, kSlab);
  }
  static void Fill(SlabRegion& region, int value, size_t slabs) {
    for (int rank = 0; rank < ranks(); ++rank) {
      std::memset(region.base(rank), value + rank, slabs * kSlabSize);
    }
  }
  static bool Holds(const SlabRegion& region, RegionIndex index, int value) {
    for (int rank = 0; rank < ranks(); ++rank) {
      if (static_cast<int>(*region.at(index, rank)) != value + rank) return false;
    }
    return true;
  }
  static Bytes InUse() {
    Bytes all;
    for (const int gpu : GetParam()) all += FakeCuda::InUse(gpu);
    return all;
  }

  std::unique_ptr<CudaMemory> memory_;
};

INSTANTIATE_TEST_SUITE_P(Gpus, CudaMemoryTest,
                         ::testing::Values(std::vector<int>{0}, std::vector<int>{1, 0}),
                         [](const auto& info) { return std::to_string(info.param.size()); });

TEST_P(CudaMemoryTest, MapsManySlabsAtOnceWhereverPlacesAreFree) {
  auto region = Region(6);
  std::vector<Slab> broker;
  std::vector<SlabRegion::Arrival> first, rest;
  for (int i = 0; i < 5; ++i) broker.push_back(MakeSlab());
  Add(first, 9, 0, Export(broker[0]));
  ASSERT_TRUE(region->Map(std::move(first), {RegionIndex(2)}).ok());
  for (uint32_t i = 1; i < 5; ++i) Add(rest, i, 0, Export(broker[i]));
  const auto places = region->MapAnywhere(std::move(rest));
  ASSERT_TRUE(places.ok()) << places.status();
  EXPECT_THAT(*places, ElementsAre(RegionIndex(0), RegionIndex(1), RegionIndex(3), RegionIndex(4)));
  Fill(*region, 7, 5);
  EXPECT_TRUE(Holds(*region, RegionIndex(4), 7));
  ASSERT_TRUE(region->Unmap({RegionIndex(1), RegionIndex(2), RegionIndex(4)}).ok());
  EXPECT_EQ(region->mapped(), 2);
}

TEST_P(CudaMemoryTest, OneBadDescriptorLeavesNothingMapped) {
  auto region = Region(3);
  const size_t mappings = FakeCuda::Mappings();
  const Slab good = MakeSlab(), other = MakeSlab(), large = MakeSlab(kSlab * 2);
  const auto attempt = [&](SlabDescriptors bad) {
    std::vector<SlabRegion::Arrival> slabs;
    Add(slabs, 1, 0, Export(good));
    Add(slabs, 2, 0, std::move(bad));
    const absl::Status status = region->MapAnywhere(std::move(slabs)).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("slab 2"));
    EXPECT_EQ(FakeCuda::Mappings(), mappings);
  };
  // Right pieces, but for the last GPU's.
  const auto with_last = [&](UniqueFd last) {
    SlabDescriptors memory = Export(other);
    memory.back() = std::move(last);
    return memory;
  };
  attempt(with_last(UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC))));
  attempt(with_last(*large.back().Export()));
  attempt(with_last(*CudaAllocation::Create(FakeCudaDriver(), 2, kSlab)->Export()));
  attempt({});
}

TEST_P(CudaMemoryTest, NamedMemoryIsKeptForTheNextGrant) {
  auto region = Region(2);
  const Bytes before = InUse();
  Slab broker = MakeSlab();
  std::vector<SlabRegion::Arrival> slabs;
  Add(slabs, 4, 77, Export(broker));
  ASSERT_TRUE(region->MapAnywhere(std::move(slabs)).ok());
  Fill(*region, 5, 1);
  EXPECT_FALSE(memory_->Keeps(77));
  ASSERT_TRUE(region->Unmap({RegionIndex(0)}).ok());
  EXPECT_TRUE(memory_->Keeps(77));

  std::vector<SlabRegion::Arrival> again;
  Add(again, 4, 77, {});
  ASSERT_TRUE(region->Map(std::move(again), {RegionIndex(1)}).ok());
  EXPECT_TRUE(Holds(*region, RegionIndex(1), 5));
  // Can be returned to the next broker.
  EXPECT_EQ(region->held()[0].memory->size(), GetParam().size());
  ASSERT_TRUE(region->Unmap({RegionIndex(1)}).ok());

  // Other memory of the same slab replaces what was kept.
  const Slab fresh = MakeSlab();
  std::vector<SlabRegion::Arrival> other;
  Add(other, 4, 78, Export(fresh));
  ASSERT_TRUE(region->MapAnywhere(std::move(other)).ok());
  ASSERT_TRUE(region->Unmap({RegionIndex(0)}).ok());
  EXPECT_FALSE(memory_->Keeps(77));
  memory_->DropKept();
  EXPECT_FALSE(memory_->Keeps(78));
  broker.clear();
  EXPECT_EQ(InUse() - before, kSlab * ranks());  // `fresh`
}

TEST_P(CudaMemoryTest, OneImportServesAllPlacesOfASlabAndIsKeptBehindTheLast) {
  auto region = Region(4);
  const size_t mappings = FakeCuda::Mappings();
  const Slab broker = MakeSlab();
  std::vector<SlabRegion::Arrival> slabs;
  Add(slabs, 4, 77, Export(broker));
  ASSERT_TRUE(region->Map(std::move(slabs), {RegionIndex(0)}).ok());
  const SlabRegion::Held held = region->held()[0];
  EXPECT_EQ(held.memory_id, 77);
  const auto at = [&](uint32_t place) {
    SlabRegion::Held alias = held;
    alias.index = RegionIndex(place);
    return alias;
  };
  ASSERT_TRUE(region->Occupy({}, {at(1), at(3)}).ok());
  Fill(*region, 5, 2);
  EXPECT_TRUE(Holds(*region, RegionIndex(3), 5));
  ASSERT_TRUE(region->Vacate({RegionIndex(0), RegionIndex(1)}).ok());
  EXPECT_FALSE(memory_->Keeps(77));
  EXPECT_TRUE(Holds(*region, RegionIndex(3), 5));
  ASSERT_TRUE(region->Occupy({at(2)}, {}).ok());
  EXPECT_TRUE(Holds(*region, RegionIndex(2), 5));
  ASSERT_TRUE(region->Vacate({RegionIndex(3), RegionIndex(2)}).ok());
  EXPECT_TRUE(memory_->Keeps(77));
  EXPECT_EQ(FakeCuda::Mappings(), mappings);
  // What was held and mapped nowhere comes back by what was kept, or by its descriptors.
  ASSERT_TRUE(region->Occupy({at(1)}, {at(0)}).ok());
  EXPECT_FALSE(memory_->Keeps(77));
  ASSERT_TRUE(region->Vacate({RegionIndex(1), RegionIndex(0)}).ok());
  memory_->DropKept();
  ASSERT_TRUE(region->Occupy({at(1)}, {at(0)}).ok());
  EXPECT_TRUE(Holds(*region, RegionIndex(0), 5));
}

class CudaImageRestorerTest : public CudaMemoryTest {
 protected:
  static constexpr uint32_t kSlabs = 8;
  static constexpr size_t kPart = kSlabs * kSlabSize;

  CudaImageRestorerTest()
      : content_(kPart * GetParam().size(), 0), target_(GetParam().size(), std::string(kPart, 9)) {
    std::mt19937_64 random(3);
    for (size_t i = 0; i + 8 <= content_.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(&content_[i], &word, 8);
    }
    shape_ = {.slab_bytes = kSlab, .checksums = {}, .stages = {0, 3}, .ranks = ranks()};
    for (size_t i = 0; i < content_.size(); i += kSlabSize) {
      shape_.checksums.push_back(SlabChecksum(
          absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&content_[i]), kSlabSize)));
    }
    for (uint32_t i = 0; i < kSlabs; ++i) all_.push_back(RegionIndex(i));
  }

  UniqueFd Image() {
    UniqueFd writable(::memfd_create("image", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(::write(writable.get(), content_.data(), content_.size()), content_.size());
    EXPECT_TRUE(SealMemory(writable.get(), kImageSeals).ok());
    const std::string path = "/proc/self/fd/" + std::to_string(writable.get());
    return UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  }
  std::vector<std::byte*> targets() {
    std::vector<std::byte*> all;
    for (std::string& target : target_) all.push_back(reinterpret_cast<std::byte*>(target.data()));
    return all;
  }
  bool Same(const char* seen, size_t rank, uint32_t slab) {
    return std::memcmp(seen, &content_[rank * kPart + slab * kSlabSize], kSlabSize) == 0;
  }
  // Whether every rank has its own part's slab, or none has.
  bool Equal(uint32_t slab) {
    size_t equal = 0;
    for (size_t rank = 0; rank < target_.size(); ++rank) {
      equal += Same(&target_[rank][slab * kSlabSize], rank, slab);
    }
    EXPECT_TRUE(equal == 0 || equal == target_.size());
    return equal > 0;
  }

  std::string content_;
  std::vector<std::string> target_;  // by rank
  ImageShape shape_;
  std::vector<RegionIndex> all_;
};

INSTANTIATE_TEST_SUITE_P(Gpus, CudaImageRestorerTest,
                         ::testing::Values(std::vector<int>{0}, std::vector<int>{1, 0}),
                         [](const auto& info) { return std::to_string(info.param.size()); });

TEST_P(CudaImageRestorerTest, CopiesWhatIsWantedInOrder) {
  for (const bool verify : {true, false}) {
    for (std::string& target : target_) std::fill(target.begin(), target.end(), 9);
    shape_.verify = verify;
    auto restorer = *memory_->OpenImage(Image(), shape_);
    for (uint32_t rank = 0; rank < GetParam().size(); ++rank) {
      // The image is smaller than what is registered at once.
      const std::vector<ImagePiece> pieces = restorer->Pieces(static_cast<int>(rank));
      ASSERT_EQ(pieces.size(), 1u);
      EXPECT_EQ(pieces[0].size, kSlab * kSlabs);
      EXPECT_TRUE(Same(reinterpret_cast<const char*>(pieces[0].data) + kSlabSize, rank, 1));
    }
    std::vector<RegionIndex> queued, done;
    const absl::Status status =
        restorer->Restore(targets(), all_,
                          {.wanted = [](RegionIndex slab) { return slab.value() % 3 != 0; },
                           .queued = [&](RegionIndex slab) { queued.push_back(slab); },
                           .done = [&](RegionIndex slab) { done.push_back(slab); }});
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_THAT(done, ElementsAre(RegionIndex(1), RegionIndex(2), RegionIndex(4), RegionIndex(5),
                                  RegionIndex(7)));
    EXPECT_EQ(queued, done);
    for (uint32_t i = 0; i < kSlabs; ++i) EXPECT_EQ(Equal(i), i % 3 != 0) << i;
  }
  EXPECT_EQ(FakeCuda::Registered(), 0u);
}

TEST_P(CudaImageRestorerTest, StagesAreOpenToStreamsBeforeTheirBytesAreThere) {
  auto restorer = *memory_->OpenImage(Image(), shape_);
  FakeCuda::Pause();
  std::atomic<int> queued = 0, done = 0;
  absl::Status status;
  std::thread thread([&] {
    status = restorer->Restore(targets(), all_,
                               {.wanted = [](RegionIndex) { return true; },
                                .queued = [&](RegionIndex) { ++queued; },
                                .done = [&](RegionIndex) { ++done; }});
  });
  // The window holds three slabs, which is all of stage 0.
  while (queued < 3) std::this_thread::yield();
  EXPECT_EQ(done, 0);
  EXPECT_FALSE(Equal(2));
  const CudaDriver& driver = FakeCudaDriver();
  std::vector<CudaStream> compute;
  std::vector<std::string> seen(GetParam().size(), std::string(kSlabSize, 0));
  for (int rank = 0; rank < ranks(); ++rank) {
    ASSERT_TRUE(memory_->context(rank)->MakeCurrent().ok());
    compute.push_back(*CudaStream::Create(memory_->context(rank)));
    const auto event = static_cast<CUevent>(restorer->StageEvent(0, rank));
    ASSERT_EQ(driver.cuStreamWaitEvent(compute.back().get(), event, 0), CUDA_SUCCESS);
    const auto from = reinterpret_cast<CUdeviceptr>(targets()[rank] + 2 * kSlabSize);
    ASSERT_EQ(driver.cuMemcpyDtoHAsync(seen[rank].data(), from, kSlabSize, compute.back().get()),
              CUDA_SUCCESS);
  }
  FakeCuda::Resume();
  for (size_t rank = 0; rank < seen.size(); ++rank) {
    ASSERT_TRUE(compute[rank].Synchronize().ok());
    EXPECT_TRUE(Same(seen[rank].data(), rank, 2));
  }
  thread.join();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(done, static_cast<int>(kSlabs));
}

// At one byte per second a second slab would wait for weeks.
TEST_P(CudaImageRestorerTest, CopiesAreHeldBackOneByOne) {
  auto restorer = *memory_->OpenImage(Image(), shape_);
  LinkPacer pacer;
  pacer.SetLimit(1);
  std::atomic<int> queued = 0, done = 0;
  absl::Status status;
  std::thread thread([&] {
    status = restorer->Restore(targets(), all_,
                               {.wanted = [](RegionIndex) { return true; },
                                .queued = [&](RegionIndex) { ++queued; },
                                .done = [&](RegionIndex) { ++done; },
                                .pacer = &pacer});
  });
  // It is done before the next one's turn.
  while (done < 1) std::this_thread::yield();
  EXPECT_EQ(queued, 1);
  EXPECT_TRUE(Equal(0));
  pacer.SetLimit(0);
  thread.join();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(done, static_cast<int>(kSlabs));
  // On the link of each GPU.
  EXPECT_EQ(pacer.copied(LinkPacer::Kind::kRestore), kSlab * kSlabs);
}

TEST_P(CudaImageRestorerTest, BytesThatArriveWrongAreFoundAndNeverDone) {
  auto restorer = *memory_->OpenImage(Image(), shape_);
  // One GPU's sixth at the latest.
  FakeCuda::CorruptCopy(ranks() * 6);
  std::vector<RegionIndex> done;
  const absl::Status status =
      restorer->Restore(targets(), all_,
                        {.wanted = [](RegionIndex) { return true; },
                         .queued = [](RegionIndex) {},
                         .done = [&](RegionIndex slab) { done.push_back(slab); }});
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("of the parameter image has checksum"));
  for (const RegionIndex slab : done) EXPECT_TRUE(Equal(slab.value())) << slab;
}

constexpr int kPeer = 2;

class PeerImageTest : public CudaImageRestorerTest {
 protected:
  // Memory on another GPU, and its descriptors for each rank, of which this process keeps none.
  static std::vector<SlabDescriptors> Memory(size_t slabs) {
    std::vector<SlabDescriptors> memory(slabs);
    for (SlabDescriptors& slab : memory) {
      for (int rank = 0; rank < ranks(); ++rank) {
        slab.push_back(*CudaAllocation::Create(FakeCudaDriver(), kPeer, kSlab)->Export());
      }
    }
    return memory;
  }

  // Whether exactly these slabs, from the first on, come with the mark on their first byte.
  void ExpectMarked(ImageRestorer& restorer, uint32_t slabs, char mark) {
    for (std::string& target : target_) std::fill(target.begin(), target.end(), 9);
    const absl::Status status = restorer.Restore(targets(), all_,
                                                 {.wanted = [](RegionIndex) { return true; },
                                                  .queued = [](RegionIndex) {},
                                                  .done = [](RegionIndex) {}});
    ASSERT_TRUE(status.ok()) << status;
    for (size_t rank = 0; rank < target_.size(); ++rank) {
      for (uint32_t slab = 0; slab < kSlabs; ++slab) {
        std::string expected = content_.substr(rank * kPart + slab * kSlabSize, kSlabSize);
        if (slab < slabs) expected[0] = mark;
        EXPECT_EQ(target_[rank].compare(slab * kSlabSize, kSlabSize, expected), 0) << slab;
      }
    }
  }

  // Of the copy, as a runner sees it.
  void Mark(ImageRestorer& restorer, char mark) {
    for (int rank = 0; rank < ranks(); ++rank) {
      const ImagePiece copy = restorer.Pieces(rank)[0];
      auto* const bytes = reinterpret_cast<char*>(const_cast<std::byte*>(copy.data));
      for (Bytes at; at < copy.size; at += kSlab) bytes[at.count()] = mark;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Gpus, PeerImageTest,
                         ::testing::Values(std::vector<int>{0}, std::vector<int>{1, 0}),
                         [](const auto& info) { return std::to_string(info.param.size()); });

TEST_P(PeerImageTest, WhatItHasIsCopiedFromThereUntilItIsDropped) {
  shape_.verify = false;
  const Bytes before = FakeCuda::InUse(kPeer);
  for (const uint32_t slabs : {kSlabs, 5u, 1u}) {
    auto restorer = *memory_->OpenImage(Image(), shape_);
    const auto rate = restorer->KeepCopy(Memory(slabs));
    ASSERT_TRUE(rate.ok()) << rate.status();
    EXPECT_GT(*rate, 0);
    EXPECT_EQ(FakeCuda::InUse(kPeer), before + kSlab * slabs * ranks());
    ExpectMarked(*restorer, 0, 0);  // the copy is the image's
    for (int rank = 0; rank < ranks(); ++rank) {
      const std::vector<ImagePiece> pieces = restorer->Pieces(rank);
      ASSERT_EQ(pieces.size(), slabs == kSlabs ? 1u : 2u);
      EXPECT_EQ(pieces[0].size, kSlab * slabs);
      if (slabs == kSlabs) continue;
      EXPECT_EQ(pieces[1].size, kSlab * (kSlabs - slabs));
      EXPECT_TRUE(Same(reinterpret_cast<const char*>(pieces[1].data), rank, slabs));
    }
    Mark(*restorer, '?');
    ExpectMarked(*restorer, slabs, '?');
    restorer->DropCopy();
    EXPECT_EQ(FakeCuda::InUse(kPeer), before);
    EXPECT_EQ(restorer->Pieces(0).size(), 1u);
    ExpectMarked(*restorer, 0, 0);
  }
}

TEST_P(PeerImageTest, WrongBytesInItAreFound) {
  auto restorer = *memory_->OpenImage(Image(), shape_);
  ASSERT_TRUE(restorer->KeepCopy(Memory(3)).ok());
  Mark(*restorer, '?');
  const absl::Status status = restorer->Restore(targets(), all_,
                                                {.wanted = [](RegionIndex) { return true; },
                                                 .queued = [](RegionIndex) {},
                                                 .done = [](RegionIndex) {}});
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
}

TEST_P(PeerImageTest, MemoryThatCannotBeUsedChangesNothing) {
  shape_.verify = false;
  auto restorer = *memory_->OpenImage(Image(), shape_);
  const Bytes before = FakeCuda::InUse(kPeer);
  const size_t mappings = FakeCuda::Mappings();
  const auto refused = [&](std::vector<SlabDescriptors> memory) {
    EXPECT_FALSE(restorer->KeepCopy(std::move(memory)).ok());
    EXPECT_EQ(FakeCuda::Mappings(), mappings);
    EXPECT_EQ(FakeCuda::InUse(kPeer), before);
    ExpectMarked(*restorer, 0, 0);
  };
  FakeCuda::SetPeerAccess(false);
  refused(Memory(3));
  FakeCuda::SetPeerAccess(true);
  refused({});
  refused(Memory(kSlabs + 1));
  std::vector<SlabDescriptors> short_one = Memory(2);
  short_one.back().pop_back();
  refused(std::move(short_one));
  std::vector<SlabDescriptors> no_memory = Memory(2);
  no_memory.back().back() = Image();
  refused(std::move(no_memory));
  // Without room on its own GPU for a moment its speed is not known.
  for (const int gpu : GetParam()) FakeCuda::SetMemory(gpu, FakeCuda::InUse(gpu));
  const auto rate = restorer->KeepCopy(Memory(3));
  ASSERT_TRUE(rate.ok()) << rate.status();
  EXPECT_EQ(*rate, 0);
}

TEST_P(CudaMemoryTest, HostMemoryIsPinnedForAllAndLetGo) {
  std::vector<std::byte> memory(KiB(64).count());
  {
    const auto pin = memory_->Pin(absl::MakeSpan(memory));
    ASSERT_TRUE(pin.ok()) << pin.status();
    EXPECT_TRUE(FakeCuda::IsRegistered(memory.data()));
    EXPECT_FALSE(memory_->Pin(absl::MakeSpan(memory)).ok());
  }
  EXPECT_FALSE(FakeCuda::IsRegistered(memory.data()));
  FakeCuda::RefuseRegistrations(true);
  EXPECT_TRUE(absl::IsResourceExhausted(memory_->Pin(absl::MakeSpan(memory)).status()));
  FakeCuda::RefuseRegistrations(false);
}

TEST_P(CudaImageRestorerTest, FilesThatAreNoImageAreRefused) {
  ImageShape parts = shape_;
  ++parts.ranks;
  EXPECT_TRUE(absl::IsInvalidArgument(memory_->OpenImage(Image(), parts).status()));
  shape_.checksums.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(memory_->OpenImage(Image(), shape_).status()));
}

}  // namespace
}  // namespace palimpsest
