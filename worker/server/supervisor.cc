#include "worker/server/supervisor.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

constexpr char kReady = 'r';
constexpr char kHibernating = 'h';
constexpr size_t kMaxMessage = 4096;
constexpr int kMaxFailures = 5;
constexpr absl::Duration kFirstPause = absl::Milliseconds(100);

std::vector<std::string> Environment() {
  std::vector<std::string> all;
  for (char** variable = environ; *variable != nullptr; ++variable) all.push_back(*variable);
  return all;
}

}  // namespace

absl::StatusOr<SupervisedChild> SupervisedChild::Adopt(pid_t parent) {
  if (absl::Status status = DieWithParent(parent); !status.ok()) return status;
  for (const int fd : {kListenDescriptor, kControlDescriptor}) {
    if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
      return absl::InvalidArgumentError("only a supervisor starts a supervised worker");
    }
  }
  return SupervisedChild();
}

void SupervisedChild::Send(const std::string& message) {
  if (::send(kControlDescriptor, message.data(), message.size(), MSG_NOSIGNAL) < 0) {
    Log(LogLevel::kError, "the supervisor cannot be told", {{"error", ErrnoStatus("send")}});
  }
}

void SupervisedChild::SayReady() { Send(std::string(1, kReady)); }

void SupervisedChild::SayHibernating(const v1::WorkerStats& stats) {
  Send(kHibernating + stats.SerializeAsString());
}

Supervisor::Supervisor(const WorkerConfig& config, std::vector<std::string> command)
    : config_(config), command_(std::move(command)) {}

absl::Status Supervisor::Prepare() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  signals_ = UniqueFd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  woken_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!signals_.valid() || !woken_.valid()) return ErrnoStatus("signalfd, eventfd");
  auto tokens = SecretFile::Open(config_.router_token_file);
  if (!tokens.ok()) return tokens.status();
  tokens_ = *std::move(tokens);
  auto listen = Listen(config_.listen);
  if (!listen.ok()) return listen.status();
  listen_ = *std::move(listen);
  return absl::OkStatus();
}

absl::Status Supervisor::Run() {
  end_ = Prepare();
  if (end_.ok()) end_ = StartChild();
  while (end_.ok() && !Step()) {
  }
  return end_;
}

absl::Status Supervisor::StartChild() {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    return ErrnoStatus("socketpair");
  }
  const UniqueFd childs(pair[1]);
  control_ = UniqueFd(pair[0]);
  SpawnOptions options;
  options.argv = command_;
  options.argv.push_back(absl::StrCat(::getpid()));
  options.environment = Environment();
  options.descriptors = {listen_.socket.get(), childs.get()};
  absl::StatusOr<ChildProcess> child = ChildProcess::Spawn(options);
  if (!child.ok()) return child.status();
  child_ = std::make_unique<ChildProcess>(*std::move(child));
  ready_ = sleeps_ = wake_ = false;
  Log(LogLevel::kInfo, "worker process started", {{"pid", child_->pid()}});
  return absl::OkStatus();
}

bool Supervisor::Step() {
  // Descriptors below 0 are passed over.
  pollfd wanted[4] = {{signals_.get(), POLLIN, 0},
                      {control_.get(), POLLIN, 0},
                      {child_ != nullptr ? child_->handle().pidfd() : -1, POLLIN, 0},
                      {woken_.get(), POLLIN, 0}};
  const bool waits = child_ == nullptr && !sleeps_;
  const absl::Duration pause = std::max(start_at_ - MonotonicNow(), absl::ZeroDuration());
  const int timeout = waits ? static_cast<int>(absl::ToInt64Milliseconds(pause)) + 1 : -1;
  if (::poll(wanted, 4, timeout) < 0 && errno != EINTR) {
    end_ = ErrnoStatus("poll");
    return true;
  }
  if (wanted[0].revents != 0) OnSignal();
  if (wanted[1].revents != 0) OnMessage();
  if (wanted[2].revents != 0) OnChildEnded();
  uint64_t count = 0;
  if (wanted[3].revents != 0 && ::read(woken_.get(), &count, sizeof(count)) > 0) wake_ = true;
  if (child_ != nullptr) return false;
  if (stopping_ || !end_.ok()) return true;
  if (sleeps_ ? wake_ : MonotonicNow() >= start_at_) end_ = StartChild();
  return false;
}

void Supervisor::OnSignal() {
  signalfd_siginfo info;
  while (::read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
    stopping_ = true;
    if (child_ != nullptr) {
      child_->handle().Signal(static_cast<int>(info.ssi_signo)).IgnoreError();
    }
  }
}

bool Supervisor::OnMessage() {
  char message[kMaxMessage];
  const ssize_t size = ::recv(control_.get(), message, sizeof(message), MSG_DONTWAIT);
  if (size <= 0) {
    if (size == 0) control_.Reset();  // the child has closed its end
    return false;
  }
  if (message[0] == kReady) {
    ready_ = served_ = true;
    if (doorman_ != nullptr) doorman_->Open();
  } else if (message[0] == kHibernating) {
    Sleep(std::string(message + 1, static_cast<size_t>(size) - 1));
  }
  return true;
}

void Supervisor::Sleep(const std::string& stats) {
  Doorman::Options options;
  if (!options.stats.ParseFromString(stats)) return;  // it is started again when it has ended
  options.router_tokens = tokens_;
  options.address = listen_.address;
  options.wake = [this] {
    const uint64_t one = 1;
    (void)!::write(woken_.get(), &one, sizeof(one));
  };
  auto doorman = std::make_unique<Doorman>(std::move(options));
  if (absl::Status status = doorman->Start(listen_.socket.get()); !status.ok()) {
    Log(LogLevel::kError, "nobody can answer for the worker; it is started again",
        {{"error", status}});
    return;
  }
  doorman_ = std::move(doorman);
  sleeps_ = true;
  Log(LogLevel::kInfo, "the worker hibernates; a request wakes it");
}

void Supervisor::OnChildEnded() {
  // What it said last.
  while (control_.valid() && OnMessage()) {
  }
  const absl::Status status = child_->Wait(absl::ZeroDuration());
  child_.reset();
  control_.Reset();
  if (stopping_) {
    // One that was still starting may have ended by the signal itself.
    if (ready_) end_ = status;
    return;
  }
  if (sleeps_ && status.ok()) return;
  failures_ = ready_ ? 0 : failures_ + 1;
  sleeps_ = false;
  if (!served_ || failures_ == kMaxFailures) {
    end_ = absl::AbortedError(absl::StrCat("the worker process cannot start: ", status.message()));
    if (doorman_ != nullptr) doorman_->Fail(absl::UnavailableError(end_.message()));
    return;
  }
  const absl::Duration pause = kFirstPause * (1 << failures_);
  start_at_ = MonotonicNow() + pause;
  Log(LogLevel::kWarning, "the worker process ended and is started again",
      {{"status", status}, {"pause", pause}, {"failures", failures_}});
}

}  // namespace palimpsest
