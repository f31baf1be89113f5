// The heart of a worker: turns requests into tokens, one step after the other, on memory that the
// broker gives and takes.
//
// A turn of the engine handles what the memory client reports (slabs that came, revokes), takes new
// requests and cancellations, states the KV target, submits steps until as many as may be are in
// flight, hands the tokens of earlier ones to the requests' streams, and waits for the oldest. So
// with a pipeline depth of 2 everything but the model runs while the model runs. A revoke is
// answered when the steps in flight are done, as they may use what goes, and KV that it drives out
// to host memory has left (EngineParts::swap; such copies run beside the steps otherwise); so is a
// rotation of layers, and no step is submitted until the runner knows of it. While the parameters
// are missing it asks for their activation and the sequences wait; a step that fails at the gate is
// abandoned and tried again. When the broker refuses the activation, requests that have streamed
// nothing fail with UNAVAILABLE and its retry hint, while those in mid-stream give up their KV and
// wait, and the activation is asked for again. Under temporal sharing steps are submitted only
// during this worker's turns; a turn is given up when the steps in flight are done, and kept while
// there is no broker to give it to somebody else. No request waits without limit: if no step
// succeeds for `stall_timeout`, all fail with UNAVAILABLE.
//
// Threads: the engine owns one thread (Start .. Stop) that runs the turns; tests call RunOnce
// instead. Submit, Cancel, StartDrain, AwaitDrained and Stats may be called from any thread and
// never wait for a step; AwaitDrained blocks.
#ifndef PALIMPSEST_WORKER_SERVER_ENGINE_H_
#define PALIMPSEST_WORKER_SERVER_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "worker/core/block_copier.h"
#include "worker/core/head_mass.h"
#include "worker/core/kv_store.h"
#include "worker/core/kv_target.h"
#include "worker/core/model_runner.h"
#include "worker/core/scheduler.h"
#include "worker/core/step_durations.h"
#include "worker/core/swap_copier.h"
#include "worker/core/token_bytes.h"
#include "worker/memory/memory_client.h"
#include "worker/server/engine_metrics.h"
#include "worker/server/generation_stream.h"

namespace palimpsest {

struct EngineOptions {
  SchedulerConfig scheduler;
  KvTargetPolicy::Config kv_target;
  // Tokens that a request's reader may be behind.
  int32_t stream_tokens = 4096;
  // How long requests wait without any step succeeding before they fail. It bounds how long a
  // stream may pause for its model's parameters.
  absl::Duration stall_timeout = absl::Seconds(60);
  // Steps that may fail in a row before all requests fail.
  int32_t max_step_failures = 20;
  // Set if the runner samples heads, so that what it sees is kept (head_mass.h).
  std::optional<HeadMassOptions> heads;
  // KV blocks that return from host memory in the time of a step; absent: as measured.
  std::optional<int32_t> swap_overlap_blocks;

  absl::Status Validate() const;
};

// What the engine works with; all must outlive it. The runner must be able to have as many steps in
// flight as the scheduler's options say.
struct EngineParts {
  MemoryClient* memory = nullptr;
  ModelRunner* runner = nullptr;
  BlockCopier* copier = nullptr;
  const TokenBytes* token_bytes = nullptr;
  EngineMetrics* metrics = nullptr;
  const Clock* clock = nullptr;
  // Called by the engine thread when the session with the broker begins (true) and is lost. May be
  // null; must not block.
  std::function<void(bool)> on_connection;
  // Null unless the scheduler's options have swap_blocks, or there is a store.
  SwapCopier* swap = nullptr;
  // Tiers below the KV region; null: none. Not with a sliding window.
  KvStore* store = nullptr;
};

struct EngineStats {
  int32_t running = 0;
  int32_t waiting = 0;
  int32_t blocks_used = 0;
  int32_t blocks_cached = 0;
  int32_t blocks_free = 0;
  SchedulerCounters counters;
  StepTotals steps;
  bool broker_connected = false;
  bool draining = false;
};

class Engine {
 public:
  // Requires valid options.
  Engine(const EngineOptions& options, const EngineParts& parts);
  // Stops.
  ~Engine();

  void Start();
  // Ends every request with UNAVAILABLE and the thread; idempotent. Submit fails from now on.
  void Stop();

  // Queues a request. `ready` is called by the engine thread when the stream has something to take;
  // it must not block. InvalidArgument, ResourceExhausted: as Scheduler::Add; Unavailable: draining
  // or stopped. Every stream that is returned gets an end.
  absl::StatusOr<std::shared_ptr<GenerationStream>> Submit(SequenceRequest request,
                                                           std::function<void()> ready);
  // The reader has lost interest; the stream ends with kCancelled unless it has ended already.
  void Cancel(const GenerationStream& stream);

  // Submit fails from now on.
  void StartDrain();
  // Waits for the last request to end; returns how many are left after `timeout` of real time.
  int32_t AwaitDrained(absl::Duration timeout);
  // How long there has been no request; zero while there is one.
  absl::Duration IdleFor() const;

  EngineStats Stats() const;
  // What the runner has sampled of the heads, shares and effects (HeadSample), each an average;
  // null: nothing. After Stop, or as RunOnce.
  struct Heads {
    HeadMass mass;
    HeadMass effect;
  };
  const Heads* heads() const {
    return heads_.has_value() && heads_->mass.samples() > 0 ? &*heads_ : nullptr;
  }
  const SchedulerConfig& scheduler_config() const { return options_.scheduler; }
  int32_t longest_sequence() const { return scheduler_.longest_sequence(); }

  // One turn; false if there was nothing to do, so that the thread may wait for news. For the
  // engine's thread, or for tests that did not call Start.
  bool RunOnce();

 private:
  // For failures that a moment may cure but that come without a hint of their own.
  static constexpr absl::Duration kDefaultRetryAfter = absl::Seconds(1);

  struct Submission {
    std::shared_ptr<GenerationStream> stream;
    SequenceRequest request;
    absl::Time arrival;
  };

  struct Active {
    std::shared_ptr<GenerationStream> stream;
    absl::Time last_event;  // arrival, then the last token
    bool started = false;   // had a token
    bool streamed = false;  // its client has had a token, from here or from another worker
  };

  void Run();
  void Wake();

  bool TakeRequests();
  void AddSequence(Submission submission);
  bool HandleMemoryEvents();
  void Handle(const KvMapped& event);
  void Handle(const KvRevoked& event);
  void Handle(const ParametersRevoked& event);
  void Handle(const RotationWanted& event);
  void Handle(const RotationSettled& event);
  void TellRunner(const Rotation& rotation);
  void Handle(const ParametersComing& event);
  void Handle(const ActivationRefused& event);
  void Handle(const KvPressureSeen& event);
  void Handle(const TurnBegun& event);
  void Handle(const TurnEnding& event);
  void Handle(const BrokerConnected& event);
  void Handle(const BrokerLost& event);

  // engine_step.cc
  bool RunSteps();
  // Plans and submits a step; false if there was none to submit.
  bool SubmitStep();
  // Waits for the oldest step in flight.
  void AwaitStep();
  // Waits for all steps in flight: slabs may go afterwards.
  void Quiesce();
  void StartTransfers();
  // Tells the scheduler of transfers that have ended; if one failed whose KV steps in flight use,
  // these are abandoned. True if any ended.
  bool TakeTransfers();
  void OnTransfersEnded(const std::vector<SwapEnded>& ended);
  // Hears the block store, and starts what can be copied.
  bool PollStore();
  void StateLoadCosts();
  // Waits for all transfers; requires that no step is in flight.
  void EndTransfers();
  // Nothing can run until KV has left or come; something runs again.
  void NoteSwapStall(absl::Time now);
  void EndSwapStall(absl::Time now);
  // Waits for the steps in flight, and ends the scheduler's.
  void AbandonSteps();
  void CompactIfStuck(absl::Time now);
  void OnStepFailure(const absl::Status& status);
  void TakeHeadSample(const HeadSample& sample);
  void FailStalled();
  enum class Who { kAll, kUnstreamed };
  // Returns how many.
  int32_t Fail(Who who, const absl::Status& status, absl::Duration retry_after);
  void Deliver();
  void DeliverOne(SequenceOutput& output);
  void End(Active& active, GenerationStream::End end);
  void StateNeeds();
  // Report.cached_slab_seconds.
  double CachedSlabSeconds() const;
  void PublishStats();

  const EngineOptions options_;
  const EngineParts parts_;

  // Of the engine thread. (The scheduler's config is read by others.)
  Scheduler scheduler_;
  KvTargetPolicy kv_target_;
  KvTargetPolicy::Target stated_target_;
  absl::flat_hash_map<SequenceId, Active> active_;
  absl::flat_hash_map<uint64_t, SequenceId> sequence_of_ticket_;
  std::vector<std::shared_ptr<GenerationStream>> to_notify_;
  absl::Time last_progress_;
  absl::Time retry_step_at_ = absl::InfinitePast();
  absl::Time retry_activation_at_ = absl::InfinitePast();
  std::string refusal_;  // of the last activation, until a step succeeds
  absl::Time last_compaction_ = absl::InfinitePast();
  int32_t steps_in_flight_ = 0;  // submitted to the runner
  // From host memory, smoothed; 0: not measured.
  double swap_blocks_per_second_ = 0;
  double load_block_seconds_ = 0;  // from the block store, smoothed; 0: not measured
  int64_t blocks_recomputed_ = 0;  // as the scheduler said last
  absl::Time swap_stalled_since_ = absl::InfiniteFuture();
  absl::Duration swap_waited_;  // as the copier said last
  int32_t step_failures_ = 0;
  int32_t rotations_open_ = 0;  // finished, not settled
  Rotation rotation_;           // that memory is mapped for
  StepDurations step_durations_;
  std::optional<Heads> heads_;
  Bytes rotation_bytes_;
  bool connected_ = false;
  // False only under temporal sharing, while it is another tenant's turn.
  bool may_run_ = true;

  const std::shared_ptr<std::atomic<int32_t>> streams_alive_;
  std::thread thread_;

  mutable Mutex mutex_;
  CondVar changed_;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t next_ticket_ ABSL_GUARDED_BY(mutex_) = 1;
  int32_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;  // requests without an end
  absl::Time idle_since_ ABSL_GUARDED_BY(mutex_);   // when the last of them ended
  std::vector<Submission> inbox_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> cancelled_ ABSL_GUARDED_BY(mutex_);
  EngineStats stats_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_ENGINE_H_
