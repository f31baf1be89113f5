// Runs the packer (worker/model/packer.h) in a process of its own and takes what it made.
//
// The packer reads files that somebody else wrote, so it is not believed: its manifest must be the
// one that the broker computes itself, its memory must have that size, everything it says is
// bounded, and it has a deadline after which it is killed.
#ifndef PALIMPSEST_BROKER_SERVER_PACKER_PROCESS_H_
#define PALIMPSEST_BROKER_SERVER_PACKER_PROCESS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/fd.h"
#include "proto/palimpsest/v1/broker.pb.h"

namespace palimpsest {

using ImageProgressFn = std::function<void(Bytes done, Bytes total)>;

struct PackerRun {
  // Path of the executable.
  std::string packer;
  std::string model_folder;
  // If set, weights are generated and not read.
  std::optional<uint64_t> dummy_seed;
  // What the manifest must say (fingerprint and checksums are empty).
  v1::ImageManifest expected;
  absl::Duration deadline = absl::Minutes(30);
};

// Blocks until the packer has exited. The memory is sealed against every change, and a writable
// descriptor of it exists nowhere any more; what is returned is open for reading only.
//   Aborted: the packer failed; the message ends with what it said last on stderr.
//   DeadlineExceeded, Cancelled: it was killed after the deadline, or because `cancelled` (asked
//   ten times a second) said so. DataLoss: it exited with success, but what it made is not the
//   expected image.
absl::StatusOr<UniqueFd> RunPacker(const PackerRun& run, const ImageProgressFn& progress,
                                   const std::function<bool()>& cancelled);

// FailedPrecondition unless `fd` is a memfd of exactly `size` that nobody can write or resize.
absl::Status CheckSealed(int fd, Bytes size);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_PACKER_PROCESS_H_
