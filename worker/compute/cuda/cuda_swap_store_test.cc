// KV blocks between two GPUs and a block store's memory, over the test double of the driver.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "common/block_checksum.h"
#include "common/memory_file.h"
#include "common/stored_block.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/blocks/arena_map.h"
#include "worker/compute/cuda/cuda_swap_copier.h"
#include "worker/compute/cuda/fake_gpu_blocks.h"
#include "worker/memory/cuda/cuda_memory.h"
#include "worker/memory/cuda/testing/fake_kernels.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Direction = SwapTransfer::Direction;

constexpr Bytes kSlab = MiB(2);
constexpr int kSlabs = 2;
// Some straddle slabs, and none fills its last chunk of a checksum.
constexpr Bytes kBlock = KiB(132);
constexpr int kLayers = 4;
constexpr size_t kGpus = 2;
constexpr Bytes kPart = StoredPartBytes(kBlock);
constexpr Bytes kStored = kPart * static_cast<int64_t>(kGpus);
constexpr Bytes kChunk = MiB(4);
constexpr uint32_t kPlaces = static_cast<uint32_t>(kChunk / kStored);
static_assert(kPart > kBlock && kPlaces >= 12);
// The first of the blocks that are copied: one of those behind it is in two slabs.
constexpr uint32_t kFirst = 8;

class CudaSwapStoreTest : public ::testing::Test {
 protected:
  CudaSwapStoreTest() {
    RegisterFakeKernels();
    backend_ = *CudaMemory::Open({.driver = &FakeCudaDriver(), .gpus = {1, 0}});
    copier_ = *CudaSwapCopier::Create(gpus_.Ranks<CudaSwapCopier::Rank>(),
                                      {.layers = kLayers, .block_store = true});
    std::mt19937 random(4);
    for (uint32_t block = kFirst; block < kFirst + kPlaces; ++block) {
      for (size_t gpu = 0; gpu < kGpus; ++gpu) {
        const absl::Span<std::byte> part = gpus_.Part(gpu, block);
        for (size_t at = 0; at < part.size(); at += sizeof(uint32_t)) {
          const auto word = static_cast<uint32_t>(random());
          std::memcpy(part.data() + at, &word, sizeof word);
        }
      }
    }
  }
  ~CudaSwapStoreTest() override {
    FakeCuda::Reset();
    copier_.reset();
  }

  void MapChunk(uint32_t id) {
    const UniqueFd file(::memfd_create("chunk", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(::ftruncate(file.get(), kChunk.count()), 0);
    ASSERT_TRUE(SealMemory(file.get(), kSlabSeals).ok());
    auto chunk = ChunkMemory::Map(file.get(), kChunk, backend_.get());
    ASSERT_TRUE(chunk.ok()) << chunk.status();
    std::memset(chunk->data(), 0xee, chunk->size());
    map_.Insert(id, *std::move(chunk));
  }
  StorePlace Hold(uint32_t chunk, uint32_t index) {
    return *map_.Hold({.chunk = chunk,
                       .offset_bytes = static_cast<uint64_t>((kStored * index).count()),
                       .length_bytes = static_cast<uint64_t>(kStored.count())},
                      /*request=*/1);
  }
  static BlockKey Key(uint32_t block) { return {7, block}; }

  // Block kFirst + i to or from place places[i] of chunk 3.
  std::vector<SwapMove> Moves(const std::vector<uint32_t>& places) {
    std::vector<SwapMove> moves;
    for (uint32_t i = 0; i < places.size(); ++i) {
      moves.push_back(
          {.block = BlockId(kFirst + i), .memory = Hold(3, places[i]).memory, .key = Key(i)});
    }
    return moves;
  }
  SwapEnded Finish(Direction direction, std::vector<SwapMove> moves, bool awaited = false) {
    copier_->Start({.id = SwapId(++transfers_),
                    .direction = direction,
                    .awaited = awaited,
                    .store = true,
                    .moves = std::move(moves)});
    copier_->AwaitAll();
    std::vector<SwapEnded> ended = copier_->TakeEnded();
    EXPECT_THAT(ended, SizeIs(1));
    return std::move(ended.front());
  }
  // The moves that bring back what went out, to blocks in another order.
  std::vector<SwapMove> Back(std::vector<SwapMove> moves, const std::vector<uint64_t>& checksums,
                             std::mt19937& random) {
    std::vector<BlockId> to;
    for (size_t i = 0; i < moves.size(); ++i) {
      moves[i].checksum = checksums[i];
      to.push_back(moves[i].block);
    }
    std::shuffle(to.begin(), to.end(), random);
    for (size_t i = 0; i < moves.size(); ++i) moves[i].block = to[i];
    return moves;
  }
  static absl::Span<const std::byte> Stored(const SwapMove& move) {
    return {move.memory, static_cast<size_t>(kStored.count())};
  }
  // Whether the block's parts are what lies in the store, which has zero bytes behind each.
  bool Same(BlockId block, const SwapMove& move) {
    for (size_t gpu = 0; gpu < kGpus; ++gpu) {
      const absl::Span<const std::byte> part = gpus_.Part(gpu, block.value());
      const std::byte* const stored = move.memory + (kPart * static_cast<int64_t>(gpu)).count();
      constexpr std::byte kZeros[static_cast<size_t>((kPart - kBlock).count())] = {};
      if (std::memcmp(stored, part.data(), part.size()) != 0 ||
          std::memcmp(stored + part.size(), kZeros, sizeof kZeros) != 0) {
        return false;
      }
    }
    return true;
  }

  FakeGpuBlocks gpus_{kSlab, kSlabs, kBlock};
  std::unique_ptr<CudaMemory> backend_;
  ArenaMap map_{kStored};
  std::unique_ptr<CudaSwapCopier> copier_;
  uint64_t transfers_ = 0;
};

TEST_F(CudaSwapStoreTest, BlocksLieInTheStoreAsTheyAreCheckedThere) {
  MapChunk(3);
  std::mt19937 random(5);
  for (const bool scattered : {false, true}) {
    std::vector<uint32_t> places(kPlaces);
    std::iota(places.begin(), places.end(), 0);
    if (scattered) std::shuffle(places.begin(), places.end(), random);
    for (const bool batches : {true, false}) {
      FakeCuda::RefuseBatches(!batches);
      for (const bool awaited : {false, true}) {
        const std::vector<SwapMove> moves = Moves(places);
        const SwapEnded out = Finish(Direction::kOut, moves);
        ASSERT_TRUE(out.status.ok()) << out.status;
        ASSERT_THAT(out.checksums, SizeIs(moves.size()));
        for (size_t i = 0; i < moves.size(); ++i) {
          ASSERT_TRUE(Same(moves[i].block, moves[i])) << i;
          // What the broker computes whenever it moves the block.
          ASSERT_EQ(out.checksums[i], BlockChecksum(moves[i].key, Stored(moves[i]))) << i;
        }
        const std::vector<SwapMove> back = Back(moves, out.checksums, random);
        const SwapEnded in = Finish(Direction::kIn, back, awaited);
        ASSERT_TRUE(in.status.ok()) << in.status;
        EXPECT_EQ(in.intact, static_cast<int32_t>(back.size()));
        for (const SwapMove& move : back) ASSERT_TRUE(Same(move.block, move));
      }
    }
  }
}

TEST_F(CudaSwapStoreTest, BlocksBeforeADamagedOneAreIntact) {
  MapChunk(3);
  const std::vector<SwapMove> moves = Moves({4, 1, 7, 2});
  const SwapEnded out = Finish(Direction::kOut, moves);
  ASSERT_TRUE(out.status.ok());
  std::vector<SwapMove> back = moves;
  for (size_t i = 0; i < back.size(); ++i) back[i].checksum = out.checksums[i];
  const auto load = [&](bool awaited) {
    const SwapEnded in = Finish(Direction::kIn, back, awaited);
    EXPECT_TRUE(absl::IsDataLoss(in.status)) << in.status;
    return in.intact;
  };
  for (const bool awaited : {false, true}) {
    // On its way, on the second GPU's half.
    back[2].memory[kStored.count() - kPart.count() + 5] ^= std::byte(1);
    EXPECT_EQ(load(awaited), 2);
    back[2].memory[kStored.count() - kPart.count() + 5] ^= std::byte(1);
    // Another block's bytes.
    std::swap(back[1].key, back[3].key);
    EXPECT_EQ(load(awaited), 1);
    std::swap(back[1].key, back[3].key);
    // On the link.
    FakeCuda::CorruptCopy(1);
    EXPECT_LT(load(awaited), 4);
    EXPECT_TRUE(Finish(Direction::kIn, back, awaited).status.ok());
  }
}

TEST_F(CudaSwapStoreTest, LastLayerIsLetThroughWhenItIsChecked) {
  MapChunk(3);
  std::vector<SwapMove> moves = Moves({0, 5});
  const SwapEnded out = Finish(Direction::kOut, moves);
  for (size_t i = 0; i < moves.size(); ++i) moves[i].checksum = out.checksums[i];
  moves[1].checksum ^= 1;
  copier_->Start({.id = SwapId(++transfers_),
                  .direction = Direction::kIn,
                  .awaited = true,
                  .store = true,
                  .moves = moves});
  std::vector<void*> events(kGpus, nullptr);
  // It may have failed before.
  (void)copier_->LayerEvents(0, absl::MakeSpan(events));
  EXPECT_TRUE(absl::IsDataLoss(copier_->LayerEvents(kLayers - 1, absl::MakeSpan(events))));
  EXPECT_THAT(copier_->TakeEnded(), SizeIs(1));
}

TEST_F(CudaSwapStoreTest, ChunksAreRegisteredFromTheirMappingToTheirEnd) {
  MapChunk(3);
  MapChunk(4);
  EXPECT_EQ(FakeCuda::Registered(), 2u);
  EXPECT_TRUE(FakeCuda::IsRegistered(Hold(3, 0).memory));
  EXPECT_TRUE(FakeCuda::IsRegistered(Hold(3, kPlaces - 1).memory + kStored.count() - 1));
  ArenaMap::Gone gone;
  EXPECT_THAT(map_.Unmap({4}, gone), ElementsAre(4));
  EXPECT_EQ(FakeCuda::Registered(), 2u);
  gone.clear();
  EXPECT_EQ(FakeCuda::Registered(), 1u);
}

TEST_F(CudaSwapStoreTest, ChunkStaysWhileItsBlocksAreCopied) {
  MapChunk(3);
  const StorePlace place = Hold(3, 2);
  FakeCuda::Pause();
  copier_->Start({.id = SwapId(++transfers_),
                  .direction = Direction::kOut,
                  .store = true,
                  .moves = {{.block = BlockId(kFirst), .memory = place.memory, .key = Key(1)}}});
  ArenaMap::Gone gone;
  EXPECT_THAT(map_.Unmap({3}, gone), IsEmpty());
  EXPECT_THAT(gone, IsEmpty());
  EXPECT_TRUE(FakeCuda::IsRegistered(place.memory));
  FakeCuda::Resume();
  copier_->AwaitAll();
  const std::vector<SwapEnded> ended = copier_->TakeEnded();
  ASSERT_THAT(ended, SizeIs(1));
  EXPECT_TRUE(ended[0].status.ok()) << ended[0].status;
  EXPECT_EQ(map_.Drop(place.id, gone), 3u);
  gone.clear();
  EXPECT_EQ(FakeCuda::Registered(), 0u);
}

TEST_F(CudaSwapStoreTest, ChunkThatCannotBePinnedServesAllTheSame) {
  FakeCuda::RefuseRegistrations(true);
  MapChunk(3);
  EXPECT_EQ(FakeCuda::Registered(), 0u);
  std::mt19937 random(6);
  const std::vector<SwapMove> moves = Moves({1, 0, 2});
  const SwapEnded out = Finish(Direction::kOut, moves);
  ASSERT_TRUE(out.status.ok()) << out.status;
  EXPECT_TRUE(Finish(Direction::kIn, Back(moves, out.checksums, random)).status.ok());
}

}  // namespace
}  // namespace palimpsest
