#include "common/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace palimpsest {

absl::StatusOr<FileLock> FileLock::Acquire(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  UniqueFd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  int result = -1;
  while (file.valid() && (result = flock(file.get(), LOCK_EX)) != 0 && errno == EINTR) {
  }
  if (result == 0) return FileLock(std::move(file));
  return ErrnoStatus(absl::StrCat("cannot lock ", path));
}

}  // namespace palimpsest
