#include "broker/tier/cxl/cxl_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <numaif.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>
#include <climits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "broker/device/memory_limit.h"
#include "common/fd.h"
#include "common/mapping.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef STATX_ATTR_DAX
#define STATX_ATTR_DAX 0x00200000
#endif

namespace palimpsest {
namespace {

constexpr int kMaxNode = 1023;

absl::Status Refused(absl::string_view what, int error) {
  const absl::Status status = ErrnoStatus(what, error);
  // A node without memory kills by EFAULT where another would say ENOMEM.
  if (error == ENOMEM || error == ENOSPC || error == EFAULT) {
    return absl::ResourceExhaustedError(status.message());
  }
  return absl::FailedPreconditionError(status.message());
}

// A file without a name in a folder of memory.
absl::StatusOr<UniqueFd> OpenInFolder(const std::string& folder, Bytes size) {
  UniqueFd file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!file.valid()) return Refused(absl::StrCat("cannot make a file in ", folder), errno);
  struct statfs system = {};
  struct statx attributes = {};
  const bool memory = ::fstatfs(file.get(), &system) == 0 && system.f_type == TMPFS_MAGIC;
  const bool dax = ::statx(file.get(), "", AT_EMPTY_PATH, STATX_BASIC_STATS, &attributes) == 0 &&
                   (attributes.stx_attributes & STATX_ATTR_DAX) != 0;
  if (!memory && !dax) {
    return absl::FailedPreconditionError(
        absl::StrCat(folder, " is on a disk; expected a tmpfs, or a file system mounted with DAX"));
  }
  if (const int error = ::posix_fallocate(file.get(), 0, size.count()); error != 0) {
    return Refused(absl::StrCat("no ", size.ToString(), " in ", folder), error);
  }
  return file;
}

absl::StatusOr<UniqueFd> OpenPath(const std::string& path, Bytes size) {
  struct stat entry = {};
  if (::stat(path.c_str(), &entry) != 0) return Refused(absl::StrCat("cannot use ", path), errno);
  if (S_ISDIR(entry.st_mode)) return OpenInFolder(path, size);
  if (!S_ISCHR(entry.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is neither a DAX device nor a folder"));
  }
  UniqueFd device(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!device.valid()) return Refused(absl::StrCat("cannot open ", path), errno);
  return device;
}

}  // namespace

absl::Status CxlOptions::Validate() const {
  const int ways = (node.has_value() ? 1 : 0) + (path.empty() ? 0 : 1) + (emulated ? 1 : 0);
  if (size <= Bytes(0) || size.count() % kHugePage.count() != 0 || ways != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a CXL tier of ", size.count(), " bytes with ", ways,
                     " of node, path and emulated; expected a multiple of ", kHugePage.ToString(),
                     " and exactly one of them"));
  }
  if (node.has_value() && (*node < 0 || *node > kMaxNode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("NUMA node ", *node, "; expected 0 to ", kMaxNode));
  }
  if (emulated.has_value() &&
      !(emulated->bytes_per_second > 0 && emulated->latency >= absl::ZeroDuration() &&
        emulated->latency <= absl::Seconds(1))) {
    return absl::InvalidArgumentError(
        "an emulated CXL tier expects a bandwidth above 0 and a latency of 0 to 1 s");
  }
  return absl::OkStatus();
}

absl::StatusOr<CxlMemory> CxlMemory::Map(const CxlOptions& options) {
  if (absl::Status status = options.Validate(); !status.ok()) return status;
  UniqueFd file;
  if (!options.path.empty()) {
    absl::StatusOr<UniqueFd> opened = OpenPath(options.path, options.size);
    if (!opened.ok()) return opened.status();
    file = *std::move(opened);
  } else {
    absl::Status limit = CheckMemoryLimit(options.size, options.system_root);
    if (!limit.ok()) return limit;
  }
  void* const mapped =
      ::mmap(nullptr, options.size.count(), PROT_READ | PROT_WRITE,
             file.valid() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, file.get(), 0);
  if (mapped == MAP_FAILED) {
    return Refused(absl::StrCat("cannot map ", options.size.ToString(), " of CXL memory"), errno);
  }
  CxlMemory memory(static_cast<std::byte*>(mapped), options.size.count());
  absl::Status status = options.node.has_value() ? memory.BindTo(*options.node) : absl::OkStatus();
  if (status.ok()) status = memory.Populate();
  if (!status.ok()) return status;
  return memory;
}

CxlMemory::~CxlMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

absl::Status CxlMemory::BindTo(int node) const {
  constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;
  std::vector<unsigned long> nodes(kMaxNode / kBits + 1);
  nodes[node / kBits] = 1UL << (node % kBits);
  // The kernel takes one bit less than it is told.
  if (::mbind(data_, size_, MPOL_BIND, nodes.data(), kMaxNode + 2, MPOL_MF_STRICT) == 0) {
    return absl::OkStatus();
  }
  return Refused(absl::StrCat("cannot take memory of NUMA node ", node,
                              " (numactl --hardware lists those that have some)"),
                 errno);
}

absl::Status CxlMemory::Populate() const {
  if (::madvise(data_, size_, MADV_POPULATE_WRITE) == 0) return absl::OkStatus();
  // Not of a DAX device, nor before Linux 5.14.
  if (errno != EINVAL) {
    return Refused(absl::StrCat("not all of ", Bytes(static_cast<int64_t>(size_)).ToString(),
                                " of CXL memory is there"),
                   errno);
  }
  constexpr size_t kPage = 4096;
  for (size_t at = 0; at < size_; at += kPage) {
    const_cast<volatile std::byte*>(data_)[at] = std::byte{0};
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
