#include "broker/server/host_checks.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/fd.h"

namespace palimpsest {
namespace {

// Files of /proc have no size to read by. An absent one reads as empty.
std::string ReadText(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

absl::StatusOr<std::string> BootId() {
  std::string id = ReadText("/proc/sys/kernel/random/boot_id");
  while (!id.empty() && id.back() == '\n') id.pop_back();
  if (id.empty()) return absl::InternalError("/proc/sys/kernel/random/boot_id is not readable");
  return id;
}

absl::Status ClearSocketPath(const std::string& path) {
  struct stat file;
  if (lstat(path.c_str(), &file) != 0) return absl::OkStatus();
  if (!S_ISSOCK(file.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " exists and is no socket: remove it, or choose another path"));
  }
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is too long for a socket (at most ",
                                                   sizeof address.sun_path - 1, " bytes)"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    return absl::AlreadyExistsError(
        absl::StrCat("another process listens on ", path, ": stop it, or choose another path"));
  }
  if (errno != ECONNREFUSED) return ErrnoStatus(absl::StrCat("probe ", path));
  if (unlink(path.c_str()) != 0) return ErrnoStatus(absl::StrCat("remove ", path));
  return absl::OkStatus();
}

}  // namespace palimpsest
