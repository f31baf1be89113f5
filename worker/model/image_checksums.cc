#include "worker/model/image_checksums.h"

#include <cassert>

namespace palimpsest {

std::vector<uint64_t> ImageChecksums(absl::Span<const std::byte> image, Bytes slab_bytes,
                                     const std::function<void(Bytes, Bytes)>& progress) {
  const auto slab = static_cast<size_t>(slab_bytes.count());
  assert(slab > 0 && image.size() % slab == 0);
  std::vector<uint64_t> checksums;
  for (size_t begin = 0; begin < image.size(); begin += slab) {
    checksums.push_back(SlabChecksum(image.subspan(begin, slab)));
    if (progress) {
      progress(Bytes(static_cast<int64_t>(begin + slab)),
               Bytes(static_cast<int64_t>(image.size())));
    }
  }
  return checksums;
}

}  // namespace palimpsest
