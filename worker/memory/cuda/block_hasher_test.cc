// Over the test double of the driver and its kernel; tools/gpu-check compares the kernel's own.
#include "worker/memory/cuda/block_hasher.h"

#include <xxhash.h>

#include <cstring>
#include <random>
#include <vector>

#include "common/slab_checksum.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/memory/cuda/testing/fake_kernels.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

// Two chunks and a bit.
constexpr Bytes kBlock = KiB(36);
constexpr size_t kChunks = 3;

class BlockHasherTest : public ::testing::Test {
 protected:
  BlockHasherTest() {
    FakeCuda::Reset();
    RegisterFakeKernels();
    context_ = *CudaContext::Open(FakeCudaDriver(), 0);
    EXPECT_TRUE(context_->MakeCurrent().ok());
    std::mt19937 random(2);
    for (std::byte& byte : kv_) byte = static_cast<std::byte>(random());
  }

  // As the checksum of what lies in the tiers.
  uint64_t Expected(uint32_t block) const {
    std::vector<std::byte> part(kChunks * kChecksumChunk);
    std::memcpy(part.data(), kv_.data() + (kBlock * block).count(),
                static_cast<size_t>(kBlock.count()));
    return SlabChecksum(part);
  }

  CudaContextPtr context_;
  std::vector<std::byte> kv_{static_cast<size_t>((kBlock * 20).count())};
};

TEST_F(BlockHasherTest, HashesAreThoseOfThePaddedParts) {
  auto hasher = BlockHasher::Create(context_, kv_.data(), kBlock);
  ASSERT_TRUE(hasher.ok()) << hasher.status();
  const CudaStream stream = *CudaStream::Create(context_);
  // More than one launch takes, and then more than there was room for.
  for (const size_t count : {size_t{3}, size_t{HashedBlocks::kMost} + 7}) {
    ASSERT_TRUE((*hasher)->Reserve(count).ok());
    std::vector<BlockId> blocks;
    for (size_t i = 0; i < count; ++i) blocks.push_back(BlockId(static_cast<uint32_t>(i * 7 % 20)));
    const absl::Span<const BlockId> all = blocks;
    ASSERT_TRUE((*hasher)->Queue(all.subspan(0, 2), 0, stream.get()).ok());
    ASSERT_TRUE((*hasher)->Queue(all.subspan(2), 2, stream.get()).ok());
    ASSERT_TRUE(stream.Synchronize().ok());
    for (size_t i = 0; i < count; ++i) {
      const absl::Span<const uint64_t> hashes = (*hasher)->hashes(i);
      ASSERT_EQ(hashes.size(), kChunks);
      ASSERT_EQ(XXH3_64bits(hashes.data(), hashes.size() * sizeof(uint64_t)),
                Expected(blocks[i].value()))
          << i;
    }
  }
}

TEST_F(BlockHasherTest, RefusesBlocksOfOddSizes) {
  EXPECT_THAT(BlockHasher::Create(context_, kv_.data(), Bytes(1000)).status().message(),
              HasSubstr("multiple of 16"));
  EXPECT_FALSE(BlockHasher::Create(context_, kv_.data(), Bytes(0)).ok());
}

}  // namespace
}  // namespace palimpsest
