#include "worker/model/image_checksums.h"

#include <cassert>

#include "worker/model/parallel.h"

namespace palimpsest {

std::vector<uint64_t> ImageChecksums(absl::Span<const std::byte> image, Bytes slab_bytes,
                                     const std::function<void(Bytes, Bytes)>& progress) {
  const auto slab = static_cast<size_t>(slab_bytes.count());
  assert(slab > 0 && image.size() % slab == 0);
  std::vector<uint64_t> checksums(image.size() / slab);
  ForEachOnAllCores(
      static_cast<int64_t>(checksums.size()),
      [&](int64_t i) {
        const auto at = static_cast<size_t>(i);
        checksums[at] = SlabChecksum(image.subspan(at * slab, slab));
      },
      [&](int64_t done) {
        if (progress) progress(slab_bytes * done, Bytes(static_cast<int64_t>(image.size())));
      });
  // Another thread may have had the last slab.
  const Bytes total(static_cast<int64_t>(image.size()));
  if (progress) progress(total, total);
  return checksums;
}

}  // namespace palimpsest
