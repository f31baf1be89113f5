// Over the test double of the driver, in which no copy of a batch may reach over an allocation.
#include "worker/compute/cuda/copy_batch.h"

#include <cstring>
#include <vector>

#include "common/cuda/testing/fake_driver.h"
#include "gtest/gtest.h"
#include "worker/compute/cuda/fake_gpu_blocks.h"

namespace palimpsest {
namespace {

constexpr Bytes kSlab = MiB(2);
constexpr Bytes kBlock = KiB(4);

struct Rank {
  CudaContextPtr context;
  ModelMemory memory;
};

class CopyBatchTest : public ::testing::Test {
 protected:
  CopyBatchTest() {
    EXPECT_TRUE(rank_.context->MakeCurrent().ok());
    stream_ = *CudaStream::Create(rank_.context);
  }
  ~CopyBatchTest() override { FakeCuda::Reset(); }

  CUdeviceptr At(size_t offset) const {
    return reinterpret_cast<CUdeviceptr>(rank_.memory.kv) + offset;
  }
  // Copies all of `host_` to the region and back to another place of the host.
  std::vector<std::byte> RoundTrip(const CudaDriver& driver) {
    std::memset(rank_.memory.kv, 0, static_cast<size_t>((kSlab * 2).count()));
    std::vector<std::byte> back(host_.size());
    CopyBatch in(driver, rank_.memory, CopyDirection::kToDevice, &refused_);
    CopyBatch out(driver, rank_.memory, CopyDirection::kToHost, &refused_);
    // Odd pieces, one of which reaches from one slab into the next.
    const size_t piece = 3000;
    const size_t begin = static_cast<size_t>(kSlab.count()) - host_.size() / 2 - 7;
    for (size_t at = 0; at < host_.size(); at += piece) {
      const size_t size = std::min(piece, host_.size() - at);
      in.Add(At(begin + at), host_.data() + at, size);
      out.Add(At(begin + at), back.data() + at, size);
    }
    EXPECT_FALSE(in.empty());
    EXPECT_TRUE(in.Submit(stream_.get()).ok());
    EXPECT_TRUE(in.empty());
    EXPECT_TRUE(out.Submit(stream_.get()).ok());
    EXPECT_TRUE(stream_.Synchronize().ok());
    return back;
  }

  FakeGpuBlocks gpus_{kSlab, 2, kBlock};
  Rank rank_ = gpus_.Ranks<Rank>().front();
  CudaStream stream_;
  std::atomic<bool> refused_ = false;
  // More pieces than a call takes.
  std::vector<std::byte> host_ = [] {
    std::vector<std::byte> bytes(3000 * (CopyBatch::kMostCopies + 20));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 253);
    return bytes;
  }();
};

TEST_F(CopyBatchTest, ManyGoInAFewCallsCutWhereSlabsEnd) {
  EXPECT_EQ(RoundTrip(FakeCudaDriver()), host_);
  const auto pieces = static_cast<int64_t>(host_.size() / 3000);
  EXPECT_GE(FakeCuda::BatchedCopies(), 2 * pieces);
  EXPECT_FALSE(refused_);
}

TEST_F(CopyBatchTest, RefusedBatchesGoSingly) {
  FakeCuda::RefuseBatches(true);
  EXPECT_EQ(RoundTrip(FakeCudaDriver()), host_);
  EXPECT_TRUE(refused_);
  EXPECT_EQ(FakeCuda::BatchedCopies(), 0);
  FakeCuda::RefuseBatches(false);
  EXPECT_EQ(RoundTrip(FakeCudaDriver()), host_);
  EXPECT_GT(FakeCuda::BatchedCopies(), 0) << "it may have been about those copies alone";
}

TEST_F(CopyBatchTest, DriverWithoutBatchesCopiesSingly) {
  CudaDriver old = FakeCudaDriver();
  old.cuMemcpyBatchAsync = nullptr;
  EXPECT_EQ(RoundTrip(old), host_);
  EXPECT_EQ(FakeCuda::BatchedCopies(), 0);
}

TEST_F(CopyBatchTest, ErrorOfACopyIsToldAndChangesNothingElse) {
  CopyBatch batch(FakeCudaDriver(), rank_.memory, CopyDirection::kToDevice, &refused_);
  batch.Add(At(0), host_.data(), 16);
  batch.Add(At(16), host_.data(), 16);
  // The default stream.
  EXPECT_FALSE(batch.Submit(nullptr).ok());
  EXPECT_FALSE(refused_);
  EXPECT_TRUE(batch.empty());
}

}  // namespace
}  // namespace palimpsest
