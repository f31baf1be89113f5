// The system calls that a directory tier makes, so that a test can fail each of them.
#ifndef PALIMPSEST_BROKER_TIER_DIRECTORY_FILE_OPERATIONS_H_
#define PALIMPSEST_BROKER_TIER_DIRECTORY_FILE_OPERATIONS_H_

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace palimpsest {

// As the calls of the same name: -1 and errno on error; reads and writes may be short or end with
// EINTR. Thread-safe.
class FileOperations {
 public:
  virtual ~FileOperations() = default;

  virtual int Open(const std::string& path, int flags, mode_t mode);
  virtual ssize_t Write(int fd, const std::byte* from, size_t size);
  virtual ssize_t PRead(int fd, std::byte* to, size_t size, off_t offset);
  virtual int FSync(int fd);
  virtual int Rename(const std::string& from, const std::string& to);
  virtual int Unlink(const std::string& path);
  virtual int MakeFolder(const std::string& path, mode_t mode);
  // The names in a folder, without "." and "..".
  virtual int List(const std::string& path, std::vector<std::string>* names);
  // By the clock of whoever keeps the file.
  virtual int ModifiedAt(const std::string& path, absl::Time* time);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_DIRECTORY_FILE_OPERATIONS_H_
