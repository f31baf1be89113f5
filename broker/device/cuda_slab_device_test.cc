// Over the test double of the driver; tools/gpu-check does the same on a GPU.
#include "broker/device/cuda_slab_device.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "common/cuda/testing/fake_driver.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr Bytes kSlab = MiB(4);

class CudaSlabDeviceTest : public ::testing::Test {
 protected:
  CudaSlabDeviceTest() { FakeCuda::Reset(); }

  std::unique_ptr<CudaSlabDevice> Open(uint32_t slabs = 4, uint32_t generation = 1) {
    auto device = CudaSlabDevice::Open({.driver = &FakeCudaDriver(),
                                        .slabs = slabs,
                                        .slab_bytes = kSlab,
                                        .generation = generation,
                                        .other_descriptors = 16});
    EXPECT_TRUE(device.ok()) << device.status();
    return *std::move(device);
  }

  // What a worker sees behind a descriptor.
  class Seen {
   public:
    explicit Seen(const UniqueFd& descriptor)
        : range_(*CudaAddressRange::Reserve(FakeCudaDriver(), 0, kSlab)) {
      auto memory = CudaAllocation::Import(FakeCudaDriver(), 0, descriptor);
      EXPECT_TRUE(memory.ok()) << memory.status();
      EXPECT_TRUE(range_.Map(Bytes(0), kSlab, *memory).ok());
      EXPECT_TRUE(range_.Open(Bytes(0), kSlab).ok());
    }
    ~Seen() { EXPECT_TRUE(range_.Unmap(Bytes(0), kSlab).ok()); }
    char* data() { return reinterpret_cast<char*>(range_.base()); }
    bool All(char value) {
      return std::all_of(data(), data() + kSlab.count(), [value](char c) { return c == value; });
    }

   private:
    CudaAddressRange range_;
  };
  Seen Look(CudaSlabDevice& device, uint32_t slab) {
    return Seen(*device.Descriptor(SlabId(slab)));
  }

  const Bytes before_ = FakeCuda::InUse();
};

TEST_F(CudaSlabDeviceTest, SlabsAreZeroedNamedAndReleased) {
  {
    auto device = Open();
    EXPECT_EQ(device->Descriptor(SlabId(0)), nullptr);
    ASSERT_TRUE(device->Create(SlabId(0)).ok());
    ASSERT_TRUE(device->Create(SlabId(3)).ok());
    EXPECT_TRUE(absl::IsAlreadyExists(device->Create(SlabId(0))));
    EXPECT_TRUE(absl::IsInvalidArgument(device->Create(SlabId(4))));
    EXPECT_TRUE(Look(*device, 0).All(0));
    EXPECT_NE(device->MemoryId(SlabId(0)), 0u);
    EXPECT_NE(device->MemoryId(SlabId(0)), device->MemoryId(SlabId(3)));
    EXPECT_EQ(FakeCuda::InUse() - before_, kSlab * 2);
    EXPECT_EQ(::fcntl(device->Descriptor(SlabId(0))->get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  }
  EXPECT_EQ(FakeCuda::InUse(), before_);
}

TEST_F(CudaSlabDeviceTest, ScrubZeroesInPlaceAndKeepsTheMemory) {
  auto device = Open();
  for (uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(device->Create(SlabId(i)).ok());
  Seen worker = Look(*device, 1);
  std::memset(worker.data(), 5, kSlab.count());
  const uint64_t name = device->MemoryId(SlabId(1));
  // One that never got memory gets some.
  ASSERT_TRUE(device->Scrub({SlabId(3), SlabId(1), SlabId(0)}).ok());
  EXPECT_TRUE(worker.All(0));
  EXPECT_EQ(device->MemoryId(SlabId(1)), name);
  EXPECT_TRUE(Look(*device, 3).All(0));
  EXPECT_TRUE(absl::IsInvalidArgument(device->Scrub({SlabId(4)})));
}

TEST_F(CudaSlabDeviceTest, RetireLeavesTheOldMemoryToWhoeverStillHasIt) {
  auto device = Open();
  ASSERT_TRUE(device->Create(SlabId(0)).ok());
  const uint64_t name = device->MemoryId(SlabId(0));
  {
    Seen liar = Look(*device, 0);
    std::memset(liar.data(), 5, kSlab.count());
    ASSERT_TRUE(device->Retire(SlabId(0)).ok());
    EXPECT_NE(device->MemoryId(SlabId(0)), name);
    std::memset(liar.data(), 6, kSlab.count());
    EXPECT_TRUE(Look(*device, 0).All(0));
    EXPECT_EQ(FakeCuda::InUse() - before_, kSlab * 2);
  }
  EXPECT_EQ(FakeCuda::InUse() - before_, kSlab);
}

TEST_F(CudaSlabDeviceTest, RetireWithoutMemoryCanBeRepeated) {
  auto device = Open();
  ASSERT_TRUE(device->Create(SlabId(0)).ok());
  const Seen liar = Look(*device, 0);
  FakeCuda::SetMemory(before_ + kSlab);
  EXPECT_TRUE(absl::IsResourceExhausted(device->Retire(SlabId(0))));
  EXPECT_EQ(device->Descriptor(SlabId(0)), nullptr);
  FakeCuda::SetMemory(GiB(1));
  EXPECT_TRUE(device->Retire(SlabId(0)).ok());
}

TEST_F(CudaSlabDeviceTest, ReturnedSlabIsAdoptedWithItsContentAndName) {
  auto old_broker = Open();
  ASSERT_TRUE(old_broker->Create(SlabId(2)).ok());
  auto worker = std::make_unique<Seen>(*old_broker->Descriptor(SlabId(2)));
  std::memset(worker->data(), 7, kSlab.count());
  const SlabDevice::Identity granted = old_broker->IdentityOf(SlabId(2));
  UniqueFd kept = *old_broker->Descriptor(SlabId(2))->Duplicate();
  old_broker.reset();

  auto device = Open(4, 2);
  ASSERT_TRUE(device->Create(SlabId(0)).ok());
  ASSERT_TRUE(device->Adopt(SlabId(2), std::move(kept), granted).ok());
  EXPECT_EQ(device->IdentityOf(SlabId(2)), granted);
  EXPECT_NE(device->MemoryId(SlabId(0)), device->MemoryId(SlabId(2)));
  EXPECT_TRUE(Look(*device, 2).All(7));
  // It is the worker's memory, not a copy, and it can be scrubbed and handed on.
  ASSERT_TRUE(device->Scrub({SlabId(2)}).ok());
  EXPECT_TRUE(worker->All(0));
}

TEST_F(CudaSlabDeviceTest, ReturnedDescriptorsThatAreNoSlabsAreRefused) {
  auto device = Open();
  ASSERT_TRUE(device->Create(SlabId(0)).ok());
  const SlabDevice::Identity granted = device->IdentityOf(SlabId(0));
  EXPECT_TRUE(absl::IsInvalidArgument(
      device->Adopt(SlabId(1), UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)), granted)));
  auto small = CudaAllocation::Create(FakeCudaDriver(), 0, kSlab / 2);
  ASSERT_TRUE(small.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(device->Adopt(SlabId(1), *small->Export(), granted)));
  auto right = CudaAllocation::Create(FakeCudaDriver(), 0, kSlab);
  ASSERT_TRUE(right.ok());
  const absl::Status host = device->Adopt(SlabId(1), *right->Export(), {1, 2});
  EXPECT_THAT(std::string(host.message()), HasSubstr("not GPU memory"));
  EXPECT_TRUE(device->Adopt(SlabId(1), *right->Export(), granted).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(device->Adopt(SlabId(1), *right->Export(), granted)));
}

TEST_F(CudaSlabDeviceTest, PoolsThatCannotBeAreRefused) {
  const CudaSlabDevice::Options good = {
      .driver = &FakeCudaDriver(), .slabs = 4, .slab_bytes = kSlab, .other_descriptors = 16};
  for (const auto& change : std::vector<std::function<void(CudaSlabDevice::Options&)>>{
           [](auto& o) { o.gpu = FakeCuda::kDevices; }, [](auto& o) { o.slabs = 0; },
           [](auto& o) { o.slab_bytes = MiB(3); }, [](auto& o) { o.slab_bytes = GiB(32); }}) {
    CudaSlabDevice::Options options = good;
    change(options);
    EXPECT_FALSE(CudaSlabDevice::Open(options).ok());
  }
  EXPECT_TRUE(CudaSlabDevice::Open(good).ok());
}

}  // namespace
}  // namespace palimpsest
