// Mapped memory with RAII: a whole mapping of a file, and a reserved address range in which pieces
// of files come and go.
#ifndef PALIMPSEST_COMMON_MAPPING_H_
#define PALIMPSEST_COMMON_MAPPING_H_

#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bytes.h"

namespace palimpsest {

enum class MapAccess { kRead, kReadWrite };

// Whether all pages are brought into the page table at once. An access to a page that cannot be
// brought in later (no memory) is a SIGBUS; populated, it is an error here.
enum class MapPopulate { kNo, kYes };

inline constexpr Bytes kHugePage = MiB(2);

// Replaces the pages of a mapping of a memfd by huge pages, as far as the kernel has any and those
// places are present at all; the content stays. `data` is aligned to kHugePage.
void CollapsePages(std::byte* data, Bytes size);

// Gives every page of a writable mapping of a memfd memory, zero bytes where there was none: huge
// pages as far as the kernel has any, which several threads allocate (disjoint pieces, each of many
// huge pages) as fast as memory is zeroed. `data` is aligned to kHugePage. ResourceExhausted if
// there is not enough.
absl::Status AllocatePages(std::byte* data, Bytes size);

// A shared mapping of the first `length` bytes of a file, aligned to kHugePage if it holds one.
class Mapping {
 public:
  static absl::StatusOr<Mapping> Map(int fd, Bytes length, MapAccess access,
                                     MapPopulate populate = MapPopulate::kNo);

  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  bool valid() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  Mapping(std::byte* data, size_t size) : data_(data), size_(size) {}

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// A range of addresses that nobody else gets. Where nothing is mapped, every access is a SIGSEGV.
// Thread-safe for disjoint pieces; pieces must not be mapped or unmapped while others access them.
class AddressRange {
 public:
  // Reserves addresses alone, no memory. `alignment` is a power of two, at least a page.
  static absl::StatusOr<AddressRange> Reserve(Bytes size, Bytes alignment);

  AddressRange() = default;
  AddressRange(AddressRange&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), size_(std::exchange(other.size_, Bytes(0))) {}
  AddressRange& operator=(AddressRange&& other) noexcept;
  ~AddressRange();

  std::byte* base() const { return base_; }
  Bytes size() const { return size_; }

  // Maps bytes 0 .. length of `fd` at `offset`, in place of what was there; the descriptor is not
  // needed afterwards. Offset and length are multiples of the page size (of a huge page, if `fd` is
  // made of them) and inside the range. On error the piece is unmapped.
  absl::Status Map(Bytes offset, Bytes length, int fd, MapAccess access, MapPopulate populate);

  // Gives the memory up and keeps the addresses.
  absl::Status Unmap(Bytes offset, Bytes length);

  // Makes a mapped piece read-only or writable.
  absl::Status Protect(Bytes offset, Bytes length, MapAccess access);

 private:
  AddressRange(std::byte* base, Bytes size) : base_(base), size_(size) {}

  absl::Status CheckPiece(Bytes offset, Bytes length) const;

  std::byte* base_ = nullptr;
  Bytes size_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_MAPPING_H_
