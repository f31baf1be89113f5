#include "router/server/token_file.h"

#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/fd.h"
#include "common/file.h"

namespace palimpsest::router {
namespace {

constexpr Bytes kMaxTokenFile = MiB(1);

absl::Status CheckMode(const std::string& path, mode_t mode) {
  if ((mode & (S_IWGRP | S_IROTH | S_IWOTH)) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("'%s' holds secrets but has mode %04o: expected 0600, 0640 or stricter "
                      "(chmod 600 '%s')",
                      path, mode & 07777, path));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(const std::string& path) {
  std::unique_ptr<TokenFile> file(new TokenFile(path));
  if (absl::Status read = file->ReloadIfChanged(); !read.ok()) return read;
  file->file_.Watch();
  return file;
}

TokenFile::TokenFile(const std::string& path)
    : path_(path), file_(path, [this] { return Load(); }) {}

absl::Status TokenFile::Load() {
  struct stat info;
  if (stat(path_.c_str(), &info) != 0) {
    return ErrnoStatus(absl::StrCat("cannot read '", path_, "'"));
  }
  if (absl::Status mode = CheckMode(path_, info.st_mode); !mode.ok()) return mode;
  const absl::StatusOr<std::string> text = ReadFile(path_, kMaxTokenFile);
  if (!text.ok()) return text.status();
  absl::StatusOr<TokenTable> table = TokenTable::Parse(*text);
  if (!table.ok()) {
    return absl::Status(table.status().code(),
                        absl::StrCat("token file '", path_, "': ", table.status().message()));
  }
  auto fresh = std::make_shared<const TokenTable>(*std::move(table));
  MutexLock lock(&mutex_);
  table_ = std::move(fresh);
  return absl::OkStatus();
}

absl::StatusOr<std::string> TokenFile::Authenticate(absl::string_view authorization) const {
  return table()->Authenticate(authorization);
}

std::shared_ptr<const TokenTable> TokenFile::table() const {
  MutexLock lock(&mutex_);
  return table_;
}

}  // namespace palimpsest::router
