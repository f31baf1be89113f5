// A file of secrets that two processes share, one a line, which may be exchanged while both run:
// who presents a secret uses the first line, who checks one accepts every line. To rotate: append
// the new secret everywhere, then put it first, then remove the old one.
//
// Thread-safe; secrets() does not block on the disk. A file that changes is read again within about
// a second; a wrong one is logged, and the last good one stays.
#ifndef PALIMPSEST_COMMON_SECRET_FILE_H_
#define PALIMPSEST_COMMON_SECRET_FILE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "common/watched_file.h"

namespace palimpsest {

class SecretFile {
 public:
  // As ReadSecretFile; InvalidArgument if there are more than 8 lines, or empty ones between
  // others.
  static absl::StatusOr<std::unique_ptr<SecretFile>> Open(const std::string& path);

  // At least one.
  std::shared_ptr<const std::vector<std::string>> secrets() const;

  // Reads the file now if it has changed.
  absl::Status ReloadIfChanged() { return file_.LoadIfChanged(); }

 private:
  explicit SecretFile(const std::string& path);
  absl::Status Load();

  const std::string path_;
  mutable Mutex mutex_;
  std::shared_ptr<const std::vector<std::string>> secrets_ ABSL_GUARDED_BY(mutex_);
  WatchedFile file_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_SECRET_FILE_H_
