// Where KV blocks lie in the KV region, and which slabs they need.
//
// Block b occupies bytes [b * block_bytes, (b + 1) * block_bytes) of the region; it may straddle
// slabs. Block 0 is the null block: it has its place but is never handed out.
#ifndef PALIMPSEST_WORKER_CORE_KV_GEOMETRY_H_
#define PALIMPSEST_WORKER_CORE_KV_GEOMETRY_H_

#include <algorithm>
#include <cstdint>

#include "common/bytes.h"
#include "common/ids.h"

namespace palimpsest {

inline constexpr BlockId kNullBlock{0};

struct KvGeometry {
  Bytes slab_bytes;
  Bytes block_bytes;
  int32_t region_slabs = 0;
  int32_t block_tokens = 0;

  // Half-open range of ids.
  struct Range {
    uint32_t begin = 0;
    uint32_t end = 0;
  };

  // Ids below this one lie wholly in the region, the null block included.
  uint32_t block_count() const {
    return static_cast<uint32_t>(slab_bytes * region_slabs / block_bytes);
  }

  Range SlabsOf(BlockId block) const {
    const Bytes begin = block_bytes * block.value();
    return {static_cast<uint32_t>(begin / slab_bytes),
            static_cast<uint32_t>(CeilDiv(begin + block_bytes, slab_bytes))};
  }

  // Blocks, the null block excluded, that touch the slab.
  Range BlocksOf(RegionIndex slab) const {
    const Bytes begin = slab_bytes * slab.value();
    const auto end = static_cast<uint32_t>(CeilDiv(begin + slab_bytes, block_bytes));
    return {std::max<uint32_t>(1, static_cast<uint32_t>(begin / block_bytes)),
            std::min(end, block_count())};
  }

  // Usable blocks when `slabs` slabs are mapped from the start of the region without gaps.
  int32_t BlocksIn(int32_t slabs) const {
    return static_cast<int32_t>(std::max<int64_t>(0, slab_bytes * slabs / block_bytes - 1));
  }

  // Blocks before the border of a block that the token right behind it sees, with a sliding window
  // of so many tokens, itself included.
  int32_t WindowBlocks(int32_t window) const { return BlocksFor(window - 1); }

  int32_t BlocksFor(int32_t tokens) const { return (tokens + block_tokens - 1) / block_tokens; }

  // The inverse: slabs that hold `blocks` blocks, mapped as for BlocksIn.
  int32_t SlabsFor(int32_t blocks) const {
    return blocks == 0 ? 0
                       : static_cast<int32_t>(
                             CeilDiv(block_bytes * (static_cast<int64_t>(blocks) + 1), slab_bytes));
  }
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_KV_GEOMETRY_H_
