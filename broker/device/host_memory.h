// Memory of the host that the broker makes and workers map: what slabs and arenas consist of.
#ifndef PALIMPSEST_BROKER_DEVICE_HOST_MEMORY_H_
#define PALIMPSEST_BROKER_DEVICE_HOST_MEMORY_H_

#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/fd.h"

namespace palimpsest {

enum class HostPages { kHugetlb, kTransparent, kSmall };

// A memfd of `size` zero bytes, a multiple of kHugePage. All pages are faulted in here, so that the
// memory is charged to the broker. Transparent huge ones do not depend on shmem_enabled: one page
// is touched and the range collapsed (MADV_COLLAPSE, Linux 6.1), which zeroes a huge page at memory
// speed, whereas small pages cost ten times as much to create and map. ResourceExhausted if the
// kernel refuses memory.
//
// The file is sealed against growing and against more seals (kSlabSeals), and nothing else: its
// worker can write to it and shrink it (which hurts nobody who does not map it), the broker can
// truncate it, after which stale accesses are a SIGBUS.
absl::StatusOr<UniqueFd> NewHostMemory(const char* name, Bytes size, HostPages pages);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_DEVICE_HOST_MEMORY_H_
