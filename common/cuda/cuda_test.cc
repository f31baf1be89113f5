// The thin wrappers of the driver, over its test double.
#include <array>
#include <cstring>

#include "common/cuda/context.h"
#include "common/cuda/repeated_mapping.h"
#include "common/cuda/testing/fake_driver.h"
#include "common/cuda/virtual_memory.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr Bytes kSlab = MiB(4);

const CudaDriver& Driver() { return FakeCudaDriver(); }

TEST(CudaDriver, LoadsOrSaysWhatToDo) {
  const auto driver = CudaDriver::Load();
  if (driver.ok()) return;
  EXPECT_TRUE(absl::IsFailedPrecondition(driver.status()));
  EXPECT_NE(driver.status().message().find("NVIDIA driver"), std::string::npos);
}

TEST(CudaDriver, ErrorsNameTheActionAndTheCode) {
  const absl::Status status = Driver().Check(CUDA_ERROR_OUT_OF_MEMORY, "allocating a slab");
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_NE(status.message().find("allocating a slab failed"), std::string::npos) << status;
  EXPECT_TRUE(Driver().Check(CUDA_SUCCESS, "").ok());
  EXPECT_TRUE(absl::IsInternal(Driver().Check(CUDA_ERROR_ILLEGAL_ADDRESS, "a step")));
}

TEST(CudaContext, RefusesAGpuThatIsNotThere) {
  EXPECT_TRUE(absl::IsFailedPrecondition(CudaContext::Open(Driver(), 3).status()));
}

class CudaMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override { FakeCuda::Reset(); }

  const Bytes before_ = FakeCuda::InUse();
};

TEST_F(CudaMemoryTest, LivesAsLongAsHandleMappingOrDescriptor) {
  auto memory = CudaAllocation::Create(Driver(), 0, kSlab);
  ASSERT_TRUE(memory.ok()) << memory.status();
  auto descriptor = memory->Export();
  ASSERT_TRUE(descriptor.ok()) << descriptor.status();
  auto range = CudaAddressRange::Reserve(Driver(), 0, kSlab * 3);
  ASSERT_TRUE(range.ok()) << range.status();
  ASSERT_TRUE(range->Map(Bytes(0), kSlab, *memory).ok());
  ASSERT_TRUE(range->Open(Bytes(0), kSlab).ok());
  auto* const bytes = reinterpret_cast<char*>(range->base());
  std::memset(bytes, 7, static_cast<size_t>(kSlab.count()));
  memory->Reset();
  EXPECT_EQ(FakeCuda::InUse() - before_, kSlab);  // mapped
  ASSERT_TRUE(range->Unmap(Bytes(0), kSlab).ok());
  EXPECT_EQ(FakeCuda::InUse(), before_);

  // The descriptor keeps it: imported again, it holds what was written.
  auto again = CudaAllocation::Import(Driver(), 0, *descriptor);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(again->Export().ok());
  ASSERT_TRUE(range->Map(kSlab, kSlab, *again).ok());
  ASSERT_TRUE(range->Map(kSlab * 2, kSlab, *again).ok());  // an alias
  ASSERT_TRUE(range->Open(kSlab, kSlab * 2).ok());
  EXPECT_EQ(bytes[kSlab.count() + 5], 7);
  bytes[kSlab.count() * 2 + 5] = 9;
  EXPECT_EQ(bytes[kSlab.count() + 5], 9);
  EXPECT_TRUE(range->Unmap(kSlab, kSlab * 2).ok());
}

// Two slabs side by side, repeated over five, of which the last is a whole one, too.
TEST_F(CudaMemoryTest, LiesBehindOtherAddressesOverAndOver) {
  auto range = CudaAddressRange::Reserve(Driver(), 1, kSlab * 3);
  ASSERT_TRUE(range.ok()) << range.status();
  for (int i = 0; i < 2; ++i) {
    auto slab = CudaAllocation::Create(Driver(), 1, kSlab);
    ASSERT_TRUE(slab.ok()) << slab.status();
    ASSERT_TRUE(range->Map(kSlab * i, kSlab, *slab).ok());
  }
  ASSERT_TRUE(range->Open(Bytes(0), kSlab * 2).ok());
  const Bytes in_use = FakeCuda::InUse(1);
  const size_t handles = FakeCuda::Handles(), mappings = FakeCuda::Mappings();
  const RepeatedMapping::Memory memory = {range->base(), kSlab * 2, kSlab};
  {
    const auto repeated = RepeatedMapping::Map(Driver(), 1, memory, kSlab * 4 + Bytes(1));
    ASSERT_TRUE(repeated.ok()) << repeated.status();
    EXPECT_EQ(repeated->size(), kSlab * 5);
    EXPECT_EQ(FakeCuda::InUse(1), in_use);
    auto* const bytes = reinterpret_cast<char*>(range->base());
    const auto* const seen = reinterpret_cast<const char*>(repeated->base());
    bytes[3] = 1;
    bytes[kSlab.count() + 3] = 2;
    for (int i = 0; i < 5; ++i) EXPECT_EQ(seen[(kSlab * i).count() + 3], 1 + i % 2) << i;
  }
  EXPECT_EQ(FakeCuda::Handles(), handles);
  EXPECT_EQ(FakeCuda::Mappings(), mappings);

  const auto refusal = [&](RepeatedMapping::Memory wrong) {
    return RepeatedMapping::Map(Driver(), 1, wrong, kSlab * 4).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(refusal({memory.address, kSlab * 3 / 2, kSlab})));
  EXPECT_TRUE(absl::IsInvalidArgument(refusal({memory.address, kSlab * 2, Bytes(0)})));
  // Nothing is mapped at the third place; and these are not the pieces.
  EXPECT_FALSE(refusal({memory.address, kSlab * 3, kSlab}).ok());
  EXPECT_FALSE(refusal({memory.address, kSlab * 2, kSlab * 2}).ok());
  EXPECT_EQ(FakeCuda::Handles(), handles);
  EXPECT_EQ(FakeCuda::Mappings(), mappings);
  EXPECT_TRUE(range->Unmap(Bytes(0), kSlab * 2).ok());
}

TEST_F(CudaMemoryTest, RefusesWhatIsNotASlab) {
  auto memory = CudaAllocation::Create(Driver(), 0, kSlab);
  ASSERT_TRUE(memory.ok());
  auto range = CudaAddressRange::Reserve(Driver(), 0, kSlab * 2);
  ASSERT_TRUE(range.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(range->Map(Bytes(0), kSlab / 2, *memory)));
  EXPECT_TRUE(absl::IsInvalidArgument(range->Map(kSlab * 2, kSlab, *memory)));
  EXPECT_TRUE(absl::IsInvalidArgument(range->Open(Bytes(0), kSlab)));
  ASSERT_TRUE(range->Map(Bytes(0), kSlab, *memory).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(range->Map(Bytes(0), kSlab, *memory)));
  EXPECT_TRUE(absl::IsInvalidArgument(range->Unmap(Bytes(0), kSlab / 2)));
  EXPECT_TRUE(range->Unmap(Bytes(0), kSlab).ok());
  const UniqueFd foreign(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_TRUE(absl::IsInvalidArgument(CudaAllocation::Import(Driver(), 0, foreign).status()));
  FakeCuda::SetMemory(kSlab * 2);
  auto second = CudaAllocation::Create(Driver(), 0, kSlab);
  EXPECT_TRUE(second.ok());
  EXPECT_TRUE(absl::IsResourceExhausted(CudaAllocation::Create(Driver(), 0, kSlab).status()));
}

TEST_F(CudaMemoryTest, StreamsRunInOrderAndEventsTellHowFar) {
  auto context = CudaContext::Open(Driver(), 0);
  ASSERT_TRUE(context.ok()) << context.status();
  ASSERT_TRUE((*context)->MakeCurrent().ok());
  auto first = CudaStream::Create(*context);
  auto second = CudaStream::Create(*context);
  auto event = CudaEvent::Create(*context);
  ASSERT_TRUE(first.ok() && second.ok() && event.ok());
  std::array<unsigned, 4> source = {1, 2, 3, 4}, middle = {}, target = {};
  const auto device = [](auto& array) { return reinterpret_cast<CUdeviceptr>(array.data()); };
  FakeCuda::Pause();
  ASSERT_EQ(Driver().cuMemcpyHtoDAsync(device(middle), source.data(), sizeof source, first->get()),
            CUDA_SUCCESS);
  ASSERT_TRUE(event->Record(first->get()).ok());
  ASSERT_TRUE(event->MakeWait(second->get()).ok());
  ASSERT_EQ(Driver().cuMemcpyDtoHAsync(target.data(), device(middle), sizeof target, second->get()),
            CUDA_SUCCESS);
  EXPECT_EQ(Driver().cuEventQuery(event->get()), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(target[0], 0u);
  FakeCuda::Resume();
  ASSERT_TRUE(second->Synchronize().ok());
  EXPECT_TRUE(event->Synchronize().ok());
  EXPECT_EQ(target, source);
}

}  // namespace
}  // namespace palimpsest
