#include "common/descriptor_limit.h"

#include <sys/resource.h>

#include "absl/strings/str_cat.h"
#include "common/fd.h"

namespace palimpsest {

absl::Status ReserveDescriptors(uint64_t count) {
  rlimit limit;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return ErrnoStatus("RLIMIT_NOFILE");
  if (limit.rlim_cur >= count) return absl::OkStatus();
  if (limit.rlim_max < count) {
    // root may raise it.
    const rlimit raised = {count, count};
    if (::setrlimit(RLIMIT_NOFILE, &raised) == 0) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "the pool needs ", count, " file descriptors, but at most ", limit.rlim_max,
        " are allowed; raise the limit (ulimit -Hn, LimitNOFILE= of systemd) or make the pool "
        "smaller"));
  }
  limit.rlim_cur = count;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return ErrnoStatus("RLIMIT_NOFILE");
  return absl::OkStatus();
}

}  // namespace palimpsest
