// What a memfd must look like to be a slab or a parameter image. Whoever receives a descriptor (a
// worker from the broker, a broker from a returning worker) checks it before he maps it: a file of
// another size would be a SIGBUS later, one that others can still write would be no proof of
// anything.
#ifndef PALIMPSEST_COMMON_MEMORY_FILE_H_
#define PALIMPSEST_COMMON_MEMORY_FILE_H_

#include <fcntl.h>

#include "absl/status/status.h"
#include "common/bytes.h"

namespace palimpsest {

// A slab can be written and shrunk (its worker hurts only itself, the broker retires it that way),
// but neither grown nor sealed further.
inline constexpr int kSlabSeals = F_SEAL_GROW | F_SEAL_SEAL;

// An image cannot change at all.
inline constexpr int kImageSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;

// Adds seals to a memfd. F_SEAL_WRITE is refused while a writable mapping exists, but also for
// moments, while the kernel itself (compaction, reclaim, DAMON) holds one of the pages: it is tried
// for two seconds. FailedPrecondition then, or if the memfd must not be sealed.
absl::Status SealMemory(int fd, int seals);

// InvalidArgument unless `fd` is a memfd of exactly `size` with exactly kSlabSeals, open for
// reading and writing.
absl::Status CheckSlabFile(int fd, Bytes size);

// InvalidArgument unless `fd` is a memfd of exactly `size` with at least kImageSeals, open for
// reading alone.
absl::Status CheckImageFile(int fd, Bytes size);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_MEMORY_FILE_H_
