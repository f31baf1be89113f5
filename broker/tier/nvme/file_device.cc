#include "broker/tier/nvme/file_device.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"

namespace palimpsest {
namespace {

absl::Status Lock(const UniqueFd& file, const std::string& path) {
  if (flock(file.get(), LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  if (errno != EWOULDBLOCK) return ErrnoStatus(absl::StrCat("cannot lock ", path));
  return absl::FailedPreconditionError(
      absl::StrCat("another broker uses ", path,
                   ": stop it, or give this one its own file (to find it: fuser ", path, ")"));
}

absl::Status SyncFolderOf(const std::string& path) {
  std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) folder = ".";
  const UniqueFd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid() || fsync(fd.get()) != 0) {
    return ErrnoStatus(absl::StrCat("cannot sync the folder of ", path));
  }
  return absl::OkStatus();
}

// Gives an empty file all of its room, so that no write finds the file system full.
absl::Status Allocate(const UniqueFd& file, const FileDeviceOptions& options) {
  // Asked first, since an attempt takes all there is before it fails.
  struct statvfs fs = {};
  if (fstatvfs(file.get(), &fs) != 0) return ErrnoStatus("cannot tell how much room is left");
  const Bytes left = Bytes(static_cast<int64_t>(fs.f_bavail * fs.f_frsize));
  if (left < options.size) {
    return absl::ResourceExhaustedError(absl::StrCat(options.path, " needs ",
                                                     options.size.ToString(), ", but only ",
                                                     left.ToString(), " are left there"));
  }
  if (fallocate(file.get(), 0, 0, options.size.count()) == 0) {
    if (fsync(file.get()) != 0) return ErrnoStatus(absl::StrCat("cannot sync ", options.path));
    return SyncFolderOf(options.path);
  }
  absl::Status status =
      ErrnoStatus(absl::StrCat("cannot give ", options.path, " its ", options.size.ToString()));
  // A part of the room may have been given.
  if (ftruncate(file.get(), 0) != 0) status.Update(ErrnoStatus("cannot give it back"));
  return status;
}

absl::Status Prepare(const UniqueFd& file, const FileDeviceOptions& options) {
  struct stat info = {};
  if (fstat(file.get(), &info) != 0) return ErrnoStatus(absl::StrCat("cannot stat ", options.path));
  if (S_ISBLK(info.st_mode)) {
    uint64_t bytes = 0;
    if (ioctl(file.get(), BLKGETSIZE64, &bytes) != 0) {
      return ErrnoStatus(absl::StrCat("cannot tell the size of ", options.path));
    }
    if (bytes >= static_cast<uint64_t>(options.size.count())) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(options.path, " has ", Bytes(static_cast<int64_t>(bytes)).ToString(),
                     ", less than the ", options.size.ToString(), " that it shall be used with"));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.path, " is neither a file nor a block device"));
  }
  if (info.st_size == 0) return Allocate(file, options);
  if (info.st_size == options.size.count()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      options.path, " has ", Bytes(info.st_size).ToString(), ", but ", options.size.ToString(),
      " are configured: configure its size, or remove it to lose its blocks and start anew"));
}

// O_DIRECT is asked for after the fact: a file must not be left behind by a refused attempt.
bool SetDirect(const UniqueFd& file) {
  const int flags = fcntl(file.get(), F_GETFL);
  if (flags < 0 || fcntl(file.get(), F_SETFL, flags | O_DIRECT) != 0) return false;
  const AlignedBuffer probe(kIoUnit);
  return pread(file.get(), probe.span().data(), probe.span().size(), 0) == kIoUnit.count() ||
         fcntl(file.get(), F_SETFL, flags) != 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlockDevice>> OpenFileDevice(const FileDeviceOptions& options) {
  if (options.size <= Bytes(0) || options.size.count() % kIoUnit.count() != 0) {
    return absl::InvalidArgumentError(absl::StrCat("the size of ", options.path, ", ",
                                                   options.size.count(),
                                                   " bytes, is no multiple of ", kIoUnit.count()));
  }
  // Of a block device, O_EXCL asks the kernel that nothing else has it, such as a mount.
  struct stat info = {};
  const bool disk = stat(options.path.c_str(), &info) == 0 && S_ISBLK(info.st_mode);
  UniqueFd file(open(options.path.c_str(), O_RDWR | O_CLOEXEC | (disk ? O_EXCL : O_CREAT), 0600));
  if (!file.valid()) return ErrnoStatus(absl::StrCat("cannot open ", options.path));
  if (absl::Status status = Lock(file, options.path); !status.ok()) return status;
  if (absl::Status status = Prepare(file, options); !status.ok()) return status;
  if (!options.direct || !SetDirect(file)) {
    Log(LogLevel::kWarning, "the NVMe tier goes through the page cache",
        {{"path", options.path},
         {"reason", options.direct ? "the file system refuses O_DIRECT" : "configured"}});
  }
  if (options.io_uring) {
    absl::StatusOr<std::unique_ptr<BlockDevice>> device =
        MakeUringDevice(file, options.size, options.depth);
    if (device.ok()) return device;
    Log(LogLevel::kWarning, "the NVMe tier works without io_uring",
        {{"path", options.path}, {"threads", options.threads}, {"reason", device.status()}});
  }
  return MakeThreadedDevice(std::move(file), options.size, options.threads);
}

}  // namespace palimpsest
