#include "broker/server/process_watcher.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <utility>

namespace palimpsest {

absl::StatusOr<std::unique_ptr<ProcessWatcher>> ProcessWatcher::Start() {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoStatus("epoll_create1");
  UniqueFd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.valid()) return ErrnoStatus("eventfd");
  epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, stop.get(), &event) != 0) {
    return ErrnoStatus("epoll_ctl");
  }
  return std::unique_ptr<ProcessWatcher>(new ProcessWatcher(std::move(epoll), std::move(stop)));
}

ProcessWatcher::ProcessWatcher(UniqueFd epoll, UniqueFd stop)
    : epoll_(std::move(epoll)), stop_(std::move(stop)), thread_([this] { Run(); }) {}

void ProcessWatcher::Stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  (void)!write(stop_.get(), &one, sizeof one);
  thread_.join();
}

absl::Status ProcessWatcher::Watch(std::shared_ptr<const ProcessHandle> process,
                                   std::function<void()> gone) {
  const int pidfd = process->pidfd();
  uint64_t key = 0;
  {
    MutexLock lock(&mu_);
    key = next_key_++;
    watched_[key] = Watched{std::move(process), std::move(gone)};
  }
  epoll_event event{.events = EPOLLIN | EPOLLONESHOT, .data = {.u64 = key}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, pidfd, &event) == 0) return absl::OkStatus();
  const absl::Status status = ErrnoStatus("watch a process");
  MutexLock lock(&mu_);
  watched_.erase(key);
  return status;
}

void ProcessWatcher::Run() {
  std::array<epoll_event, 64> events;
  while (true) {
    const int count = epoll_wait(epoll_.get(), events.data(), events.size(), -1);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == 0) return;
      Watched watched;
      {
        MutexLock lock(&mu_);
        const auto it = watched_.find(events[i].data.u64);
        watched = std::move(it->second);
        watched_.erase(it);
      }
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, watched.process->pidfd(), nullptr);
      watched.gone();
    }
  }
}

}  // namespace palimpsest
