// The file of tenants' bearer tokens (router/core/auth.h), read again when it changes.
//
// Threads: Authenticate is thread-safe and does not block on the disk. One thread of its own looks
// at the file every second. A changed file that is wrong is logged and the last good one stays.
#ifndef PALIMPSEST_ROUTER_SERVER_TOKEN_FILE_H_
#define PALIMPSEST_ROUTER_SERVER_TOKEN_FILE_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/mutex.h"
#include "router/core/auth.h"

namespace palimpsest::router {

class TokenFile {
 public:
  // FAILED_PRECONDITION if everybody may read the file, or others than its owner may write it.
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& path);
  ~TokenFile();

  // See TokenTable.
  absl::StatusOr<std::string> Authenticate(absl::string_view authorization) const;
  std::shared_ptr<const TokenTable> table() const;

  // Reads the file again if it has changed since it was last read.
  absl::Status ReloadIfChanged();

 private:
  // What tells one version of the file from another.
  struct Version {
    dev_t device = 0;
    ino_t inode = 0;
    off_t size = 0;
    int64_t modified_ns = 0;

    friend bool operator==(const Version&, const Version&) = default;
  };

  explicit TokenFile(std::string path) : path_(std::move(path)) {}
  static absl::StatusOr<Version> VersionOf(const std::string& path);
  void WatchLoop();

  const std::string path_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::shared_ptr<const TokenTable> table_ ABSL_GUARDED_BY(mutex_);
  Version version_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_TOKEN_FILE_H_
