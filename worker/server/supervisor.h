// The parent of a worker that may hibernate or crash (`supervise: true`). It owns the listening
// socket and runs the worker proper as a child, which takes the connections and holds everything
// else: memory, a GPU's context and graphs, the session with the broker. A child that hibernates
// says so and exits; a doorman answers in its place until a request comes, which starts a child
// anew. A child that ends otherwise is started again, after a while that doubles each time, unless
// it is the first and never served, or five in a row end before they serve. The child dies with the
// parent.
//
// SIGTERM and SIGINT are passed on; when the child has ended, so does the parent.
#ifndef PALIMPSEST_WORKER_SERVER_SUPERVISOR_H_
#define PALIMPSEST_WORKER_SERVER_SUPERVISOR_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/fd.h"
#include "common/process.h"
#include "common/secret_file.h"
#include "worker/server/doorman.h"
#include "worker/server/listen_socket.h"
#include "worker/server/worker_config.h"

namespace palimpsest {

// What a child gets: descriptors 3 and 4, and how it speaks to its parent. Not thread-safe.
class SupervisedChild {
 public:
  static constexpr int kListenDescriptor = 3;
  static constexpr int kControlDescriptor = 4;

  // For a process that was started with the parent's pid. Must be called first thing in main().
  static absl::StatusOr<SupervisedChild> Adopt(pid_t parent);

  int listen_socket() const { return kListenDescriptor; }
  // It serves.
  void SayReady();
  // It takes no more connections and will exit with status 0; `stats` are answered meanwhile.
  void SayHibernating(const v1::WorkerStats& stats);

 private:
  void Send(const std::string& message);
};

class Supervisor {
 public:
  // `command` starts the child, the parent's pid is appended to it.
  Supervisor(const WorkerConfig& config, std::vector<std::string> command);

  // Until a signal or a child that cannot be started ends it. SIGTERM and SIGINT must be blocked.
  absl::Status Run();

 private:
  absl::Status Prepare();
  absl::Status StartChild();
  // Waits for the next event and deals with it; true when it is over, with the outcome in `end_`.
  bool Step();
  void OnSignal();
  // False: there was none.
  bool OnMessage();
  void OnChildEnded();
  void Sleep(const std::string& stats);

  const WorkerConfig config_;
  const std::vector<std::string> command_;
  std::shared_ptr<const SecretFile> tokens_;
  ListenSocket listen_;
  UniqueFd signals_;  // a signalfd
  UniqueFd woken_;    // an eventfd, counted up by the doorman
  UniqueFd control_;  // to the child
  std::unique_ptr<ChildProcess> child_;
  std::unique_ptr<Doorman> doorman_;
  bool served_ = false;    // some child did
  bool ready_ = false;     // this child serves
  bool sleeps_ = false;    // it said that it hibernates
  bool wake_ = false;      // a request waits
  bool stopping_ = false;  // a signal came
  int failures_ = 0;       // children in a row that ended before they served
  absl::Time start_at_ = absl::InfinitePast();
  absl::Status end_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_SUPERVISOR_H_
