// Other processes, held by pidfd: a number may be recycled, a pidfd always means the same process.
#ifndef PALIMPSEST_COMMON_PROCESS_H_
#define PALIMPSEST_COMMON_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/fd.h"

namespace palimpsest {

// Names one process for good on one boot of one machine: what a journal can keep over restarts.
struct ProcessIdentity {
  pid_t pid = 0;
  // Clock ticks since boot at which it started (field 22 of /proc/PID/stat).
  uint64_t start_ticks = 0;

  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

// NotFound when there is no such process.
absl::StatusOr<uint64_t> ProcessStartTicks(pid_t pid);

// A process of ours or of another user. Thread-safe after construction; move-only.
class ProcessHandle {
 public:
  // NotFound when the process is gone (and reaped).
  static absl::StatusOr<ProcessHandle> Open(pid_t pid);

  // The process of a journal. NotFound when it is gone or its pid means another process by now.
  static absl::StatusOr<ProcessHandle> Open(const ProcessIdentity& identity);

  // A child of this process that was not reaped yet; it may have exited.
  static absl::StatusOr<ProcessHandle> OpenChild(pid_t pid);

  // Takes a pidfd that the kernel gave (SO_PEERPIDFD).
  static absl::StatusOr<ProcessHandle> FromPidfd(UniqueFd pidfd, pid_t pid);

  pid_t pid() const { return identity_.pid; }
  const ProcessIdentity& identity() const { return identity_; }

  // Readable (poll) once the process has exited.
  int pidfd() const { return pidfd_.get(); }

  // Whether all its threads have exited: it touches no memory any more.
  bool Exited() const;

  // Blocks until the process has exited. DeadlineExceeded if it did not.
  absl::Status AwaitExit(absl::Duration timeout) const;

  // Sends `signal` to this very process; OK when it has exited already.
  absl::Status Signal(int signal) const;
  absl::Status Kill() const;

 private:
  ProcessHandle(UniqueFd pidfd, ProcessIdentity identity)
      : pidfd_(std::move(pidfd)), identity_(identity) {}

  UniqueFd pidfd_;
  ProcessIdentity identity_;
};

struct SpawnOptions {
  // argv[0] is the path of the executable; there is no search.
  std::vector<std::string> argv;
  // "NAME=value"; the child gets nothing else.
  std::vector<std::string> environment;
  // Become descriptors 3, 4, ... of the child, in order. The child gets no others but 0, 1 and 2.
  std::vector<int> descriptors;
  // Becomes the child's stdout and stderr; -1: those of this process. stdin is /dev/null.
  int output = -1;
};

// A child that is killed and reaped on destruction if it still runs. Not thread-safe.
class ChildProcess {
 public:
  static absl::StatusOr<ChildProcess> Spawn(const SpawnOptions& options);

  ChildProcess(ChildProcess&&) = default;
  ChildProcess& operator=(ChildProcess&&) = delete;
  ~ChildProcess();

  const ProcessHandle& handle() const { return handle_; }
  pid_t pid() const { return handle_.pid(); }

  // Blocks until the child has exited and reaps it. OK only for exit status 0; otherwise Aborted
  // with "exited with status N" or "killed by signal N". DeadlineExceeded: it still runs.
  absl::Status Wait(absl::Duration timeout);

 private:
  explicit ChildProcess(ProcessHandle handle) : handle_(std::move(handle)) {}

  ProcessHandle handle_;
  bool reaped_ = false;
};

// Makes the kernel kill this process when the thread that spawned it exits. Call first thing in
// main(); fails if `parent` is gone already.
absl::Status DieWithParent(pid_t parent);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_PROCESS_H_
