// How a KV block of GPUs lies in the tiers below them: one extent, in which the parts of the ranks
// that share the model come one after the other, each padded with zero bytes to whole chunks of its
// checksum (slab_checksum.h), so that every GPU hashes its own part.
#ifndef PALIMPSEST_COMMON_STORED_BLOCK_H_
#define PALIMPSEST_COMMON_STORED_BLOCK_H_

#include "common/bytes.h"
#include "common/slab_checksum.h"

namespace palimpsest {

// Of a block that takes `block_bytes` on each GPU.
constexpr Bytes StoredPartBytes(Bytes block_bytes) {
  return RoundUp(block_bytes, Bytes(kChecksumChunk));
}

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_STORED_BLOCK_H_
