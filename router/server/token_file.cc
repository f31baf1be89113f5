#include "router/server/token_file.h"

#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/fd.h"
#include "common/file.h"
#include "common/log.h"

namespace palimpsest::router {
namespace {

constexpr Bytes kMaxTokenFile = MiB(1);
constexpr absl::Duration kWatchInterval = absl::Seconds(1);

absl::Status CheckMode(const std::string& path, mode_t mode) {
  if ((mode & (S_IWGRP | S_IROTH | S_IWOTH)) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("'%s' holds secrets but has mode %04o: expected 0600, 0640 or stricter "
                      "(chmod 600 '%s')",
                      path, mode & 07777, path));
}

}  // namespace

absl::StatusOr<TokenFile::Version> TokenFile::VersionOf(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return ErrnoStatus(absl::StrCat("cannot stat '", path, "'"));
  const absl::Status mode = CheckMode(path, info.st_mode);
  if (!mode.ok()) return mode;
  return Version{info.st_dev, info.st_ino, info.st_size,
                 int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec};
}

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(const std::string& path) {
  std::unique_ptr<TokenFile> file(new TokenFile(path));
  const absl::Status read = file->ReloadIfChanged();
  if (!read.ok()) return read;
  file->thread_ = std::thread([raw = file.get()] { raw->WatchLoop(); });
  return file;
}

TokenFile::~TokenFile() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

absl::Status TokenFile::ReloadIfChanged() {
  const absl::StatusOr<Version> version = VersionOf(path_);
  if (!version.ok()) return version.status();
  {
    MutexLock lock(&mutex_);
    if (table_ != nullptr && version_ == *version) return absl::OkStatus();
    // A wrong file is complained about once, not every second.
    version_ = *version;
  }
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

void TokenFile::WatchLoop() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (!stopping_) changed_.WaitWithTimeout(&mutex_, kWatchInterval);
      if (stopping_) return;
    }
    const std::shared_ptr<const TokenTable> before = table();
    const absl::Status status = ReloadIfChanged();
    if (!status.ok()) {
      Log(LogLevel::kWarning, "token file not reloaded, the last good one stays",
          {{"path", path_}, {"error", status}});
    } else if (const auto now = table(); now != before) {
      Log(LogLevel::kInfo, "token file reloaded", {{"path", path_}, {"tokens", now->size()}});
    }
  }
}

absl::StatusOr<std::string> TokenFile::Authenticate(absl::string_view authorization) const {
  return table()->Authenticate(authorization);
}

std::shared_ptr<const TokenTable> TokenFile::table() const {
  MutexLock lock(&mutex_);
  return table_;
}

}  // namespace palimpsest::router
