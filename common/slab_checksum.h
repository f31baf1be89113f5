// The checksum of a slab of a parameter image: XXH3-64 (https://xxhash.com, long inputs) of each
// 16 KiB chunk, then XXH3-64 of those hashes, as 64-bit little-endian numbers in order. One XXH3
// over the slab would be one chain of dependent steps; chunks let a GPU compute it in parallel
// (worker/memory/cuda/slab_checksum.cu), at a small part of the time of the copy.
#ifndef PALIMPSEST_COMMON_SLAB_CHECKSUM_H_
#define PALIMPSEST_COMMON_SLAB_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace palimpsest {

inline constexpr size_t kChecksumChunk = size_t{16} << 10;

// The last chunk may be shorter.
uint64_t SlabChecksum(absl::Span<const std::byte> slab);

// Copies the slab and returns the checksum of what arrived, read while it is in the cache.
uint64_t CopyWithChecksum(std::byte* to, absl::Span<const std::byte> from);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_SLAB_CHECKSUM_H_
