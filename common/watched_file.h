// Loads a file, and loads it again when it changes, be it rewritten in place, replaced, or reached
// through a symbolic link that now points elsewhere, as Kubernetes mounts Secrets.
//
// Threads: LoadIfChanged is thread-safe and blocks on the disk. One thread of its own looks at the
// file every second; what goes wrong there is logged once, and whatever was loaded before stays.
#ifndef PALIMPSEST_COMMON_WATCHED_FILE_H_
#define PALIMPSEST_COMMON_WATCHED_FILE_H_

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/mutex.h"

namespace palimpsest {

class WatchedFile {
 public:
  // `load` reads the file at `path` and puts the result in place, or leaves everything as it was.
  // It is not called by two threads at once.
  WatchedFile(std::string path, std::function<absl::Status()> load);
  ~WatchedFile();

  // Calls `load` if the file is another one than at the last call, whether that succeeded or not.
  absl::Status LoadIfChanged();

  // Starts the thread; at most once.
  void Watch();

 private:
  // What tells one version of the file from another; a change of mode counts.
  struct Version {
    dev_t device = 0;
    ino_t inode = 0;
    off_t size = 0;
    int64_t modified_ns = 0;
    int64_t changed_ns = 0;

    friend bool operator==(const Version&, const Version&) = default;
  };

  void Loop();
  int64_t loads();

  const std::string path_;
  const std::function<absl::Status()> load_;

  Mutex mutex_;
  CondVar changed_;
  bool loading_ ABSL_GUARDED_BY(mutex_) = false;  // by one thread at a time
  std::optional<Version> version_ ABSL_GUARDED_BY(mutex_);
  int64_t loads_ ABSL_GUARDED_BY(mutex_) = 0;  // that succeeded
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_WATCHED_FILE_H_
