// Memory for transfers that go past the page cache.
#ifndef PALIMPSEST_BROKER_TIER_ALIGNED_BUFFER_H_
#define PALIMPSEST_BROKER_TIER_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstdlib>
#include <memory>

#include "absl/types/span.h"
#include "common/bytes.h"

namespace palimpsest {

// Addresses, offsets and lengths of all transfers are multiples of this (O_DIRECT).
inline constexpr Bytes kIoUnit = KiB(4);

// Memory for transfers, aligned to kIoUnit; zero at first. Move-only.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  // `size` is a multiple of kIoUnit.
  explicit AlignedBuffer(Bytes size);
  AlignedBuffer(AlignedBuffer&&) noexcept = default;
  AlignedBuffer& operator=(AlignedBuffer&&) noexcept = default;

  absl::Span<std::byte> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };

  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_ALIGNED_BUFFER_H_
