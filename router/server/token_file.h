// The file of tenants' bearer tokens (router/core/auth.h), read again when it changes.
//
// Threads: Authenticate is thread-safe and does not block on the disk. A changed file is read
// within about a second (common/watched_file.h); one that is wrong is logged and the last good one
// stays.
#ifndef PALIMPSEST_ROUTER_SERVER_TOKEN_FILE_H_
#define PALIMPSEST_ROUTER_SERVER_TOKEN_FILE_H_

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/mutex.h"
#include "common/watched_file.h"
#include "router/core/auth.h"

namespace palimpsest::router {

class TokenFile {
 public:
  // FAILED_PRECONDITION if everybody may read the file, or others than its owner may write it.
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& path);

  // See TokenTable.
  absl::StatusOr<std::string> Authenticate(absl::string_view authorization) const;
  std::shared_ptr<const TokenTable> table() const;

  // Reads the file again if it has changed since it was last read.
  absl::Status ReloadIfChanged() { return file_.LoadIfChanged(); }

 private:
  explicit TokenFile(const std::string& path);
  absl::Status Load();

  const std::string path_;
  mutable Mutex mutex_;
  std::shared_ptr<const TokenTable> table_ ABSL_GUARDED_BY(mutex_);
  WatchedFile file_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_TOKEN_FILE_H_
