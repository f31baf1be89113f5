// A process that a test tells what to do (common/testing/command_loop.h). A ScriptedWorker by
// default, as the broker sees real workers: with its own pid, to be killed, to be found gone, and
// to die of SIGBUS alone.
#ifndef PALIMPSEST_BROKER_SERVER_TESTING_WORKER_PROCESS_H_
#define PALIMPSEST_BROKER_SERVER_TESTING_WORKER_PROCESS_H_

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/fd.h"
#include "common/process.h"

namespace palimpsest {

// Not thread-safe. The process is killed on destruction.
class WorkerProcess {
 public:
  // A process that answers nothing for so long hangs.
  static constexpr absl::Duration kLongestSilence = absl::Minutes(3);

  // `argv` is a program that obeys; `output` is as in SpawnOptions.
  static absl::StatusOr<WorkerProcess> Start(
      std::vector<std::string> argv = {"broker/server/testing/scripted_worker"}, int output = -1) {
    int commands[2];
    int answers[2];
    if (pipe2(commands, O_CLOEXEC) != 0 || pipe2(answers, O_CLOEXEC) != 0) {
      return ErrnoStatus("pipe2");
    }
    UniqueFd child_in(commands[0]);
    UniqueFd child_out(answers[1]);
    UniqueFd to(commands[1]);
    UniqueFd from(answers[0]);
    SpawnOptions options;
    options.argv = std::move(argv);
    options.descriptors = {child_in.get(), child_out.get()};
    options.output = output;
    absl::StatusOr<ChildProcess> child = ChildProcess::Spawn(options);
    if (!child.ok()) return child.status();
    return WorkerProcess(*std::move(child), std::move(to), std::move(from));
  }

  // "ok VALUE" gives VALUE; anything else is an error with what came.
  absl::StatusOr<std::string> Do(const std::string& command) {
    if (absl::Status status = Tell(command); !status.ok()) return status;
    return Hear();
  }

  // The halves of Do, for commands that several workers carry out at once.
  absl::Status Tell(const std::string& command) {
    const std::string line = command + "\n";
    if (write(to_.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
      return absl::UnavailableError("the worker takes no commands any more");
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Hear() {
    std::string answer;
    while (true) {
      pollfd wait = {.fd = from_.get(), .events = POLLIN, .revents = 0};
      char c = 0;
      if (poll(&wait, 1, kLongestSilence / absl::Milliseconds(1)) == 0) {
        return absl::DeadlineExceededError(absl::StrCat(
            "no answer in ", absl::FormatDuration(kLongestSilence), ", only: ", answer));
      }
      if (read(from_.get(), &c, 1) != 1) return absl::UnavailableError("the process died");
      if (c == '\n') {
        if (absl::StartsWith(answer, "ok ")) return answer.substr(3);
        return absl::UnknownError(answer);
      }
      answer.push_back(c);
    }
  }

  absl::Status Kill() { return child_.handle().Kill(); }
  absl::Status Signal(int signal) { return child_.handle().Signal(signal); }
  bool Exited() const { return child_.handle().Exited(); }
  // OK once it is gone, however it ended.
  absl::Status AwaitExit(absl::Duration timeout) { return child_.handle().AwaitExit(timeout); }
  // How it ended ("killed by signal 7").
  absl::Status Wait(absl::Duration timeout) { return child_.Wait(timeout); }
  pid_t pid() const { return child_.pid(); }

 private:
  WorkerProcess(ChildProcess child, UniqueFd to, UniqueFd from)
      : child_(std::move(child)), to_(std::move(to)), from_(std::move(from)) {}

  ChildProcess child_;
  UniqueFd to_;
  UniqueFd from_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_TESTING_WORKER_PROCESS_H_
