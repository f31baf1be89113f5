// Tells when processes have exited, by their pidfds, on one thread.
//
// Threads: thread-safe. The callback runs on the watcher's thread, without locks, once per Watch;
// it may call back into the watcher.
#ifndef PALIMPSEST_BROKER_SERVER_PROCESS_WATCHER_H_
#define PALIMPSEST_BROKER_SERVER_PROCESS_WATCHER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/fd.h"
#include "common/mutex.h"
#include "common/process.h"

namespace palimpsest {

class ProcessWatcher {
 public:
  static absl::StatusOr<std::unique_ptr<ProcessWatcher>> Start();
  ~ProcessWatcher() { Stop(); }
  ProcessWatcher(const ProcessWatcher&) = delete;
  ProcessWatcher& operator=(const ProcessWatcher&) = delete;

  // Ends the thread; callbacks that have not run will not. Idempotent; call from one thread.
  void Stop();

  // Calls `gone` when the process has exited (soon, if it has already).
  absl::Status Watch(std::shared_ptr<const ProcessHandle> process, std::function<void()> gone);

 private:
  struct Watched {
    std::shared_ptr<const ProcessHandle> process;
    std::function<void()> gone;
  };

  ProcessWatcher(UniqueFd epoll, UniqueFd stop);
  void Run();

  const UniqueFd epoll_;
  const UniqueFd stop_;
  Mutex mu_;
  uint64_t next_key_ ABSL_GUARDED_BY(mu_) = 1;  // 0 is `stop_`
  absl::flat_hash_map<uint64_t, Watched> watched_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_PROCESS_WATCHER_H_
