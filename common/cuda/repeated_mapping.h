// A second range of addresses in which memory that is mapped elsewhere lies over and over: for
// readers that need more addresses than there is memory.
//
// Threads: not thread-safe. No context is needed.
#ifndef PALIMPSEST_COMMON_CUDA_REPEATED_MAPPING_H_
#define PALIMPSEST_COMMON_CUDA_REPEATED_MAPPING_H_

#include <utility>

#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/cuda/driver.h"
#include "common/cuda/virtual_memory.h"

namespace palimpsest {

class RepeatedMapping {
 public:
  // Allocations of `piece` bytes each, mapped side by side from `address` on; the repetition keeps
  // them alive.
  struct Memory {
    CUdeviceptr address = 0;
    Bytes size;
    Bytes piece;
  };

  // At least `size` bytes of addresses for GPU `ordinal`: the pieces in their order, then again
  // from the first. InvalidArgument if `memory` is not whole pieces, or no memory is mapped there.
  static absl::StatusOr<RepeatedMapping> Map(const CudaDriver& driver, int ordinal,
                                             const Memory& memory, Bytes size);

  RepeatedMapping() = default;
  RepeatedMapping(RepeatedMapping&& other) noexcept { *this = std::move(other); }
  RepeatedMapping& operator=(RepeatedMapping&& other) noexcept {
    std::swap(range_, other.range_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  // Nothing may read it any more.
  ~RepeatedMapping();

  CUdeviceptr base() const { return range_.base(); }
  Bytes size() const { return range_.size(); }

 private:
  CudaAddressRange range_;
  Bytes mapped_;  // from the range's first byte on
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_CUDA_REPEATED_MAPPING_H_
