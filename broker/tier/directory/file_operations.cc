#include "broker/tier/directory/file_operations.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace palimpsest {

int FileOperations::Open(const std::string& path, int flags, mode_t mode) {
  return ::open(path.c_str(), flags, mode);
}

ssize_t FileOperations::Write(int fd, const std::byte* from, size_t size) {
  return ::write(fd, from, size);
}

ssize_t FileOperations::PRead(int fd, std::byte* to, size_t size, off_t offset) {
  return ::pread(fd, to, size, offset);
}

int FileOperations::FSync(int fd) { return ::fsync(fd); }

int FileOperations::Rename(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str());
}

int FileOperations::Unlink(const std::string& path) { return ::unlink(path.c_str()); }

int FileOperations::MakeFolder(const std::string& path, mode_t mode) {
  return ::mkdir(path.c_str(), mode);
}

int FileOperations::List(const std::string& path, std::vector<std::string>* names) {
  DIR* const folder = ::opendir(path.c_str());
  if (folder == nullptr) return -1;
  names->clear();
  errno = 0;
  while (const dirent* entry = ::readdir(folder)) {
    if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0) {
      names->push_back(entry->d_name);
    }
  }
  const int error = errno;
  ::closedir(folder);
  errno = error;
  return error == 0 ? 0 : -1;
}

int FileOperations::ModifiedAt(const std::string& path, absl::Time* time) {
  struct stat file;
  if (::lstat(path.c_str(), &file) != 0) return -1;
  *time = absl::TimeFromTimespec(file.st_mtim);
  return 0;
}

}  // namespace palimpsest
