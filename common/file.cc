#include "common/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/fd.h"

namespace palimpsest {
namespace {

constexpr Bytes kMaxSecret = KiB(4);

absl::StatusOr<UniqueFd> OpenRegular(const std::string& path, struct stat* entry) {
  // A pipe or a device must not block us before we know that it is one.
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd.valid()) return ErrnoStatus(absl::StrCat("cannot read ", path));
  if (::fstat(fd.get(), entry) != 0) return ErrnoStatus(absl::StrCat("cannot read ", path));
  if (!S_ISREG(entry->st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  return fd;
}

absl::Status TooLong(const std::string& path, Bytes limit) {
  return absl::OutOfRangeError(
      absl::StrCat(path, " is longer than the ", limit.ToString(), " allowed"));
}

absl::StatusOr<std::string> ReadAll(int fd, const std::string& path, const struct stat& entry,
                                    Bytes limit) {
  if (entry.st_size > limit.count()) return TooLong(path, limit);
  std::string content;
  // It may grow meanwhile, and files of /proc have size 0; the read decides.
  size_t chunk = static_cast<size_t>(entry.st_size) + 1;
  for (;;) {
    const size_t old = content.size();
    content.resize(old + chunk);
    const ssize_t got = ::read(fd, content.data() + old, chunk);
    content.resize(old + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0) {
      if (errno == EINTR) continue;
      return ErrnoStatus(absl::StrCat("cannot read ", path));
    }
    if (got == 0) return content;
    if (content.size() > static_cast<size_t>(limit.count())) return TooLong(path, limit);
    chunk = 4096;
  }
}

absl::Status WriteAll(int fd, absl::string_view content) {
  while (!content.empty()) {
    const ssize_t written = ::write(fd, content.data(), content.size());
    if (written < 0 && errno != EINTR) return ErrnoStatus("write");
    content.remove_prefix(static_cast<size_t>(std::max<ssize_t>(written, 0)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path, Bytes limit) {
  struct stat entry;
  absl::StatusOr<UniqueFd> fd = OpenRegular(path, &entry);
  if (!fd.ok()) return fd.status();
  return ReadAll(fd->get(), path, entry, limit);
}

absl::StatusOr<std::string> ReadSecretFile(const std::string& path) {
  struct stat entry;
  absl::StatusOr<UniqueFd> fd = OpenRegular(path, &entry);
  if (!fd.ok()) return fd.status();
  if (entry.st_uid != 0 && entry.st_uid != ::geteuid()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the secret file %s belongs to user %d, expected root or user %d", path,
                        entry.st_uid, ::geteuid()));
  }
  if ((entry.st_mode & (S_IWGRP | S_IRWXO)) != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the secret file %s has mode %04o, so that others can read or change it; run: chmod 600 %s",
        path, entry.st_mode & 07777, path));
  }
  absl::StatusOr<std::string> secret = ReadAll(fd->get(), path, entry, kMaxSecret);
  if (!secret.ok()) return secret.status();
  while (!secret->empty() && (secret->back() == '\n' || secret->back() == '\r')) secret->pop_back();
  if (secret->empty()) {
    return absl::InvalidArgumentError(absl::StrCat("the secret file ", path, " is empty"));
  }
  return secret;
}

absl::Status WriteFileAtomically(const std::string& path, absl::string_view content, mode_t mode) {
  const std::string what = absl::StrCat("cannot write ", path);
  const size_t slash = path.rfind('/');
  const std::string folder =
      slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
  std::string temporary = path + ".XXXXXX";
  const UniqueFd fd(::mkostemp(temporary.data(), O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(what);
  absl::Status status = WriteAll(fd.get(), content);
  if (status.ok() && (::fchmod(fd.get(), mode) != 0 || ::fsync(fd.get()) != 0 ||
                      ::rename(temporary.c_str(), path.c_str()) != 0)) {
    status = ErrnoStatus(what);
  }
  if (!status.ok()) {
    ::unlink(temporary.c_str());
    return status;
  }
  const UniqueFd directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory.valid() || ::fsync(directory.get()) != 0) return ErrnoStatus(what);
  return absl::OkStatus();
}

}  // namespace palimpsest
