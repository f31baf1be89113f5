// Over the test double of the driver; tools/gpu-check moves blocks on a GPU.
#include "worker/compute/cuda/cuda_block_copier.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "worker/compute/cuda/fake_gpu_blocks.h"

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
    for (uint32_t b = 0; b < kBlocks; ++b) gpus_.Fill(b, static_cast<int>(b) + 1);
  }

  FakeGpuBlocks gpus_{kSlab, kSlabs, kBlock};
  std::unique_ptr<CudaBlockCopier> copier_ =
      *CudaBlockCopier::Create(gpus_.Ranks<CudaBlockCopier::Rank>());
};

TEST_F(CudaBlockCopierTest, MovesWholeBlocksAndTouchesNoOther) {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint32_t> order(kBlocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<int> expected(kBlocks);
    for (uint32_t b = 0; b < kBlocks; ++b)
      gpus_.Fill(b, expected[b] = static_cast<int>(random() % 256));
    std::vector<BlockMove> moves;
    for (uint32_t i = 0; i + 1 < kBlocks && moves.size() < random() % 6; i += 2) {
      moves.push_back({.from = BlockId(order[i]), .to = BlockId(order[i + 1])});
      expected[order[i + 1]] = expected[order[i]];
    }
    copier_->Copy(moves);
    for (uint32_t b = 0; b < kBlocks; ++b) EXPECT_TRUE(gpus_.Holds(b, expected[b])) << b;
  }
}

TEST_F(CudaBlockCopierTest, NothingToMoveNeedsNoGpu) {
  FakeCuda::Pause();
  copier_->Copy({});
  FakeCuda::Resume();
}

}  // namespace
}  // namespace palimpsest
