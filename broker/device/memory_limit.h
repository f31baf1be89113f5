// Whether the machine and this process's control groups have room for memory that is about to be
// taken. Asked once at start: a pool that does not fit should be a message, not an out-of-memory
// kill under load.
#ifndef PALIMPSEST_BROKER_DEVICE_MEMORY_LIMIT_H_
#define PALIMPSEST_BROKER_DEVICE_MEMORY_LIMIT_H_

#include <string>

#include "absl/status/status.h"
#include "common/bytes.h"

namespace palimpsest {

// ResourceExhausted when `needed` bytes of ordinary memory (hugetlb pages are not) exceed what
// /proc/meminfo calls available, or what is left under the limit of a memory control group (version
// 1 or 2) that this process is in, at any level. The message names the limit and what to do. `root`
// is prepended to the paths of /proc and /sys.
absl::Status CheckMemoryLimit(Bytes needed, const std::string& root = "");

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_DEVICE_MEMORY_LIMIT_H_
