// Reading whole files that somebody else wrote: bounded, and for secrets only if nobody else can
// read or replace them.
#ifndef PALIMPSEST_COMMON_FILE_H_
#define PALIMPSEST_COMMON_FILE_H_

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/bytes.h"

namespace palimpsest {

// The content of a regular file. NotFound, PermissionDenied; OutOfRange when it is longer than
// `limit`; InvalidArgument for anything but a regular file.
absl::StatusOr<std::string> ReadFile(const std::string& path, Bytes limit);

// The content of a file that holds one secret: at most 4 KiB, trailing line ends are stripped, and
// what is left must not be empty. The file must belong to root or to this user, and nobody else may
// write it; others than owner and group may not read it either. FailedPrecondition says how to
// repair that.
absl::StatusOr<std::string> ReadSecretFile(const std::string& path);

// Replaces `path` with `content` atomically: readers see the old or the new content, and after an
// OK the new one survives a crash of the machine.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view content,
                                 mode_t mode = 0644);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_FILE_H_
