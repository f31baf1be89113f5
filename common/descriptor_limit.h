// How many descriptors this process may hold.
#ifndef PALIMPSEST_COMMON_DESCRIPTOR_LIMIT_H_
#define PALIMPSEST_COMMON_DESCRIPTOR_LIMIT_H_

#include <cstdint>

#include "absl/status/status.h"

namespace palimpsest {

// Makes sure that this process may hold `count` descriptors at once, raising the soft limit if
// needed. FailedPrecondition names the hard limit and how to raise it.
absl::Status ReserveDescriptors(uint64_t count);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_DESCRIPTOR_LIMIT_H_
