// A lock between processes, held by a file's descriptor: it ends with the process that has it.
#ifndef PALIMPSEST_COMMON_FILE_LOCK_H_
#define PALIMPSEST_COMMON_FILE_LOCK_H_

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "common/fd.h"

namespace palimpsest {

// Move-only; released on destruction.
class FileLock {
 public:
  // Blocks until nobody else has the lock of `path`, which is made if it is missing, its folder
  // too. Two locks of one process exclude each other as well.
  static absl::StatusOr<FileLock> Acquire(const std::string& path);

 private:
  explicit FileLock(UniqueFd file) : file_(std::move(file)) {}

  UniqueFd file_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_FILE_LOCK_H_
