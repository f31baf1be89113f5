#include "common/slab_checksum.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <xxh_x86dispatch.h>  // picks the processor's widest vectors
#else
#include <xxhash.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

namespace palimpsest {
namespace {

template <typename HashChunk>
uint64_t Combine(size_t size, const HashChunk& hash_chunk) {
  std::vector<uint64_t> hashes;
  hashes.reserve(size / kChecksumChunk + 1);
  for (size_t at = 0; at < size; at += kChecksumChunk) {
    hashes.push_back(hash_chunk(at, std::min(kChecksumChunk, size - at)));
  }
  return XXH3_64bits(hashes.data(), hashes.size() * sizeof(uint64_t));
}

}  // namespace

uint64_t SlabChecksum(absl::Span<const std::byte> slab) {
  return Combine(slab.size(),
                 [&](size_t at, size_t size) { return XXH3_64bits(slab.data() + at, size); });
}

uint64_t CopyWithChecksum(std::byte* to, absl::Span<const std::byte> from) {
  return Combine(from.size(), [&](size_t at, size_t size) {
    std::memcpy(to + at, from.data() + at, size);
    return XXH3_64bits(to + at, size);
  });
}

}  // namespace palimpsest
