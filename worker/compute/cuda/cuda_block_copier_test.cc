// Over the test double of the driver; tools/gpu-check moves blocks on a GPU.
#include "worker/compute/cuda/cuda_block_copier.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "common/cuda/testing/fake_driver.h"
#include "common/cuda/virtual_memory.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr Bytes kSlab = MiB(2);
constexpr int kSlabs = 4;
// Blocks straddle slabs.
constexpr Bytes kBlock = KiB(600);
const uint32_t kBlocks = static_cast<uint32_t>(kSlab * kSlabs / kBlock);

// On two GPUs, whose blocks of a number differ.
class CudaBlockCopierTest : public ::testing::Test {
 protected:
  CudaBlockCopierTest() {
    FakeCuda::Reset();
    std::vector<CudaBlockCopier::Rank> ranks;
    for (const int gpu : {1, 0}) {
      ranks.push_back({*CudaContext::Open(FakeCudaDriver(), gpu), {}});
      ranges_.push_back(*CudaAddressRange::Reserve(FakeCudaDriver(), gpu, kSlab * kSlabs));
      for (int i = 0; i < kSlabs; ++i) {
        slabs_.push_back(*CudaAllocation::Create(FakeCudaDriver(), gpu, kSlab));
        EXPECT_TRUE(ranges_.back().Map(kSlab * i, kSlab, slabs_.back()).ok());
      }
      EXPECT_TRUE(ranges_.back().Open(Bytes(0), kSlab * kSlabs).ok());
      ranks.back().memory.kv = reinterpret_cast<std::byte*>(ranges_.back().base());
      ranks.back().memory.kv_block_bytes = kBlock;
    }
    copier_ = *CudaBlockCopier::Create(std::move(ranks));
    for (uint32_t b = 0; b < kBlocks; ++b) Fill(b, static_cast<int>(b) + 1);
  }
  ~CudaBlockCopierTest() override {
    for (const CudaAddressRange& range : ranges_) (void)range.Unmap(Bytes(0), kSlab * kSlabs);
  }

  void Fill(uint32_t block, int byte) {
    for (const CudaAddressRange& range : ranges_) {
      std::memset(At(range, block), byte++, static_cast<size_t>(kBlock.count()));
    }
  }
  bool Holds(uint32_t block, int byte) {
    for (const CudaAddressRange& range : ranges_) {
      const auto wanted = static_cast<std::byte>(byte++);
      if (!std::all_of(At(range, block), At(range, block) + kBlock.count(),
                       [wanted](std::byte b) { return b == wanted; })) {
        return false;
      }
    }
    return true;
  }

  static std::byte* At(const CudaAddressRange& range, uint32_t block) {
    return reinterpret_cast<std::byte*>(range.base()) + (kBlock * block).count();
  }

  std::vector<CudaAddressRange> ranges_;
  std::vector<CudaAllocation> slabs_;
  std::unique_ptr<CudaBlockCopier> copier_;
};

TEST_F(CudaBlockCopierTest, MovesWholeBlocksAndTouchesNoOther) {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint32_t> order(kBlocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<int> expected(kBlocks);
    for (uint32_t b = 0; b < kBlocks; ++b) Fill(b, expected[b] = static_cast<int>(random() % 256));
    std::vector<BlockMove> moves;
    for (uint32_t i = 0; i + 1 < kBlocks && moves.size() < random() % 6; i += 2) {
      moves.push_back({.from = BlockId(order[i]), .to = BlockId(order[i + 1])});
      expected[order[i + 1]] = expected[order[i]];
    }
    copier_->Copy(moves);
    for (uint32_t b = 0; b < kBlocks; ++b) EXPECT_TRUE(Holds(b, expected[b])) << b;
  }
}

TEST_F(CudaBlockCopierTest, NothingToMoveNeedsNoGpu) {
  FakeCuda::Pause();
  copier_->Copy({});
  FakeCuda::Resume();
}

}  // namespace
}  // namespace palimpsest
