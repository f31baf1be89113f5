// Over the test double of the driver; tools/gpu-check does the same on a GPU.
#include "broker/device/cuda_slab_device.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/cuda/testing/fake_driver.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr Bytes kSlab = MiB(4);

// With one GPU, and with two.
class CudaSlabDeviceTest : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  CudaSlabDeviceTest() { FakeCuda::Reset(); }

  std::unique_ptr<CudaSlabDevice> Open(uint32_t slabs = 4, uint32_t generation = 1) {
    auto device = CudaSlabDevice::Open({.driver = &FakeCudaDriver(),
                                        .gpus = GetParam(),
                                        .slabs = slabs,
                                        .slab_bytes = kSlab,
                                        .generation = generation,
                                        .other_descriptors = 16});
    EXPECT_TRUE(device.ok()) << device.status();
    return *std::move(device);
  }

  // What a worker sees behind a slab's descriptors.
  class Seen {
   public:
    Seen(const std::vector<int>& gpus, const SlabDescriptors& descriptors) {
      EXPECT_EQ(descriptors.size(), gpus.size());
      for (size_t i = 0; i < gpus.size(); ++i) {
        ranges_.push_back(*CudaAddressRange::Reserve(FakeCudaDriver(), gpus[i], kSlab));
        auto memory = CudaAllocation::Import(FakeCudaDriver(), gpus[i], descriptors[i]);
        EXPECT_TRUE(memory.ok()) << memory.status();
        EXPECT_TRUE(ranges_[i].Map(Bytes(0), kSlab, *memory).ok());
        EXPECT_TRUE(ranges_[i].Open(Bytes(0), kSlab).ok());
      }
    }
    Seen(Seen&&) = default;
    ~Seen() {
      for (const CudaAddressRange& range : ranges_) {
        EXPECT_TRUE(range.Unmap(Bytes(0), kSlab).ok());
      }
    }
    // A different pattern in each piece.
    void Fill(char value) {
      for (const CudaAddressRange& range : ranges_) {
        std::memset(reinterpret_cast<char*>(range.base()), value++, kSlab.count());
      }
    }
    bool Holds(char value, char step = 1) const {
      for (const CudaAddressRange& range : ranges_) {
        const auto* const data = reinterpret_cast<const char*>(range.base());
        if (!std::all_of(data, data + kSlab.count(), [value](char c) { return c == value; })) {
          return false;
        }
        value = static_cast<char>(value + step);
      }
      return true;
    }
    bool AllZero() const { return Holds(0, 0); }

   private:
    std::vector<CudaAddressRange> ranges_;
  };
  Seen Look(CudaSlabDevice& device, uint32_t slab) {
    return Seen(GetParam(), *device.Descriptors(SlabId(slab)));
  }

  // Every GPU has lost this much since the start.
  bool InUse(Bytes more) {
    return std::all_of(GetParam().begin(), GetParam().end(), [&](int gpu) {
      return FakeCuda::InUse(gpu) - before_[static_cast<size_t>(gpu)] == more;
    });
  }

  const std::vector<Bytes> before_ = {FakeCuda::InUse(0), FakeCuda::InUse(1)};
};

INSTANTIATE_TEST_SUITE_P(Gpus, CudaSlabDeviceTest,
                         ::testing::Values(std::vector<int>{0}, std::vector<int>{1, 0}),
                         [](const auto& info) { return std::to_string(info.param.size()); });

TEST_P(CudaSlabDeviceTest, LinksAreMeasuredWithMemoryThatIsGivenBack) {
  auto device = Open();
  EXPECT_TRUE(device->Links().empty());
  const absl::Status status = device->MeasureLinks();
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(device->Links().size(), GetParam().size());
  for (const SlabDevice::Link& link : device->Links()) {
    EXPECT_GT(link.to_device, 0);
    EXPECT_GT(link.from_device, 0);
  }
  for (const int gpu : GetParam()) EXPECT_EQ(FakeCuda::InUse(gpu), Bytes(0));
}

TEST_P(CudaSlabDeviceTest, LinksOfGpusWithoutMemoryToSpareAreNotKnown) {
  auto device = Open(1);
  FakeCuda::SetMemory(GetParam().back(), kSlab);
  EXPECT_FALSE(device->MeasureLinks().ok());
  EXPECT_TRUE(device->Links().empty());
  for (const int gpu : GetParam()) EXPECT_EQ(FakeCuda::InUse(gpu), Bytes(0));
  FakeCuda::Reset();
}

TEST_P(CudaSlabDeviceTest, SlabsAreZeroedNamedAndReleased) {
  {
    auto device = Open();
    EXPECT_EQ(device->pieces(), GetParam().size());
    EXPECT_EQ(device->Descriptors(SlabId(0)), nullptr);
    ASSERT_TRUE(device->Create(SlabId(0)).ok());
    ASSERT_TRUE(device->Create(SlabId(3)).ok());
    EXPECT_TRUE(absl::IsAlreadyExists(device->Create(SlabId(0))));
    EXPECT_TRUE(absl::IsInvalidArgument(device->Create(SlabId(4))));
    EXPECT_TRUE(Look(*device, 0).AllZero());
    EXPECT_NE(device->MemoryId(SlabId(0)), 0u);
    EXPECT_NE(device->MemoryId(SlabId(0)), device->MemoryId(SlabId(3)));
    EXPECT_TRUE(InUse(kSlab * 2));
    for (const UniqueFd& piece : *device->Descriptors(SlabId(0))) {
      EXPECT_EQ(::fcntl(piece.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    }
  }
  EXPECT_TRUE(InUse(Bytes(0)));
}

TEST_P(CudaSlabDeviceTest, ScrubZeroesInPlaceAndKeepsTheMemory) {
  auto device = Open();
  for (uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(device->Create(SlabId(i)).ok());
  Seen worker = Look(*device, 1);
  worker.Fill(5);
  const uint64_t name = device->MemoryId(SlabId(1));
  // One that never got memory gets some.
  ASSERT_TRUE(device->Scrub({SlabId(3), SlabId(1), SlabId(0)}).ok());
  EXPECT_TRUE(worker.AllZero());
  EXPECT_EQ(device->MemoryId(SlabId(1)), name);
  EXPECT_TRUE(Look(*device, 3).AllZero());
  EXPECT_TRUE(absl::IsInvalidArgument(device->Scrub({SlabId(4)})));
}

TEST_P(CudaSlabDeviceTest, RetireLeavesTheOldMemoryToWhoeverStillHasIt) {
  auto device = Open();
  ASSERT_TRUE(device->Create(SlabId(0)).ok());
  const uint64_t name = device->MemoryId(SlabId(0));
  {
    Seen liar = Look(*device, 0);
    liar.Fill(5);
    ASSERT_TRUE(device->Retire(SlabId(0)).ok());
    EXPECT_NE(device->MemoryId(SlabId(0)), name);
    liar.Fill(6);
    EXPECT_TRUE(Look(*device, 0).AllZero());
    EXPECT_TRUE(InUse(kSlab * 2));
  }
  EXPECT_TRUE(InUse(kSlab));
}

TEST_P(CudaSlabDeviceTest, RetireWithoutMemoryOnOneGpuTakesNoneAndCanBeRepeated) {
  auto device = Open();
  ASSERT_TRUE(device->Create(SlabId(0)).ok());
  {
    const Seen liar = Look(*device, 0);
    const int full = GetParam().back();
    FakeCuda::SetMemory(full, before_[static_cast<size_t>(full)] + kSlab);
    EXPECT_TRUE(absl::IsResourceExhausted(device->Retire(SlabId(0))));
    EXPECT_EQ(device->Descriptors(SlabId(0)), nullptr);
    EXPECT_TRUE(InUse(kSlab));  // the liar's
    FakeCuda::SetMemory(GiB(1));
  }
  EXPECT_TRUE(device->Retire(SlabId(0)).ok());
  EXPECT_TRUE(InUse(kSlab));
}

TEST_P(CudaSlabDeviceTest, ReturnedSlabIsAdoptedWithItsContentAndName) {
  auto old_broker = Open();
  ASSERT_TRUE(old_broker->Create(SlabId(2)).ok());
  auto worker = std::make_unique<Seen>(Look(*old_broker, 2));
  worker->Fill(7);
  const SlabDevice::Identity granted = old_broker->IdentityOf(SlabId(2));
  SlabDescriptors kept;
  for (const UniqueFd& piece : *old_broker->Descriptors(SlabId(2))) {
    kept.push_back(*piece.Duplicate());
  }
  old_broker.reset();

  auto device = Open(4, 2);
  ASSERT_TRUE(device->Create(SlabId(0)).ok());
  ASSERT_TRUE(device->Adopt(SlabId(2), std::move(kept), granted).ok());
  EXPECT_EQ(device->IdentityOf(SlabId(2)), granted);
  EXPECT_NE(device->MemoryId(SlabId(0)), device->MemoryId(SlabId(2)));
  EXPECT_TRUE(Look(*device, 2).Holds(7));
  // It is the worker's memory, not a copy, and it can be scrubbed and handed on.
  ASSERT_TRUE(device->Scrub({SlabId(2)}).ok());
  EXPECT_TRUE(worker->AllZero());
}

TEST_P(CudaSlabDeviceTest, ReturnedDescriptorsThatAreNoSlabsAreRefused) {
  auto device = Open();
  ASSERT_TRUE(device->Create(SlabId(0)).ok());
  const SlabDevice::Identity granted = device->IdentityOf(SlabId(0));
  // Right pieces, but for the last GPU's.
  const auto with_last = [](UniqueFd last) {
    SlabDescriptors memory;
    for (size_t i = 0; i + 1 < GetParam().size(); ++i) {
      memory.push_back(*CudaAllocation::Create(FakeCudaDriver(), GetParam()[i], kSlab)->Export());
    }
    memory.push_back(std::move(last));
    return memory;
  };
  const auto adopt = [&](SlabDescriptors memory) {
    return device->Adopt(SlabId(1), std::move(memory), granted);
  };
  const int gpu = GetParam().back();
  EXPECT_TRUE(
      absl::IsInvalidArgument(adopt(with_last(UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC))))));
  auto small = CudaAllocation::Create(FakeCudaDriver(), gpu, kSlab / 2);
  ASSERT_TRUE(small.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(adopt(with_last(*small->Export()))));
  auto elsewhere = CudaAllocation::Create(FakeCudaDriver(), 2, kSlab);
  ASSERT_TRUE(elsewhere.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(adopt(with_last(*elsewhere->Export()))));
  EXPECT_TRUE(absl::IsInvalidArgument(adopt({})));
  auto right = CudaAllocation::Create(FakeCudaDriver(), gpu, kSlab);
  ASSERT_TRUE(right.ok());
  const absl::Status host = device->Adopt(SlabId(1), with_last(*right->Export()), {1, 2});
  EXPECT_THAT(std::string(host.message()), HasSubstr("not GPU memory"));
  EXPECT_EQ(device->Descriptors(SlabId(1)), nullptr);
  EXPECT_TRUE(adopt(with_last(*right->Export())).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(adopt(with_last(*right->Export()))));
}

TEST_P(CudaSlabDeviceTest, PoolsThatCannotBeAreRefused) {
  const CudaSlabDevice::Options good = {.driver = &FakeCudaDriver(),
                                        .gpus = GetParam(),
                                        .slabs = 4,
                                        .slab_bytes = kSlab,
                                        .other_descriptors = 16};
  for (const auto& change : std::vector<std::function<void(CudaSlabDevice::Options&)>>{
           [](auto& o) { o.gpus.back() = FakeCuda::kDevices; }, [](auto& o) { o.gpus.clear(); },
           [](auto& o) { o.slabs = 0; }, [](auto& o) { o.slab_bytes = MiB(3); },
           [](auto& o) { o.slab_bytes = GiB(32); }}) {
    CudaSlabDevice::Options options = good;
    change(options);
    EXPECT_FALSE(CudaSlabDevice::Open(options).ok());
  }
  EXPECT_TRUE(CudaSlabDevice::Open(good).ok());
}

}  // namespace
}  // namespace palimpsest
