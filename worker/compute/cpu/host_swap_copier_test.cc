#include "worker/compute/cpu/host_swap_copier.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "common/block_checksum.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using Direction = SwapTransfer::Direction;

constexpr Bytes kBlock(60);
constexpr int kLayers = 5;
constexpr uint32_t kBlocks = 20;
constexpr int32_t kSlots = 16;

class HostSwapCopierTest : public ::testing::Test {
 protected:
  std::byte* At(uint32_t block) { return kv_.data() + (kBlock * block).count(); }
  void Fill(uint32_t block, int value) {
    std::fill_n(At(block), kBlock.count(), static_cast<std::byte>(value));
  }
  bool Holds(uint32_t block, int value) {
    return std::all_of(At(block), At(block) + kBlock.count(),
                       [value](std::byte b) { return b == static_cast<std::byte>(value); });
  }
  SwapTransfer Transfer(Direction direction, std::vector<SwapMove> moves, bool awaited = false) {
    return {.id = SwapId(++last_id_),
            .direction = direction,
            .awaited = awaited,
            .moves = std::move(moves)};
  }

  std::vector<std::byte> kv_ = std::vector<std::byte>(kBlocks * kBlock.count());
  HostSwapCopier copier_{{nullptr, kv_.data(), kBlock}, kSlots, kLayers};
  uint64_t last_id_ = 0;
};

TEST_F(HostSwapCopierTest, BringsBackWhatItTook) {
  Fill(3, 33);
  Fill(7, 77);
  copier_.Start(Transfer(Direction::kOut, {{BlockId(3), SwapSlot(9)}, {BlockId(7), SwapSlot(0)}}));
  copier_.AwaitAll();
  Fill(3, 1);
  copier_.Start(Transfer(Direction::kIn, {{BlockId(5), SwapSlot(9)}, {BlockId(3), SwapSlot(0)}}));
  copier_.AwaitAll();
  EXPECT_TRUE(Holds(5, 33));
  EXPECT_TRUE(Holds(3, 77));
  const std::vector<SwapEnded> ended = copier_.TakeEnded();
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[0].direction, Direction::kOut);
  EXPECT_EQ(ended[1].blocks, 2);
  EXPECT_TRUE(ended[0].status.ok() && ended[1].status.ok());
  EXPECT_TRUE(copier_.TakeEnded().empty());
}

TEST_F(HostSwapCopierTest, TellsOfEachEnd) {
  std::atomic<int> told = 0;
  copier_.SetWakeup([&] { ++told; });
  for (int i = 0; i < 10; ++i) copier_.Start(Transfer(Direction::kOut, {}));
  copier_.AwaitAll();
  EXPECT_EQ(told, 10);
}

// A reader that follows layer by layer, as a step does.
TEST_F(HostSwapCopierTest, CopiesAwaitTheirTurns) {
  LinkPacer pacer;
  HostSwapCopier copier({nullptr, kv_.data(), kBlock}, kSlots, kLayers, &pacer);
  copier.Start(Transfer(Direction::kOut, {{BlockId(3), SwapSlot(9)}, {BlockId(7), SwapSlot(0)}}));
  copier.AwaitAll();
  EXPECT_EQ(pacer.copied(LinkPacer::Kind::kBlocks), kBlock * 2);
  pacer.SetLimit(1);
  Fill(5, 1);
  copier.Start(Transfer(Direction::kIn, {{BlockId(5), SwapSlot(9)}}));
  // The second layer would wait for as many seconds as the first one has bytes.
  while (pacer.copied(LinkPacer::Kind::kBlocks) == kBlock * 2) std::this_thread::yield();
  EXPECT_TRUE(copier.TakeEnded().size() < 2);
  pacer.SetLimit(0);
  copier.AwaitAll();
  EXPECT_EQ(pacer.copied(LinkPacer::Kind::kBlocks), kBlock * 3);
}

TEST_F(HostSwapCopierTest, LayersThatArePassedAreThere) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<SwapMove> moves;
    for (uint32_t i = 0; i < kSlots; ++i) {
      Fill(i, round);
      moves.push_back({BlockId(i), SwapSlot(i)});
    }
    copier_.Start(Transfer(Direction::kOut, moves));
    copier_.AwaitAll();
    for (uint32_t i = 0; i < kSlots; ++i) Fill(i, 255);
    copier_.Start(Transfer(Direction::kIn, moves, /*awaited=*/true));
    std::thread step([&] {
      for (int layer = 0; layer < kLayers; ++layer) {
        ASSERT_TRUE(copier_.AwaitLayer(layer).ok());
        for (const SwapMove& move : moves) {
          const std::byte* const part = At(move.block.value()) + layer * kBlock.count() / kLayers;
          ASSERT_TRUE(std::all_of(part, part + kBlock.count() / kLayers,
                                  [&](std::byte b) { return b == static_cast<std::byte>(round); }));
        }
      }
    });
    step.join();
    copier_.AwaitAll();
    copier_.TakeEnded();
  }
}

TEST_F(HostSwapCopierTest, BlockStoresBlocksCarryChecksums) {
  std::vector<std::byte> store(3 * kBlock.count());
  std::vector<SwapMove> moves;
  for (uint32_t i = 0; i < 3; ++i) {
    Fill(i, static_cast<int>(10 + i));
    moves.push_back(
        {.block = BlockId(i), .memory = store.data() + i * kBlock.count(), .key = {1, i}});
  }
  copier_.Start(Transfer(Direction::kOut, moves));
  copier_.AwaitAll();
  const SwapEnded out = copier_.TakeEnded().at(0);
  ASSERT_EQ(out.checksums.size(), 3u);
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(out.checksums[i], BlockChecksum(moves[i].key, {At(i), 60}));
    moves[i].checksum = out.checksums[i];
    moves[i].block = BlockId(10 + i);
  }
  copier_.Start(Transfer(Direction::kIn, moves));
  copier_.AwaitAll();
  const SwapEnded in = copier_.TakeEnded().at(0);
  EXPECT_TRUE(in.status.ok()) << in.status;
  EXPECT_EQ(in.intact, 3);
  EXPECT_TRUE(Holds(10, 10) && Holds(11, 11) && Holds(12, 12));
}

TEST_F(HostSwapCopierTest, WrongBytesOrKeysFailBeforeTheLastLayerIsPassed) {
  std::vector<std::byte> store(2 * kBlock.count(), std::byte(5));
  const absl::Span<const std::byte> bytes(store.data(), kBlock.count());
  std::vector<SwapMove> moves;
  for (uint32_t i = 0; i < 2; ++i) {
    const BlockKey key{2, i};
    moves.push_back({.block = BlockId(i),
                     .memory = store.data() + i * kBlock.count(),
                     .key = key,
                     .checksum = BlockChecksum(key, bytes)});
  }
  const auto load = [&](const std::vector<SwapMove>& these) {
    copier_.Start(Transfer(Direction::kIn, these, /*awaited=*/true));
    absl::Status step;
    for (int layer = 0; layer < kLayers && step.ok(); ++layer) step = copier_.AwaitLayer(layer);
    copier_.AwaitAll();
    const SwapEnded ended = copier_.TakeEnded().at(0);
    EXPECT_EQ(step.ok(), ended.status.ok()) << "a step that followed must know";
    return std::pair(ended.status.code(), ended.intact);
  };
  EXPECT_EQ(load(moves), std::pair(absl::StatusCode::kOk, 2));
  store.back() = std::byte(6);
  EXPECT_EQ(load(moves), std::pair(absl::StatusCode::kDataLoss, 1));
  moves[0].key.low = 9;
  EXPECT_EQ(load(moves), std::pair(absl::StatusCode::kDataLoss, 0));
}

}  // namespace
}  // namespace palimpsest
