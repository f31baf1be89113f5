// KV blocks on two GPUs of the driver's double, for tests of what moves blocks.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_FAKE_GPU_BLOCKS_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_FAKE_GPU_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/types/span.h"
#include "common/cuda/context.h"
#include "common/cuda/testing/fake_driver.h"
#include "common/cuda/virtual_memory.h"
#include "gtest/gtest.h"

namespace palimpsest {

// Resets the double. What uses the blocks must have ended before this goes.
class FakeGpuBlocks {
 public:
  FakeGpuBlocks(Bytes slab, int slabs, Bytes block)
      : size_(slab * slabs), slab_(slab), block_(block) {
    FakeCuda::Reset();
    for (const int gpu : {1, 0}) {
      contexts_.push_back(*CudaContext::Open(FakeCudaDriver(), gpu));
      ranges_.push_back(*CudaAddressRange::Reserve(FakeCudaDriver(), gpu, size_));
      for (int i = 0; i < slabs; ++i) {
        slabs_.push_back(*CudaAllocation::Create(FakeCudaDriver(), gpu, slab));
        EXPECT_TRUE(ranges_.back().Map(slab * i, slab, slabs_.back()).ok());
      }
      EXPECT_TRUE(ranges_.back().Open(Bytes(0), size_).ok());
    }
  }
  ~FakeGpuBlocks() {
    for (const CudaAddressRange& range : ranges_) (void)range.Unmap(Bytes(0), size_);
  }
  FakeGpuBlocks(const FakeGpuBlocks&) = delete;
  FakeGpuBlocks& operator=(const FakeGpuBlocks&) = delete;

  // For CudaBlockCopier::Rank and CudaSwapCopier::Rank.
  template <typename Rank>
  std::vector<Rank> Ranks() const {
    std::vector<Rank> ranks;
    for (size_t i = 0; i < ranges_.size(); ++i) {
      ranks.push_back({contexts_[i], {}});
      ranks.back().memory.kv = reinterpret_cast<std::byte*>(ranges_[i].base());
      ranks.back().memory.kv_block_bytes = block_;
      ranks.back().memory.slab_bytes = slab_;
    }
    return ranks;
  }

  // The block's bytes are `byte` on the first GPU, one more on the second.
  void Fill(uint32_t block, int byte) {
    for (const CudaAddressRange& range : ranges_) {
      std::memset(At(range, block), byte++, static_cast<size_t>(block_.count()));
    }
  }
  bool Holds(uint32_t block, int byte) const {
    for (const CudaAddressRange& range : ranges_) {
      const std::byte* const bytes = At(range, block);
      if (bytes[0] != static_cast<std::byte>(byte++) ||
          std::memcmp(bytes, bytes + 1, static_cast<size_t>(block_.count()) - 1) != 0) {
        return false;
      }
    }
    return true;
  }

  // The block's bytes on a GPU.
  absl::Span<std::byte> Part(size_t rank, uint32_t block) const {
    return {At(ranges_[rank], block), static_cast<size_t>(block_.count())};
  }

 private:
  std::byte* At(const CudaAddressRange& range, uint32_t block) const {
    return reinterpret_cast<std::byte*>(range.base()) + (block_ * block).count();
  }

  const Bytes size_;
  const Bytes slab_;
  const Bytes block_;
  std::vector<CudaContextPtr> contexts_;
  std::vector<CudaAddressRange> ranges_;
  std::vector<CudaAllocation> slabs_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_FAKE_GPU_BLOCKS_H_
