#include "common/mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "common/fd.h"

// Of the kernel's headers, which do not go together with the C library's.
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace palimpsest {
namespace {

int Protection(MapAccess access) {
  return access == MapAccess::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
}

// Brings all pages of a fresh mapping in. Unlike MAP_POPULATE, which ignores errors, this reports
// when there is no memory for one.
absl::Status Populate(void* data, Bytes length, MapAccess access) {
  const int advice = access == MapAccess::kRead ? MADV_POPULATE_READ : MADV_POPULATE_WRITE;
  while (::madvise(data, static_cast<size_t>(length.count()), advice) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == EFAULT) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory behind a mapping of ", length.ToString(),
                       ": the file is shorter, or the machine or a hugetlb pool is out of memory"));
    }
    return ErrnoStatus(absl::StrCat("cannot populate a mapping of ", length.ToString()));
  }
  return absl::OkStatus();
}

// Addresses for `size` bytes, aligned; nothing may be accessed there. MAP_FAILED if there are none.
void* ReserveAligned(size_t size, size_t alignment) {
  void* const raw = ::mmap(nullptr, size + alignment, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return raw;
  // Cut the ends off so that the rest is aligned.
  std::byte* const start = static_cast<std::byte*>(raw);
  const size_t head = (alignment - reinterpret_cast<uintptr_t>(raw) % alignment) % alignment;
  const size_t tail = alignment - head;
  if (head > 0) ::munmap(start, head);
  if (tail > 0) ::munmap(start + head + size, tail);
  return start + head;
}

}  // namespace

void CollapsePages(std::byte* data, Bytes size) {
  // A call waits until all cores have put aside the pages that they hold back: few, large ones.
  const Bytes whole = kHugePage * (size / kHugePage);
  if (::madvise(data, static_cast<size_t>(whole.count()), MADV_COLLAPSE) == 0) return;
  // It ends at the first place that cannot be replaced.
  for (Bytes at; at < whole; at += kHugePage) {
    (void)::madvise(data + at.count(), static_cast<size_t>(kHugePage.count()), MADV_COLLAPSE);
  }
}

absl::Status AllocatePages(std::byte* data, Bytes size) {
  const Bytes page(::sysconf(_SC_PAGESIZE));
  // A huge page takes the place of a page that is there.
  for (Bytes at; at + kHugePage <= size; at += kHugePage) {
    absl::Status status = Populate(data + at.count(), page, MapAccess::kReadWrite);
    if (!status.ok()) return status;
  }
  CollapsePages(data, size);
  return Populate(data, size, MapAccess::kReadWrite);
}

absl::StatusOr<Mapping> Mapping::Map(int fd, Bytes length, MapAccess access, MapPopulate populate) {
  if (length <= Bytes(0)) {
    return absl::InvalidArgumentError(absl::StrCat("cannot map ", length.count(), " bytes"));
  }
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t size = (static_cast<size_t>(length.count()) + page - 1) / page * page;
  void* place = nullptr;
  if (length >= kHugePage) {
    place = ReserveAligned(size, static_cast<size_t>(kHugePage.count()));
    if (place == MAP_FAILED) {
      return ErrnoStatus(absl::StrCat("cannot reserve ", length.ToString(), " of addresses"));
    }
  }
  void* const data = ::mmap(place, static_cast<size_t>(length.count()), Protection(access),
                            MAP_SHARED | (place == nullptr ? 0 : MAP_FIXED), fd, 0);
  if (data == MAP_FAILED) {
    const absl::Status error = ErrnoStatus(absl::StrCat("cannot map ", length.ToString()));
    if (place != nullptr) ::munmap(place, size);
    return error;
  }
  Mapping mapping(static_cast<std::byte*>(data), static_cast<size_t>(length.count()));
  if (populate == MapPopulate::kYes) {
    if (absl::Status status = Populate(data, length, access); !status.ok()) return status;
  }
  return mapping;
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) ::munmap(data_, size_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

absl::StatusOr<AddressRange> AddressRange::Reserve(Bytes size, Bytes alignment) {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  const int64_t align = alignment.count();
  if (size <= Bytes(0) || size.count() % page != 0 || align < page || (align & (align - 1)) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot reserve ", size.count(), " bytes aligned to ", align, "; pages have ", page));
  }
  void* const place = ReserveAligned(static_cast<size_t>(size.count()), static_cast<size_t>(align));
  if (place == MAP_FAILED) {
    return ErrnoStatus(absl::StrCat("cannot reserve ", size.ToString(), " of addresses"));
  }
  return AddressRange(static_cast<std::byte*>(place), size);
}

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  if (this != &other) {
    if (base_ != nullptr) ::munmap(base_, static_cast<size_t>(size_.count()));
    base_ = std::exchange(other.base_, nullptr);
    size_ = std::exchange(other.size_, Bytes(0));
  }
  return *this;
}

AddressRange::~AddressRange() {
  if (base_ != nullptr) ::munmap(base_, static_cast<size_t>(size_.count()));
}

absl::Status AddressRange::CheckPiece(Bytes offset, Bytes length) const {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  if (offset >= Bytes(0) && length > Bytes(0) && length <= size_ && offset <= size_ - length &&
      offset.count() % page == 0 && length.count() % page == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("no piece of whole pages inside a range of ",
                                                 size_.count(), " bytes: ", length.count(),
                                                 " bytes at ", offset.count()));
}

absl::Status AddressRange::Map(Bytes offset, Bytes length, int fd, MapAccess access,
                               MapPopulate populate) {
  if (absl::Status status = CheckPiece(offset, length); !status.ok()) return status;
  void* const place = base_ + offset.count();
  if (::mmap(place, static_cast<size_t>(length.count()), Protection(access), MAP_SHARED | MAP_FIXED,
             fd, 0) == MAP_FAILED) {
    const absl::Status error = ErrnoStatus(absl::StrCat("cannot map ", length.ToString()));
    // A failed MAP_FIXED may have removed what was there.
    (void)Unmap(offset, length);
    return error;
  }
  if (populate == MapPopulate::kYes) {
    if (absl::Status status = Populate(place, length, access); !status.ok()) {
      (void)Unmap(offset, length);
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status AddressRange::Unmap(Bytes offset, Bytes length) {
  if (absl::Status status = CheckPiece(offset, length); !status.ok()) return status;
  if (::mmap(base_ + offset.count(), static_cast<size_t>(length.count()), PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return ErrnoStatus(absl::StrCat("cannot unmap ", length.ToString()));
  }
  return absl::OkStatus();
}

absl::Status AddressRange::Protect(Bytes offset, Bytes length, MapAccess access) {
  if (absl::Status status = CheckPiece(offset, length); !status.ok()) return status;
  if (::mprotect(base_ + offset.count(), static_cast<size_t>(length.count()), Protection(access)) !=
      0) {
    return ErrnoStatus(absl::StrCat("cannot protect ", length.ToString()));
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
