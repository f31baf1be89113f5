#include "common/memory_file.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/fd.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

// `forbidden` seals must be missing.
absl::Status CheckMemoryFile(int fd, absl::string_view what, Bytes size, int required,
                             int forbidden, int access) {
  struct stat file;
  if (::fstat(fd, &file) != 0) return ErrnoStatus(absl::StrCat("fstat of ", what));
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (!S_ISREG(file.st_mode) || seals < 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is not a memfd"));
  }
  if ((seals & required) != required || (seals & forbidden) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has seals 0x%x, expected 0x%x and none of 0x%x", what, seals, required, forbidden));
  }
  if (file.st_size != size.count()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has ", file.st_size, " bytes, expected ", size.count()));
  }
  if ((::fcntl(fd, F_GETFL) & O_ACCMODE) != access) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, " is not open for ", access == O_RDONLY ? "reading alone" : "reading and writing"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SealMemory(int fd, int seals) {
  const absl::Time deadline = MonotonicNow() + absl::Seconds(2);
  while (::fcntl(fd, F_ADD_SEALS, seals) != 0) {
    if (errno != EBUSY || MonotonicNow() >= deadline) {
      return absl::FailedPreconditionError(absl::StrCat(
          "memory cannot be sealed", errno == EBUSY ? ", somebody can still write it" : "", ": ",
          strerror(errno)));
    }
    absl::SleepFor(absl::Milliseconds(1));
  }
  return absl::OkStatus();
}

absl::Status CheckSlabFile(int fd, Bytes size) {
  return CheckMemoryFile(fd, "the slab", size, kSlabSeals, ~kSlabSeals, O_RDWR);
}

absl::Status CheckImageFile(int fd, Bytes size) {
  return CheckMemoryFile(fd, "the parameter image", size, kImageSeals, 0, O_RDONLY);
}

}  // namespace palimpsest
