// Everything of a worker process but main(): attaches to the broker, sets the runner up on the
// memory that it gives, and serves.
//
// Threads: Start blocks until the broker has the model's image (minutes, the first time); Shutdown
// blocks for the drain. Both from one thread.
#ifndef PALIMPSEST_WORKER_SERVER_WORKER_PROCESS_H_
#define PALIMPSEST_WORKER_SERVER_WORKER_PROCESS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/file_lock.h"
#include "common/metrics.h"
#include "common/text/tokenizer.h"
#include "worker/blocks/block_store_client.h"
#include "worker/blocks/grouped_block_store.h"
#include "worker/core/block_copier.h"
#include "worker/core/head_profile.h"
#include "worker/core/model_runner.h"
#include "worker/core/scheduler_config.h"
#include "worker/core/swap_copier.h"
#include "worker/core/swap_gate.h"
#include "worker/core/token_bytes.h"
#include "worker/memory/grpc_memory_client.h"
#include "worker/memory/region_memory.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"
#include "worker/server/engine.h"
#include "worker/server/engine_metrics.h"
#include "worker/server/worker_config.h"
#include "worker/server/worker_server.h"
#include "worker/server/worker_service.h"

namespace palimpsest {

class WorkerProcess {
 public:
  // `on_fatal` is called from a background thread when the process can't go on and should exit.
  // `listen_socket`: that of a supervisor, which outlives this; without one config.listen is bound.
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(
      const WorkerConfig& config, std::function<void(const absl::Status&)> on_fatal,
      std::optional<int> listen_socket = std::nullopt);

  // Without a Shutdown before it, the broker sees the process's end.
  ~WorkerProcess();

  // Refuses new requests, lets the running ones end until the drain timeout, ends the others with
  // UNAVAILABLE, and gives the memory back. `hurry` is asked now and then whether to stop waiting.
  void Shutdown(const std::function<bool()>& hurry);

  // With a supervisor's socket: takes no more connections, and says what GetStats would answer from
  // now on; then EndForHibernation waits for the requests that are left and gives the memory back.
  v1::WorkerStats BeginHibernation();
  void EndForHibernation();
  // Time without requests after which the broker wants the process to end; zero: never.
  absl::Duration hibernate_after() const { return memory_->hibernate_after(); }
  absl::Duration IdleFor() const { return engine_->IdleFor(); }

  const std::string& address() const { return server_.address(); }
  const std::string& metrics_address() const { return metrics_server_->address(); }

 private:
  explicit WorkerProcess(const WorkerConfig& config);

  absl::Status LoadModel();
  // Which heads are dropped and how they are grouped, by the profile.
  absl::Status ReadHeads();
  absl::Status DivideHeads(const HeadProfile& profile);
  // Which parts of blocks are to lie in tier 1. Requires that heads are grouped, and a store.
  GroupedBlockStore::TierOne TierOneOf(const SchedulerConfig& scheduler, Bytes part_bytes);
  void WriteMeasuredHeads() const;
  absl::Status Attach(std::function<void(const absl::Status&)> on_fatal);
  // Locks that are held while this process takes memory of GPUs beside slabs, so that it can
  // measure how much: by the workers of one broker, and, as it reads and replaces the file of
  // algorithms, by those that have the same one.
  absl::StatusOr<std::vector<FileLock>> AwaitTurn() const;
  absl::Status MakeCompute(const SchedulerConfig& scheduler);
  // Makes the runner and the copier on a GPU, and says what that took there.
  absl::Status MakeGpuCompute(const ImageLayout& layout, absl::Span<const ModelMemory> memory,
                              ParameterGate* gate, int32_t block_tokens);
  // What KV is copied to host memory by, if it is; the gate that runners are given.
  absl::StatusOr<ParameterGate*> MakeSwap(absl::Span<const ModelMemory> memory,
                                          int32_t swap_blocks);
  int32_t SwapBlocks() const;
  // The broker's tiers, if it has any and blocks can go there.
  absl::Status MakeStore(const SchedulerConfig& scheduler);
  absl::StatusOr<BlockKey> RootBlockKey() const;
  void StopEngine();
  absl::Status StartEngine();
  absl::StatusOr<EngineOptions> MakeEngineOptions() const;
  absl::Status Serve(std::optional<int> listen_socket);

  const WorkerConfig config_;
  Metrics metrics_;
  EngineMetrics engine_metrics_;
  std::unique_ptr<MetricsServer> metrics_server_;
  ModelConfig model_;
  ModelConfig rank_model_;  // what one GPU of several computes
  LossyHeads lossy_heads_;
  std::vector<std::vector<int32_t>> head_groups_;  // empty: blocks are stored whole
  std::optional<HeadMass> profile_mass_;           // by which they are grouped
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<TokenBytes> token_bytes_;
  std::unique_ptr<MemoryBackend> backend_;   // null: the host's
  std::unique_ptr<BlockStoreClient> store_;  // null: no tiers; outlives memory_, which calls it
  std::unique_ptr<GroupedBlockStore> grouped_store_;  // null: blocks are stored whole
  std::unique_ptr<GrpcMemoryClient> memory_;
  std::unique_ptr<SwapCopier> swap_;  // null: preempted sequences are computed again
  std::unique_ptr<SwapGate> swap_gate_;
  std::unique_ptr<ModelRunner> runner_;
  std::unique_ptr<BlockCopier> copier_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<WorkerService> service_;
  WorkerServer server_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_WORKER_PROCESS_H_
