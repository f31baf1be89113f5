// The checksum under which a KV block moves between tiers. It binds the key and the length: a block
// that lies where another one was expected does not pass for it, nor does a part of a block.
#ifndef PALIMPSEST_COMMON_BLOCK_CHECKSUM_H_
#define PALIMPSEST_COMMON_BLOCK_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "common/block_key.h"

namespace palimpsest {

// XXH3-64 of the key, the length and the SlabChecksum of the bytes (common/slab_checksum.h), as
// four 64-bit little-endian numbers. The last is what a GPU computes; the rest costs nothing.
uint64_t BlockChecksum(const BlockKey& key, absl::Span<const std::byte> bytes);
uint64_t BlockChecksum(const BlockKey& key, size_t length, uint64_t slab_checksum);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_BLOCK_CHECKSUM_H_
