#include "broker/device/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "common/mapping.h"
#include "common/memory_file.h"

// Of the kernel's headers, which do not go together with the C library's.
#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21U << 26)
#endif

namespace palimpsest {
namespace {

absl::Status Refused(const char* what, const char* name) {
  const int error = errno;
  const absl::Status status = ErrnoStatus(absl::StrCat("cannot ", what, " ", name), error);
  const bool no_memory = error == ENOMEM || error == ENOSPC;
  return no_memory ? absl::ResourceExhaustedError(status.message()) : status;
}

}  // namespace

absl::StatusOr<UniqueFd> NewHostMemory(const char* name, Bytes size, HostPages pages) {
  const bool hugetlb = pages == HostPages::kHugetlb;
  const bool transparent = pages == HostPages::kTransparent;
  UniqueFd memory(::memfd_create(
      name, MFD_CLOEXEC | MFD_ALLOW_SEALING | (hugetlb ? MFD_HUGETLB | MFD_HUGE_2MB : 0)));
  if (!memory.valid()) return Refused("create", name);
  if (::ftruncate(memory.get(), size.count()) != 0) return Refused("size", name);
  // Huge pages need an aligned place to be mapped at.
  absl::StatusOr<AddressRange> range = AddressRange::Reserve(size, kHugePage);
  if (!range.ok()) return range.status();
  absl::Status status = range->Map(Bytes(0), size, memory.get(), MapAccess::kReadWrite,
                                   transparent ? MapPopulate::kNo : MapPopulate::kYes);
  if (status.ok() && transparent) status = AllocatePages(range->base(), size);
  if (!status.ok()) return status;
  if (::fcntl(memory.get(), F_ADD_SEALS, kSlabSeals) != 0) return Refused("seal", name);
  return memory;
}

}  // namespace palimpsest
