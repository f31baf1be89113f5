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

class CudaMemoryTest : public ::testing::Test {
 protected:
  CudaMemoryTest() {
    FakeCuda::Reset();
    RegisterFakeKernels();
    auto memory = CudaMemory::Open({.driver = &FakeCudaDriver(), .restore_window = kSlab * 3});
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
  }

  // Memory as a broker makes it; the broker's own handle.
  CudaAllocation Slab(Bytes size = kSlab) {
    return *CudaAllocation::Create(FakeCudaDriver(), 0, size);
  }
  static void Add(std::vector<SlabRegion::Arrival>& slabs, uint32_t slab, uint64_t memory_id,
                  UniqueFd memory) {
    slabs.push_back({SlabId(slab), Epoch(1), memory_id, std::move(memory)});
  }
  std::unique_ptr<SlabRegion> Region(uint32_t places) {
    return std::make_unique<SlabRegion>(*memory_->Reserve(places, kSlab), 0, places, kSlab);
  }

  std::unique_ptr<CudaMemory> memory_;
};

TEST_F(CudaMemoryTest, MapsManySlabsAtOnceWhereverPlacesAreFree) {
  auto region = Region(6);
  std::vector<CudaAllocation> broker;
  std::vector<SlabRegion::Arrival> first, rest;
  for (int i = 0; i < 5; ++i) broker.push_back(Slab());
  Add(first, 9, 0, *broker[0].Export());
  ASSERT_TRUE(region->Map(std::move(first), {RegionIndex(2)}).ok());
  for (uint32_t i = 1; i < 5; ++i) Add(rest, i, 0, *broker[i].Export());
  const auto places = region->MapAnywhere(std::move(rest));
  ASSERT_TRUE(places.ok()) << places.status();
  EXPECT_THAT(*places, ElementsAre(RegionIndex(0), RegionIndex(1), RegionIndex(3), RegionIndex(4)));
  std::memset(region->base(), 7, 5 * kSlabSize);
  EXPECT_EQ(static_cast<char>(*region->at(RegionIndex(4))), 7);
  ASSERT_TRUE(region->Unmap({RegionIndex(1), RegionIndex(2), RegionIndex(4)}).ok());
  EXPECT_EQ(region->mapped(), 2);
}

TEST_F(CudaMemoryTest, OneBadDescriptorLeavesNothingMapped) {
  auto region = Region(3);
  const size_t mappings = FakeCuda::Mappings();
  const CudaAllocation good = Slab(), large = Slab(kSlab * 2);
  const auto attempt = [&](UniqueFd bad) {
    std::vector<SlabRegion::Arrival> slabs;
    Add(slabs, 1, 0, *good.Export());
    Add(slabs, 2, 0, std::move(bad));
    const absl::Status status = region->MapAnywhere(std::move(slabs)).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("slab 2"));
    EXPECT_EQ(FakeCuda::Mappings(), mappings);
  };
  attempt(UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)));
  attempt(*large.Export());
  attempt(UniqueFd());
}

TEST_F(CudaMemoryTest, NamedMemoryIsKeptForTheNextGrant) {
  auto region = Region(2);
  const Bytes before = FakeCuda::InUse();
  CudaAllocation broker = Slab();
  std::vector<SlabRegion::Arrival> slabs;
  Add(slabs, 4, 77, *broker.Export());
  ASSERT_TRUE(region->MapAnywhere(std::move(slabs)).ok());
  std::memset(region->base(), 5, kSlabSize);
  EXPECT_FALSE(memory_->Keeps(77));
  ASSERT_TRUE(region->Unmap({RegionIndex(0)}).ok());
  EXPECT_TRUE(memory_->Keeps(77));

  std::vector<SlabRegion::Arrival> again;
  Add(again, 4, 77, UniqueFd());
  ASSERT_TRUE(region->Map(std::move(again), {RegionIndex(1)}).ok());
  EXPECT_EQ(static_cast<char>(*region->at(RegionIndex(1))), 5);
  EXPECT_TRUE(region->held()[0].memory->valid());  // can be returned to the next broker
  ASSERT_TRUE(region->Unmap({RegionIndex(1)}).ok());

  // Other memory of the same slab replaces what was kept.
  const CudaAllocation fresh = Slab();
  std::vector<SlabRegion::Arrival> other;
  Add(other, 4, 78, *fresh.Export());
  ASSERT_TRUE(region->MapAnywhere(std::move(other)).ok());
  ASSERT_TRUE(region->Unmap({RegionIndex(0)}).ok());
  EXPECT_FALSE(memory_->Keeps(77));
  memory_->DropKept();
  EXPECT_FALSE(memory_->Keeps(78));
  broker.Reset();
  EXPECT_EQ(FakeCuda::InUse() - before, kSlab);  // `fresh`
}

class CudaImageRestorerTest : public CudaMemoryTest {
 protected:
  static constexpr uint32_t kSlabs = 8;

  CudaImageRestorerTest() : content_(kSlabs * kSlabSize, 0), target_(content_.size(), 9) {
    std::mt19937_64 random(3);
    for (size_t i = 0; i + 8 <= content_.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(&content_[i], &word, 8);
    }
    shape_ = {.slab_bytes = kSlab, .checksums = {}, .stages = {0, 3}, .verify = true};
    for (uint32_t i = 0; i < kSlabs; ++i) {
      shape_.checksums.push_back(SlabChecksum(absl::MakeConstSpan(
          reinterpret_cast<const std::byte*>(&content_[i * kSlabSize]), kSlabSize)));
      all_.push_back(RegionIndex(i));
    }
  }

  UniqueFd Image() {
    UniqueFd writable(::memfd_create("image", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(::write(writable.get(), content_.data(), content_.size()), content_.size());
    EXPECT_EQ(::fcntl(writable.get(), F_ADD_SEALS, kImageSeals), 0);
    const std::string path = "/proc/self/fd/" + std::to_string(writable.get());
    return UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  }
  std::byte* target() { return reinterpret_cast<std::byte*>(target_.data()); }
  bool Equal(uint32_t slab) {
    return std::memcmp(&target_[slab * kSlabSize], &content_[slab * kSlabSize], kSlabSize) == 0;
  }

  std::string content_, target_;
  ImageShape shape_;
  std::vector<RegionIndex> all_;
};

TEST_F(CudaImageRestorerTest, CopiesWhatIsWantedInOrder) {
  for (const bool verify : {true, false}) {
    std::fill(target_.begin(), target_.end(), 9);
    shape_.verify = verify;
    auto restorer = *memory_->OpenImage(Image(), shape_);
    std::vector<RegionIndex> queued, done;
    const absl::Status status =
        restorer->Restore(target(), all_,
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

TEST_F(CudaImageRestorerTest, StagesAreOpenToAStreamBeforeTheirBytesAreThere) {
  auto restorer = *memory_->OpenImage(Image(), shape_);
  FakeCuda::Pause();
  std::atomic<int> queued = 0, done = 0;
  absl::Status status;
  std::thread thread([&] {
    status = restorer->Restore(target(), all_,
                               {.wanted = [](RegionIndex) { return true; },
                                .queued = [&](RegionIndex) { ++queued; },
                                .done = [&](RegionIndex) { ++done; }});
  });
  // The window holds three slabs, which is all of stage 0.
  while (queued < 3) std::this_thread::yield();
  EXPECT_EQ(done, 0);
  EXPECT_FALSE(Equal(2));
  ASSERT_TRUE(memory_->context()->MakeCurrent().ok());
  auto compute = *CudaStream::Create(memory_->context());
  const CudaDriver& driver = FakeCudaDriver();
  ASSERT_EQ(
      driver.cuStreamWaitEvent(compute.get(), static_cast<CUevent>(restorer->StageEvent(0, 0)), 0),
      CUDA_SUCCESS);
  std::string seen(kSlabSize, 0);
  ASSERT_EQ(
      driver.cuMemcpyDtoHAsync(seen.data(), reinterpret_cast<CUdeviceptr>(target() + 2 * kSlabSize),
                               kSlabSize, compute.get()),
      CUDA_SUCCESS);
  FakeCuda::Resume();
  ASSERT_TRUE(compute.Synchronize().ok());
  EXPECT_EQ(std::memcmp(seen.data(), &content_[2 * kSlabSize], kSlabSize), 0);
  thread.join();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(done, static_cast<int>(kSlabs));
}

TEST_F(CudaImageRestorerTest, BytesThatArriveWrongAreFoundAndNeverDone) {
  auto restorer = *memory_->OpenImage(Image(), shape_);
  FakeCuda::CorruptCopy(6);
  std::vector<RegionIndex> done;
  const absl::Status status =
      restorer->Restore(target(), all_,
                        {.wanted = [](RegionIndex) { return true; },
                         .queued = [](RegionIndex) {},
                         .done = [&](RegionIndex slab) { done.push_back(slab); }});
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("slab 5 "));
  EXPECT_THAT(done, ::testing::Not(::testing::Contains(RegionIndex(5))));
}

TEST_F(CudaImageRestorerTest, FilesThatAreNoImageAreRefused) {
  shape_.checksums.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(memory_->OpenImage(Image(), shape_).status()));
}

}  // namespace
}  // namespace palimpsest
