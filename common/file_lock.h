// A lock between processes, held by a file's descriptor: it ends with the process that has it.
#ifndef PALIMPSEST_COMMON_FILE_LOCK_H_
#define PALIMPSEST_COMMON_FILE_LOCK_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/fd.h"

namespace palimpsest {

// Move-only; released on destruction.
class FileLock {
 public:
  // Blocks until nobody else has the lock of `path`, which is made if it is missing, its folder
  // too. Two locks of one process exclude each other as well.
  static absl::StatusOr<FileLock> Acquire(const std::string& path);

  // Of a file that is there and that this process may be unable to write. Looks every few
  // milliseconds; DeadlineExceeded if somebody else had the lock for as long as `patience`.
  static absl::StatusOr<FileLock> Join(const std::string& path, absl::Duration patience);

 private:
  explicit FileLock(UniqueFd file) : file_(std::move(file)) {}

  UniqueFd file_;
};

// The file that the workers of one broker lock while they take memory of GPUs and measure how much,
// one at a time. It lies beside each of the broker's control sockets, which may be in folders of
// different tenants: the same file under several names.
std::string StartLockPath(const std::string& control_socket);
// The broker's part; keeps a file that is there, so that locks of an earlier broker's workers hold.
// On error the others exclude each other all the same.
absl::Status MakeStartLocks(const std::vector<std::string>& control_sockets);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_FILE_LOCK_H_
