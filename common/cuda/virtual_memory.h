// GPU memory apart from addresses (CUDA's virtual memory management): allocations that travel
// between processes as file descriptors, and reserved address ranges that they are mapped into.
//
// An allocation lives as long as a handle, a mapping or a descriptor of it exists anywhere. What
// was imported cannot be exported again, but the descriptor can be imported again and again.
//
// Threads: thread-safe for different pieces of a range. No context is needed.
#ifndef PALIMPSEST_COMMON_CUDA_VIRTUAL_MEMORY_H_
#define PALIMPSEST_COMMON_CUDA_VIRTUAL_MEMORY_H_

#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/cuda/driver.h"
#include "common/fd.h"

namespace palimpsest {

// A handle of one allocation on one GPU.
class CudaAllocation {
 public:
  // What sizes of allocations on that GPU must be a multiple of.
  static absl::StatusOr<Bytes> Granularity(const CudaDriver& driver, int ordinal);

  // Fresh memory of undefined content on GPU `ordinal`. ResourceExhausted when there is none.
  static absl::StatusOr<CudaAllocation> Create(const CudaDriver& driver, int ordinal, Bytes size);

  // Memory behind a descriptor that another process exported. InvalidArgument for descriptors of
  // anything else, and for memory that does not lie on GPU `ordinal`. Its size shows only when it
  // is mapped.
  static absl::StatusOr<CudaAllocation> Import(const CudaDriver& driver, int ordinal,
                                               const UniqueFd& memory);
  // The same of any GPU's.
  static absl::StatusOr<CudaAllocation> Import(const CudaDriver& driver, const UniqueFd& memory);

  // The memory that is mapped at an address of this process.
  static absl::StatusOr<CudaAllocation> At(const CudaDriver& driver, CUdeviceptr address);

  CudaAllocation() = default;
  CudaAllocation(CudaAllocation&& other) noexcept { *this = std::move(other); }
  CudaAllocation& operator=(CudaAllocation&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~CudaAllocation() { Reset(); }

  bool valid() const { return driver_ != nullptr; }
  CUmemGenericAllocationHandle get() const { return handle_; }
  void Reset();

  // Only of memory that this process created.
  absl::StatusOr<UniqueFd> Export() const;

 private:
  const CudaDriver* driver_ = nullptr;
  CUmemGenericAllocationHandle handle_ = 0;
};

// A range of addresses of this process, usable by GPU `ordinal`. Where nothing is mapped, an access
// of the GPU is an error that ends the context.
class CudaAddressRange {
 public:
  static absl::StatusOr<CudaAddressRange> Reserve(const CudaDriver& driver, int ordinal,
                                                  Bytes size);

  CudaAddressRange() = default;
  CudaAddressRange(CudaAddressRange&& other) noexcept { *this = std::move(other); }
  CudaAddressRange& operator=(CudaAddressRange&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(ordinal_, other.ordinal_);
    std::swap(base_, other.base_);
    std::swap(size_, other.size_);
    return *this;
  }
  // Everything must be unmapped.
  ~CudaAddressRange();

  CUdeviceptr base() const { return base_; }
  Bytes size() const { return size_; }

  // Maps a whole allocation of exactly `size` bytes; nobody may access it before Open.
  // InvalidArgument when the allocation has another size, or the piece is taken.
  absl::Status Map(Bytes offset, Bytes size, const CudaAllocation& memory) const;
  // Lets the GPU read and write a piece in which every byte is mapped. The dear part of mapping,
  // and little dearer for many allocations in a row than for one. An error for memory of another
  // GPU that this one cannot reach.
  absl::Status Open(Bytes offset, Bytes size) const;
  // Whole allocations only; any number in a row. Does not wait for kernels.
  absl::Status Unmap(Bytes offset, Bytes size) const;

 private:
  const CudaDriver* driver_ = nullptr;
  int ordinal_ = 0;
  CUdeviceptr base_ = 0;
  Bytes size_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_CUDA_VIRTUAL_MEMORY_H_
