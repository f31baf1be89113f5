// Checksums of a parameter image, one xxh3-64 per slab.
#ifndef PALIMPSEST_WORKER_MODEL_IMAGE_CHECKSUMS_H_
#define PALIMPSEST_WORKER_MODEL_IMAGE_CHECKSUMS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "common/bytes.h"

namespace palimpsest {

uint64_t SlabChecksum(absl::Span<const std::byte> slab);

// Of a mapped image whose size is a multiple of slab_bytes. `progress` is called after each slab.
std::vector<uint64_t> ImageChecksums(
    absl::Span<const std::byte> image, Bytes slab_bytes,
    const std::function<void(Bytes done, Bytes total)>& progress = nullptr);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_IMAGE_CHECKSUMS_H_
