// A broker process and memory clients in this one, for measuring how fast memory moves between
// them: the real broker binary over real sockets, the client of real workers, but no engine, so
// that a revoke is answered at once.
#ifndef PALIMPSEST_TESTS_BENCHMARK_MEMORY_NODE_H_
#define PALIMPSEST_TESTS_BENCHMARK_MEMORY_NODE_H_

#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "common/process.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"
#include "worker/memory/grpc_memory_client.h"

namespace palimpsest {

// One tenant's worker as its engine would drive it. Thread-safe.
class MemoryTenant {
 public:
  // Sums over the grants so far.
  struct Spent {
    absl::Duration fetch_parameters;
    absl::Duration map_parameters;  // fetch included
    absl::Duration restore;
    absl::Duration fetch_kv;
    absl::Duration map_kv;  // fetch included
  };

  static absl::StatusOr<std::unique_ptr<MemoryTenant>> Connect(GrpcMemoryClient::Options options);
  ~MemoryTenant();

  GrpcMemoryClient& client() { return *client_; }
  int stages() const { return client_->manifest().stages_size(); }

  // Asks for all parameters and says when the grant of the last of them arrived.
  absl::StatusOr<absl::Time> Activate();
  // Says when the `slabs`-th KV slab was announced to the engine.
  absl::StatusOr<absl::Time> AwaitKv(size_t slabs);
  // Gives all KV slabs but the first `keep` back, and wants no more than those.
  void ReleaseKvDownTo(size_t keep);
  // When the last revoke was answered by the engine.
  absl::Time answered();
  Spent spent();

 private:
  MemoryTenant();
  void PumpLoop();
  void Handle(const MemoryEvent& event, absl::Time now);

  Metrics metrics_;
  std::unique_ptr<GrpcMemoryClient> client_;
  Mutex mu_;
  CondVar changed_;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<RegionIndex> kv_ ABSL_GUARDED_BY(mu_);
  absl::Time kv_at_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Time> coming_at_ ABSL_GUARDED_BY(mu_);
  absl::Time answered_at_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  std::thread pump_;
};

// Not thread-safe. The broker is killed and its folder removed at the end.
class MemoryNode {
 public:
  struct Options {
    std::string model;
    int64_t max_sequence_tokens = 1024;
    // Slabs of the pool beyond one parameter image.
    int extra_slabs = 16;
    // Paths of the executables.
    std::string broker;
    std::string packer;
  };

  // Does not wait for the broker.
  static absl::StatusOr<std::unique_ptr<MemoryNode>> Start(const Options& options);
  ~MemoryNode();

  // Of "alpha" and "gamma", which have the model, and "beta", which has a tiny one, so that its
  // quota leaves room for KV slabs.
  absl::StatusOr<std::unique_ptr<MemoryTenant>> Connect(const std::string& tenant, bool verify,
                                                        int restore_threads);

  absl::StatusOr<v1::GetStatusResponse> Status();
  // Waits until no slab is on its way and at least so many are free.
  absl::Status AwaitSettled(uint32_t free_slabs);
  int image_slabs() const { return image_slabs_; }
  // Slabs that beta can take from an image when it holds all the others.
  int remapped_slabs() const { return image_slabs_ - tiny_slabs_; }
  // Processor time of the broker so far.
  absl::Duration broker_cpu() const;

 private:
  MemoryNode() = default;

  std::string folder_;
  int image_slabs_ = 0;
  int tiny_slabs_ = 0;
  clockid_t broker_clock_ = {};
  std::optional<ChildProcess> broker_;
  std::unique_ptr<v1::Broker::Stub> stub_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_TESTS_BENCHMARK_MEMORY_NODE_H_
