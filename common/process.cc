#include "common/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

constexpr int kFirstInherited = 3;

absl::Status GoneError(pid_t pid) {
  return absl::NotFoundError(absl::StrCat("there is no process ", pid));
}

// Whether `fd` became readable in time; retried over signals.
absl::StatusOr<bool> PollReadable(int fd, absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  for (;;) {
    pollfd entry = {fd, POLLIN, 0};
    const absl::Duration left = std::max(deadline - MonotonicNow(), absl::ZeroDuration());
    const timespec wait = absl::ToTimespec(left);
    const int ready =
        ::ppoll(&entry, 1, left == absl::InfiniteDuration() ? nullptr : &wait, nullptr);
    if (ready >= 0) return ready > 0;
    if (errno != EINTR) return ErrnoStatus("poll");
  }
}

absl::StatusOr<UniqueFd> OpenPidfd(pid_t pid) {
  if (pid <= 0) return absl::InvalidArgumentError(absl::StrCat("not a process id: ", pid));
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // CLOEXEC by definition
  if (!pidfd.valid()) return errno == ESRCH ? GoneError(pid) : ErrnoStatus("pidfd_open");
  return pidfd;
}

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& s : strings) pointers.push_back(const_cast<char*>(s.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// The two argument objects of posix_spawn.
struct SpawnArguments {
  SpawnArguments() {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
  }
  SpawnArguments(const SpawnArguments&) = delete;
  SpawnArguments& operator=(const SpawnArguments&) = delete;
  ~SpawnArguments() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }

  // The child starts with default signal actions and nothing blocked, whatever this process does.
  void ResetSignals() {
    sigset_t all, none;
    ::sigfillset(&all);
    ::sigemptyset(&none);
    ::posix_spawnattr_setsigdefault(&attributes, &all);
    ::posix_spawnattr_setsigmask(&attributes, &none);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
  }

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
};

}  // namespace

absl::StatusOr<uint64_t> ProcessStartTicks(pid_t pid) {
  const std::string path = absl::StrCat("/proc/", pid, "/stat");
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return errno == ENOENT ? GoneError(pid) : ErrnoStatus(path);
  std::array<char, 2048> buffer;
  const ssize_t size = ::read(file.get(), buffer.data(), buffer.size());
  if (size < 0) return errno == ESRCH ? GoneError(pid) : ErrnoStatus(path);
  const absl::string_view text(buffer.data(), static_cast<size_t>(size));
  // The name (field 2) is in parentheses and may hold anything, parentheses too; what follows the
  // last one starts at field 3.
  const size_t name_end = text.rfind(')');
  const std::vector<absl::string_view> fields = absl::StrSplit(
      text.substr(name_end == text.npos ? text.size() : name_end + 1), ' ', absl::SkipEmpty());
  uint64_t ticks;
  if (fields.size() < 20 || !absl::SimpleAtoi(fields[19], &ticks)) {
    return absl::InternalError(absl::StrCat(path, " has no start time in field 22"));
  }
  return ticks;
}

absl::StatusOr<ProcessHandle> ProcessHandle::Open(pid_t pid) {
  absl::StatusOr<UniqueFd> pidfd = OpenPidfd(pid);
  if (!pidfd.ok()) return pidfd.status();
  return FromPidfd(*std::move(pidfd), pid);
}

absl::StatusOr<ProcessHandle> ProcessHandle::OpenChild(pid_t pid) {
  absl::StatusOr<UniqueFd> pidfd = OpenPidfd(pid);
  if (!pidfd.ok()) return pidfd.status();
  absl::StatusOr<uint64_t> ticks = ProcessStartTicks(pid);
  if (!ticks.ok()) return ticks.status();
  return ProcessHandle(*std::move(pidfd), {pid, *ticks});
}

absl::StatusOr<ProcessHandle> ProcessHandle::FromPidfd(UniqueFd pidfd, pid_t pid) {
  absl::StatusOr<uint64_t> ticks = ProcessStartTicks(pid);
  if (!ticks.ok()) return ticks.status();
  ProcessHandle handle(std::move(pidfd), {pid, *ticks});
  // Until a process was reaped its number is its own. So if it still runs now, the start time that
  // was read in between is that of the process of the pidfd.
  if (handle.Exited()) return GoneError(pid);
  return handle;
}

absl::StatusOr<ProcessHandle> ProcessHandle::Open(const ProcessIdentity& identity) {
  absl::StatusOr<ProcessHandle> handle = Open(identity.pid);
  if (handle.ok() && handle->identity() != identity) return GoneError(identity.pid);
  return handle;
}

bool ProcessHandle::Exited() const {
  absl::StatusOr<bool> exited = PollReadable(pidfd_.get(), absl::ZeroDuration());
  return exited.ok() && *exited;
}

absl::Status ProcessHandle::AwaitExit(absl::Duration timeout) const {
  absl::StatusOr<bool> exited = PollReadable(pidfd_.get(), timeout);
  if (!exited.ok()) return exited.status();
  if (*exited) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("process ", pid(), " did not exit within ", absl::FormatDuration(timeout)));
}

absl::Status ProcessHandle::Signal(int signal) const {
  if (::syscall(SYS_pidfd_send_signal, pidfd_.get(), signal, nullptr, 0) == 0 || errno == ESRCH) {
    return absl::OkStatus();
  }
  return ErrnoStatus(absl::StrCat("cannot send signal ", signal, " to process ", pid()));
}

absl::Status ProcessHandle::Kill() const { return Signal(SIGKILL); }

absl::StatusOr<ChildProcess> ChildProcess::Spawn(const SpawnOptions& options) {
  if (options.argv.empty()) return absl::InvalidArgumentError("nothing to run");
  const UniqueFd null_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null_input.valid()) return ErrnoStatus("/dev/null");

  // Copies above the target numbers: moving 4 to 3 must not overwrite a 3 that has yet to move.
  const int first_free = kFirstInherited + static_cast<int>(options.descriptors.size());
  std::vector<UniqueFd> copies;
  auto copy = [&](int fd) -> absl::StatusOr<int> {
    UniqueFd above(::fcntl(fd, F_DUPFD_CLOEXEC, first_free));
    if (!above.valid()) return ErrnoStatus(absl::StrCat("cannot pass descriptor ", fd));
    copies.push_back(std::move(above));
    return copies.back().get();
  };

  SpawnArguments arguments;
  arguments.ResetSignals();
  auto pass = [&](int fd, int as) -> absl::Status {
    absl::StatusOr<int> above = copy(fd);
    if (!above.ok()) return above.status();
    ::posix_spawn_file_actions_adddup2(&arguments.actions, *above, as);
    return absl::OkStatus();
  };
  if (absl::Status status = pass(null_input.get(), 0); !status.ok()) return status;
  if (options.output >= 0) {
    for (int as : {1, 2}) {
      if (absl::Status status = pass(options.output, as); !status.ok()) return status;
    }
  }
  for (size_t i = 0; i < options.descriptors.size(); ++i) {
    const int as = kFirstInherited + static_cast<int>(i);
    if (absl::Status status = pass(options.descriptors[i], as); !status.ok()) return status;
  }
  // Whatever some library opened without CLOEXEC does not reach the child either.
  ::posix_spawn_file_actions_addclosefrom_np(&arguments.actions, first_free);

  pid_t pid;
  const int error =
      ::posix_spawn(&pid, options.argv[0].c_str(), &arguments.actions, &arguments.attributes,
                    Pointers(options.argv).data(), Pointers(options.environment).data());
  if (error != 0) return ErrnoStatus(absl::StrCat("cannot run ", options.argv[0]), error);
  absl::StatusOr<ProcessHandle> handle = ProcessHandle::OpenChild(pid);
  if (!handle.ok()) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    return handle.status();
  }
  return ChildProcess(*std::move(handle));
}

ChildProcess::~ChildProcess() {
  if (reaped_ || handle_.pidfd() < 0) return;
  (void)handle_.Kill();
  (void)Wait(absl::InfiniteDuration());
}

absl::Status ChildProcess::Wait(absl::Duration timeout) {
  if (absl::Status status = handle_.AwaitExit(timeout); !status.ok()) return status;
  siginfo_t info = {};
  while (::waitid(P_PIDFD, static_cast<id_t>(handle_.pidfd()), &info, WEXITED) != 0) {
    if (errno != EINTR) return ErrnoStatus("waitid");
  }
  reaped_ = true;
  if (info.si_code != CLD_EXITED) {
    return absl::AbortedError(absl::StrCat("killed by signal ", info.si_status));
  }
  if (info.si_status == 0) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("exited with status ", info.si_status));
}

absl::Status DieWithParent(pid_t parent) {
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return ErrnoStatus("PR_SET_PDEATHSIG");
  // It may have died before.
  if (::getppid() != parent) {
    return absl::FailedPreconditionError(absl::StrCat("parent process ", parent, " is gone"));
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
