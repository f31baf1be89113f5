#include "common/block_checksum.h"

#include <xxhash.h>

#include "common/slab_checksum.h"

namespace palimpsest {

uint64_t BlockChecksum(const BlockKey& key, absl::Span<const std::byte> bytes) {
  return BlockChecksum(key, bytes.size(), SlabChecksum(bytes));
}

uint64_t BlockChecksum(const BlockKey& key, size_t length, uint64_t slab_checksum) {
  const uint64_t bound[] = {key.high, key.low, length, slab_checksum};
  return XXH3_64bits(bound, sizeof bound);
}

}  // namespace palimpsest
