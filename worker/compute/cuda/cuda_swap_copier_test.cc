// Over the test double of the driver; tools/gpu-check swaps blocks on a GPU.
#include "worker/compute/cuda/cuda_swap_copier.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "common/cuda/testing/fake_driver.h"
#include "gtest/gtest.h"
#include "worker/compute/cuda/fake_gpu_blocks.h"

namespace palimpsest {
namespace {

using Direction = SwapTransfer::Direction;

constexpr Bytes kSlab = MiB(2);
constexpr int kSlabs = 8;
// Blocks straddle slabs; stripes are of four layers or two, as blocks are neighbours or not.
constexpr Bytes kBlock = KiB(1200);
constexpr int kLayers = 4;
constexpr int32_t kSlots = 12;
const uint32_t kBlocks = static_cast<uint32_t>(kSlab * kSlabs / kBlock);

// On two GPUs, whose blocks of a number differ.
class CudaSwapCopierTest : public ::testing::Test {
 protected:
  ~CudaSwapCopierTest() override { FakeCuda::Resume(); }

  static SwapTransfer Transfer(uint64_t id, Direction direction, std::vector<SwapMove> moves,
                               bool awaited = false) {
    return {
        .id = SwapId(id), .direction = direction, .awaited = awaited, .moves = std::move(moves)};
  }

  void Finish(SwapTransfer transfer) {
    copier_->Start(std::move(transfer));
    copier_->AwaitAll();
    const std::vector<SwapEnded> ended = copier_->TakeEnded();
    ASSERT_EQ(ended.size(), 1u);
    EXPECT_TRUE(ended[0].status.ok()) << ended[0].status;
  }

  FakeGpuBlocks gpus_{kSlab, kSlabs, kBlock};
  std::unique_ptr<CudaSwapCopier> copier_ = *CudaSwapCopier::Create(
      gpus_.Ranks<CudaSwapCopier::Rank>(), {.slots = kSlots, .layers = kLayers});
};

// By batches, or copy by copy; awaited layer by layer, or not.
TEST_F(CudaSwapCopierTest, BringsBackWhatItTookAndTouchesNothingElse) {
  std::mt19937 random(1);
  std::vector<int> blocks(kBlocks);
  std::map<uint32_t, int> slots;
  for (uint32_t b = 0; b < kBlocks; ++b)
    gpus_.Fill(b, blocks[b] = static_cast<int>(random() % 200));
  for (uint64_t id = 1; id < 60; ++id) {
    if (id == 45) {
      EXPECT_GT(FakeCuda::BatchedCopies(), 0);
      FakeCuda::RefuseBatches(true);
    }
    const bool out = random() % 2 == 0;
    // Neighbours now and then, so that some copies are of several blocks.
    std::vector<uint32_t> order(std::min<uint32_t>(kBlocks, kSlots));
    std::iota(order.begin(), order.end(), 0);
    std::vector<uint32_t> places = order;
    if (random() % 2 == 0) std::shuffle(order.begin(), order.end(), random);
    if (random() % 2 == 0) std::shuffle(places.begin(), places.end(), random);
    std::vector<SwapMove> moves;
    for (size_t i = 0; i < 1 + random() % 6; ++i) {
      if (!out && !slots.contains(places[i])) continue;
      moves.push_back({BlockId(order[i]), SwapSlot(places[i])});
      if (out) {
        slots[places[i]] = blocks[order[i]];
      } else {
        blocks[order[i]] = slots[places[i]];
      }
    }
    ASSERT_NO_FATAL_FAILURE(Finish(Transfer(id, out ? Direction::kOut : Direction::kIn, moves,
                                            /*awaited=*/!out && random() % 2 == 0)));
    for (uint32_t b = 0; b < kBlocks; ++b) ASSERT_TRUE(gpus_.Holds(b, blocks[b])) << b;
  }
}

TEST_F(CudaSwapCopierTest, KvThatReturnsAwaitsItsTurnsOnEachLink) {
  LinkPacer pacer;
  copier_ = *CudaSwapCopier::Create(gpus_.Ranks<CudaSwapCopier::Rank>(),
                                    {.slots = kSlots, .layers = kLayers, .pacer = &pacer});
  const std::vector<SwapMove> moves = {{BlockId(1), SwapSlot(0)}, {BlockId(4), SwapSlot(3)}};
  ASSERT_NO_FATAL_FAILURE(Finish(Transfer(1, Direction::kOut, moves)));
  EXPECT_EQ(pacer.copied(LinkPacer::Kind::kBlocks), Bytes(0));
  ASSERT_NO_FATAL_FAILURE(Finish(Transfer(2, Direction::kIn, moves)));
  EXPECT_EQ(pacer.copied(LinkPacer::Kind::kBlocks), kBlock * 2);
}

TEST_F(CudaSwapCopierTest, StepsFollowBehindTheLayersThatTheyWaitFor) {
  gpus_.Fill(1, 7);
  Finish(Transfer(1, Direction::kOut, {{BlockId(1), SwapSlot(0)}}));
  gpus_.Fill(2, 50);
  FakeCuda::Pause();
  copier_->Start(Transfer(2, Direction::kIn, {{BlockId(2), SwapSlot(0)}}, /*awaited=*/true));
  std::vector<void*> events(2, nullptr);
  // Enqueued, not there.
  ASSERT_TRUE(copier_->LayerEvents(kLayers - 1, absl::MakeSpan(events)).ok());
  EXPECT_TRUE(copier_->TakeEnded().empty());
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_NE(events[i], nullptr);
    EXPECT_EQ(FakeCudaDriver().cuEventQuery(static_cast<CUevent>(events[i])), CUDA_ERROR_NOT_READY);
  }
  FakeCuda::Resume();
  for (void* event : events) {
    EXPECT_EQ(FakeCudaDriver().cuEventSynchronize(static_cast<CUevent>(event)), CUDA_SUCCESS);
  }
  EXPECT_TRUE(gpus_.Holds(2, 7));
  copier_->AwaitAll();
  EXPECT_EQ(copier_->TakeEnded().size(), 1u);
}

TEST_F(CudaSwapCopierTest, NobodyWaitsForKvThatNoStepHas) {
  FakeCuda::Pause();
  copier_->Start(Transfer(1, Direction::kIn, {{BlockId(2), SwapSlot(0)}}));
  std::vector<void*> events(2, nullptr);
  EXPECT_TRUE(copier_->LayerEvents(0, absl::MakeSpan(events)).ok());
  EXPECT_EQ(events, std::vector<void*>(2, nullptr));
  FakeCuda::Resume();
  copier_->AwaitAll();
}

TEST_F(CudaSwapCopierTest, LeavingAndReturningGoAtTheSameTime) {
  FakeCuda::Pause();
  copier_->Start(Transfer(1, Direction::kOut, {{BlockId(1), SwapSlot(1)}}));
  copier_->Start(Transfer(2, Direction::kIn, {{BlockId(2), SwapSlot(0)}}, /*awaited=*/true));
  std::vector<void*> events(2, nullptr);
  EXPECT_TRUE(copier_->LayerEvents(0, absl::MakeSpan(events)).ok());
  EXPECT_NE(events[0], nullptr);
  FakeCuda::Resume();
  copier_->AwaitAll();
  EXPECT_EQ(copier_->TakeEnded().size(), 2u);
}

}  // namespace
}  // namespace palimpsest
