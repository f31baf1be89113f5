// Ownership of a file descriptor. Move-only; closed on destruction.
#ifndef PALIMPSEST_COMMON_FD_H_
#define PALIMPSEST_COMMON_FD_H_

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace palimpsest {

// The status of the failed system call whose errno is `error_number` (default: errno).
inline absl::Status ErrnoStatus(absl::string_view what, int error_number = errno) {
  return absl::ErrnoToStatus(error_number, what);
}

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) Reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { Reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

  // Gives the descriptor up without closing it.
  [[nodiscard]] int Release() { return std::exchange(fd_, -1); }

  // Linux frees the number even when close() reports an error, so that the result is not looked at.
  void Reset(int fd = -1) {
    const int old = std::exchange(fd_, fd);
    if (old >= 0) ::close(old);
  }

  // A second descriptor of the same open file, with CLOEXEC.
  absl::StatusOr<UniqueFd> Duplicate() const {
    const int fd = ::fcntl(fd_, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return ErrnoStatus("cannot duplicate a descriptor");
    return UniqueFd(fd);
  }

 private:
  int fd_ = -1;
};

// What names a slab's memory to other processes: one descriptor, or one for each GPU of its pool in
// the order of ranks.
using SlabDescriptors = std::vector<UniqueFd>;

inline SlabDescriptors OneDescriptor(UniqueFd fd) {
  SlabDescriptors one;
  one.push_back(std::move(fd));
  return one;
}

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_FD_H_
