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

class CudaBlockCopierTest : public ::testing::Test {
 protected:
  CudaBlockCopierTest() {
    FakeCuda::Reset();
    context_ = *CudaContext::Open(FakeCudaDriver(), 0);
    EXPECT_TRUE(context_->MakeCurrent().ok());
    range_ = *CudaAddressRange::Reserve(FakeCudaDriver(), 0, kSlab * kSlabs);
    for (int i = 0; i < kSlabs; ++i) {
      slabs_.push_back(*CudaAllocation::Create(FakeCudaDriver(), 0, kSlab));
      EXPECT_TRUE(range_.Map(kSlab * i, kSlab, slabs_.back()).ok());
    }
    EXPECT_TRUE(range_.Open(Bytes(0), kSlab * kSlabs).ok());
    memory_.kv = reinterpret_cast<std::byte*>(range_.base());
    memory_.kv_block_bytes = kBlock;
    copier_ = *CudaBlockCopier::Create(context_, memory_);
    for (uint32_t b = 0; b < kBlocks; ++b) Fill(b, static_cast<int>(b) + 1);
  }
  ~CudaBlockCopierTest() override { (void)range_.Unmap(Bytes(0), kSlab * kSlabs); }

  std::byte* At(uint32_t block) { return memory_.kv + (kBlock * block).count(); }
  void Fill(uint32_t block, int byte) {
    std::memset(At(block), byte, static_cast<size_t>(kBlock.count()));
  }
  bool Holds(uint32_t block, int byte) {
    return std::all_of(At(block), At(block) + kBlock.count(),
                       [byte](std::byte b) { return b == static_cast<std::byte>(byte); });
  }

  CudaContextPtr context_;
  CudaAddressRange range_;
  std::vector<CudaAllocation> slabs_;
  ModelMemory memory_;
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
