// A broker and one worker as processes in a folder of their own, for `palctl bench engine`: the
// programs that are shipped, configured for a model of dummy weights.
//
// Threads: one at a time; the calls block. Everything is killed and removed at the end.
#ifndef PALIMPSEST_TOOLS_PALCTL_BENCH_NODE_H_
#define PALIMPSEST_TOOLS_PALCTL_BENCH_NODE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/process.h"
#include "tools/palctl/bench_client.h"
#include "tools/palctl/bench_folder.h"

namespace palimpsest::palctl {

struct BenchNodeOptions {
  std::string binaries;  // folder of the programs: bin/ of a bundle, or bazel-bin
  std::string config;    // text of the model's config.json
  bool cuda = true;
  std::vector<int> gpus = {0};
  // The workload's bounds.
  int32_t max_batch = 256;
  int32_t max_step_tokens = 8192;
  int32_t max_sequence_tokens = 4352;
  int64_t kv_tokens = 0;        // that all sequences have at once, at most
  Bytes workspace;              // on a GPU
  std::string gemm_cache_file;  // empty: in the node's own folder
};

class BenchNode {
 public:
  // How long a worker took, from its spawning.
  struct Readiness {
    absl::Duration serving;      // attached, and takes requests
    absl::Duration resident;     // all parameters restored
    absl::Duration first_token;  // of a prompt that was sent as soon as it took requests
  };

  // Writes the files and starts the broker. InvalidArgument for a config that is no model's;
  // NotFound names a program that is not there.
  static absl::StatusOr<std::unique_ptr<BenchNode>> Start(const BenchNodeOptions& options);
  ~BenchNode();
  BenchNode(const BenchNode&) = delete;
  BenchNode& operator=(const BenchNode&) = delete;

  // The first time the broker makes the model's image meanwhile.
  absl::StatusOr<Readiness> StartWorker();
  // SIGTERM; an error if it does not end clean.
  absl::Status StopWorker();

  BenchClient& client() { return *client_; }
  Bytes image_bytes() const { return image_bytes_; }
  // The ends of the processes' logs.
  std::string LogEnds() const;

 private:
  explicit BenchNode(const BenchNodeOptions& options) : options_(options) {}

  absl::Status Prepare();
  absl::Status WriteConfigs();
  absl::Status CheckAlive() const;
  absl::Status AwaitStats(absl::Time deadline, bool resident);

  const BenchNodeOptions options_;
  std::unique_ptr<BenchFolder> folder_;
  std::string router_token_;
  Bytes image_bytes_;
  int32_t vocabulary_ = 0;
  std::optional<ChildProcess> broker_;
  std::unique_ptr<ChildProcess> worker_;
  std::unique_ptr<BenchClient> client_;
};

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_BENCH_NODE_H_
