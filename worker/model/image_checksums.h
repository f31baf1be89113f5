// Checksums of a parameter image, one per slab (common/slab_checksum.h).
#ifndef PALIMPSEST_WORKER_MODEL_IMAGE_CHECKSUMS_H_
#define PALIMPSEST_WORKER_MODEL_IMAGE_CHECKSUMS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/slab_checksum.h"

namespace palimpsest {

// Of a mapped image whose size is a multiple of slab_bytes, computed by all cores. `progress` is
// called now and then and at the end, from this thread.
std::vector<uint64_t> ImageChecksums(
    absl::Span<const std::byte> image, Bytes slab_bytes,
    const std::function<void(Bytes done, Bytes total)>& progress = nullptr);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_IMAGE_CHECKSUMS_H_
