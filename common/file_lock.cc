#include "common/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(5);

bool SameFile(const std::string& a, const std::string& b) {
  struct stat first = {}, second = {};
  return lstat(a.c_str(), &first) == 0 && lstat(b.c_str(), &second) == 0 &&
         first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

// Makes `path` another name of the file `first`.
absl::Status NameAlso(const std::string& first, const std::string& path) {
  if (SameFile(first, path)) return absl::OkStatus();
  unlink(path.c_str());
  if (link(first.c_str(), path.c_str()) == 0) return absl::OkStatus();
  return ErrnoStatus(absl::StrCat("cannot give ", first, " the name ", path, " as well"));
}

}  // namespace

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

absl::StatusOr<FileLock> FileLock::Join(const std::string& path, absl::Duration patience) {
  UniqueFd file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!file.valid()) return ErrnoStatus(absl::StrCat("cannot open ", path));
  const absl::Time deadline = MonotonicNow() + patience;
  while (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return ErrnoStatus(absl::StrCat("cannot lock ", path));
    }
    if (MonotonicNow() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("another process had the lock of ", path,
                                                      " for ", absl::FormatDuration(patience)));
    }
    absl::SleepFor(kLook);
  }
  return FileLock(std::move(file));
}

std::string StartLockPath(const std::string& control_socket) {
  return (std::filesystem::path(control_socket).parent_path() / "starting.lock").string();
}

absl::Status MakeStartLocks(const std::vector<std::string>& control_sockets) {
  absl::Status status;
  if (control_sockets.empty()) return status;
  const std::string first = StartLockPath(control_sockets.front());
  // Whoever may open it may lock it; nobody else writes it.
  const UniqueFd file(open(first.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!file.valid() || fchmod(file.get(), 0644) != 0) {
    return ErrnoStatus(absl::StrCat("cannot make ", first));
  }
  for (size_t i = 1; i < control_sockets.size(); ++i) {
    status.Update(NameAlso(first, StartLockPath(control_sockets[i])));
  }
  return status;
}

}  // namespace palimpsest
