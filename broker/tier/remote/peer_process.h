// Another process that owns memory (peer_process_main.cc), as its child is seen by tests and by the
// benchmark.
#ifndef PALIMPSEST_BROKER_TIER_REMOTE_PEER_PROCESS_H_
#define PALIMPSEST_BROKER_TIER_REMOTE_PEER_PROCESS_H_

#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/fd.h"
#include "common/process.h"

namespace palimpsest {

struct PeerProcess {
  ChildProcess child;
  std::string address;
  UniqueFd output;  // kept open, as UCX warns at times

  // Waits until it listens.
  static absl::StatusOr<PeerProcess> Start(const std::vector<std::string>& arguments) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus("no pipe");
    UniqueFd from(ends[0]);
    UniqueFd to(ends[1]);
    std::vector<std::string> argv = {"broker/tier/remote/peer_process"};
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    // Under sanitizers the tests' own UCX must leave mmap alone, and the peer's must too.
    constexpr char kHooks[] = "UCX_MEM_MMAP_HOOK_MODE";
    std::vector<std::string> environment;
    if (const char* const hooks = std::getenv(kHooks)) {
      environment.push_back(absl::StrCat(kHooks, "=", hooks));
    }
    absl::StatusOr<ChildProcess> child = ChildProcess::Spawn(
        {.argv = std::move(argv), .environment = environment, .output = to.get()});
    if (!child.ok()) return child.status();
    to.Reset();
    std::string line;
    while (line.empty() || line.back() != '\n') {
      pollfd wait = {.fd = from.get(), .events = POLLIN, .revents = 0};
      char next = 0;
      if (::poll(&wait, 1, 60'000) != 1 || ::read(from.get(), &next, 1) != 1) {
        return absl::UnavailableError(absl::StrCat("the peer said only: ", line));
      }
      line.push_back(next);
    }
    line.pop_back();
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, "ready")) {
      return absl::UnavailableError(absl::StrCat("the peer said: ", line));
    }
    return PeerProcess{*std::move(child), std::string(absl::StripLeadingAsciiWhitespace(rest)),
                       std::move(from)};
  }
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_REMOTE_PEER_PROCESS_H_
