#include "common/watched_file.h"

#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/fd.h"
#include "common/log.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kInterval = absl::Seconds(1);

int64_t Nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

WatchedFile::WatchedFile(std::string path, std::function<absl::Status()> load)
    : path_(std::move(path)), load_(std::move(load)) {}

WatchedFile::~WatchedFile() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

absl::Status WatchedFile::LoadIfChanged() {
  {
    MutexLock lock(&mutex_);
    while (loading_) changed_.Wait(&mutex_);
    loading_ = true;
  }
  struct stat info;
  absl::Status status;
  bool fresh = false;
  if (stat(path_.c_str(), &info) != 0) {
    status = ErrnoStatus(absl::StrCat("cannot read ", path_));
  } else {
    const Version version{info.st_dev, info.st_ino, info.st_size, Nanoseconds(info.st_mtim),
                          Nanoseconds(info.st_ctim)};
    MutexLock lock(&mutex_);
    fresh = std::exchange(version_, version) != version;
  }
  if (fresh) status = load_();
  MutexLock lock(&mutex_);
  loading_ = false;
  loads_ += fresh && status.ok() ? 1 : 0;
  changed_.SignalAll();
  return status;
}

int64_t WatchedFile::loads() {
  MutexLock lock(&mutex_);
  return loads_;
}

void WatchedFile::Watch() {
  thread_ = std::thread([this] { Loop(); });
}

void WatchedFile::Loop() {
  int64_t seen = loads();
  absl::Status last;
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (!stopping_) changed_.WaitWithTimeout(&mutex_, kInterval);
      if (stopping_) return;
    }
    absl::Status status = LoadIfChanged();
    if (!status.ok() && status != last) {
      Log(LogLevel::kWarning, "changed file not loaded, what was loaded before stays",
          {{"path", path_}, {"error", status}});
    } else if (const int64_t now = loads(); now != seen) {
      seen = now;
      Log(LogLevel::kInfo, "changed file loaded", {{"path", path_}});
    }
    last = std::move(status);
  }
}

}  // namespace palimpsest
