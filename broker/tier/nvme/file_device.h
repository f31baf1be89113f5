// A file or a block device as a BlockDevice: O_DIRECT and io_uring, or as much of that as the
// system grants. Containers often refuse io_uring: then a few threads do blocking calls. Some file
// systems refuse O_DIRECT: then bytes go through the page cache. Either is logged once, as a
// warning.
#ifndef PALIMPSEST_BROKER_TIER_NVME_FILE_DEVICE_H_
#define PALIMPSEST_BROKER_TIER_NVME_FILE_DEVICE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "broker/tier/nvme/block_device.h"
#include "common/bytes.h"
#include "common/fd.h"

namespace palimpsest {

struct FileDeviceOptions {
  std::string path;
  // Of the file: it is made with all of its room if it is missing or empty, readable by its owner
  // alone. A file of another size is refused. Of a block device: what is used of it.
  Bytes size;
  // Transfers that the kernel has at the same time, and threads where there is no io_uring.
  int depth = 64;
  int threads = 16;
  bool direct = true;
  bool io_uring = true;
};

// May block. FailedPrecondition if another process, or another device of this one, has the file;
// ResourceExhausted if the file system has no room for it.
absl::StatusOr<std::unique_ptr<BlockDevice>> OpenFileDevice(const FileDeviceOptions& options);

// The two engines. They own the descriptor; `depth` and `threads` are positive.

// Whatever the kernel says where it does not offer io_uring.
absl::StatusOr<std::unique_ptr<BlockDevice>> MakeUringDevice(UniqueFd& file, Bytes size, int depth);
std::unique_ptr<BlockDevice> MakeThreadedDevice(UniqueFd file, Bytes size, int threads);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_NVME_FILE_DEVICE_H_
