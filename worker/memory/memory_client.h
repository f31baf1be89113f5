// The worker's side of its session with the memory broker: which slabs are mapped where, which come
// and which must go. The engine talks to this interface; GrpcMemoryClient is the real one.
//
// Threads: every method may be called from the engine thread; gate() from the runner's threads.
// Nothing here blocks the engine, except AwaitStage by contract. Events are collected by background
// threads and taken by the engine between steps.
//
// Quiesced: slabs are given up (FinishKvRevoke, FinishParameterRevoke, FinishRotation, ReleaseKv)
// when no submitted work uses them, since unmapping does not wait for a GPU: every step whose plan
// names a block in them, and for parameters every step at all, was waited for (ModelRunner::Wait
// returns after the event behind a step's work), and every BlockCopier::Copy has returned.
//
// Life: the client reconnects by itself (exponential back-off with jitter) when the broker restarts
// and returns what it holds; mapped memory stays usable meanwhile.
#ifndef PALIMPSEST_WORKER_MEMORY_MEMORY_CLIENT_H_
#define PALIMPSEST_WORKER_MEMORY_MEMORY_CLIENT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/ids.h"
#include "common/rotation.h"
#include "worker/core/model_runner.h"

namespace palimpsest {

// KV slabs that were mapped at these places of the KV region and may be used from now on.
struct KvMapped {
  std::vector<RegionIndex> indexes;
};

// The broker wants `slabs` KV slabs back. Answer with FinishKvRevoke after no submitted work uses
// the chosen ones.
struct KvRevoked {
  RevokeId id;
  int32_t slabs = 0;
  absl::Time deadline;
};

// The broker wants these parameter slabs back. The gate has closed for their stages already. Answer
// with FinishParameterRevoke once no submitted work reads them.
struct ParametersRevoked {
  RevokeId id;
  std::vector<RegionIndex> indexes;
  absl::Time deadline;
};

// The broker wants these layers to rotate, or none. Answer with FinishRotation once no step is in
// flight, and submit none until RotationSettled has come for this id.
struct RotationWanted {
  RotationId id;
  Rotation rotation;
  absl::Time deadline;
};

// Comes once behind each FinishRotation. With `changed` the rotation is mapped, and the runner is
// to hear of it before the next step. Otherwise it is void, because its session is over, and
// nothing has changed.
struct RotationSettled {
  RotationId id;
  bool changed = false;
  Rotation rotation;
};

// Every stage is restored, or on its way so that AwaitStage will let a step through.
struct ParametersComing {};

// The activation for requests found no memory before its deadline. Those that have streamed nothing
// should fail with UNAVAILABLE and this retry hint.
struct ActivationRefused {
  std::string message;
  absl::Duration retry_after;
};

// The broker has nothing to give towards the KV target now.
struct KvPressureSeen {
  int32_t target_slabs = 0;
};

// Temporal sharing: steps may be submitted from now on, until FinishTurn.
struct TurnBegun {
  TurnId id;
  absl::Duration quantum;
};

// Another tenant is to have its turn. Submit nothing more, and answer with FinishTurn once no step
// is in flight.
struct TurnEnding {
  TurnId id;
  absl::Time deadline;
};

struct BrokerConnected {
  bool reattached = false;
  // Temporal sharing: there is no turn until TurnBegun comes, whatever was before.
  bool turns = false;
};
struct BrokerLost {
  std::string reason;
};

using MemoryEvent =
    std::variant<KvMapped, KvRevoked, ParametersRevoked, RotationWanted, RotationSettled,
                 ParametersComing, ActivationRefused, KvPressureSeen, TurnBegun, TurnEnding,
                 BrokerConnected, BrokerLost>;

enum class ActivationReason { kRequest, kEager };

// See Report in broker.proto.
struct WorkerLoad {
  bool active = false;
  int32_t running_sequences = 0;
  int32_t waiting_sequences = 0;
  int32_t kv_slabs_used = 0;
  int32_t kv_slabs_cached = 0;
  int32_t kv_slabs_free = 0;
  double decode_step_seconds = 0;
  double prefill_step_seconds = 0;
  double prefill_share = 0;
  double rotation_stall_seconds = 0;
  // Copied by the runner; those that the memory client copies are added by it.
  Bytes rotation_bytes;
  double cached_slab_seconds = 0;

  friend bool operator==(const WorkerLoad&, const WorkerLoad&) = default;
};

// Slabs that are mapped and usable now.
struct MappedSlabs {
  int32_t parameters = 0;
  int32_t image = 0;  // parameter slabs of the whole image
  int32_t kv = 0;
  // Of slots, and held for slots to come.
  int32_t slots = 0;
  // Layers that rotate.
  int32_t rotating = 0;
};

class MemoryClient {
 public:
  virtual ~MemoryClient() = default;

  // What happened since the last call, in order.
  virtual std::vector<MemoryEvent> TakeEvents() = 0;

  // `wake` is called from a background thread whenever TakeEvents would return something new. It
  // must not call back into the client. Null: nobody. When SetWakeup returns, the former one is not
  // running and will not be called again.
  virtual void SetWakeup(std::function<void()> wake) = 0;

  // Whether every parameter slab is mapped or promised: a step may be submitted and will wait at
  // the gate for no longer than a restore takes.
  virtual bool ParametersAvailable() const = 0;

  // Thread-safe: also for statistics.
  virtual MappedSlabs Mapped() const = 0;

  // Asks for missing parameter slabs; no-op while they are complete or an equal request is pending.
  virtual void RequestActivation(ActivationReason reason) = 0;

  // States the number of KV slabs wanted in all (SetKvTarget in broker.proto).
  virtual void SetKvTarget(int32_t target_slabs, int32_t needed_slabs) = 0;

  // Unmaps and answers a revoke. KV: `indexes` are the places given up, as many as asked unless the
  // worker holds fewer.
  virtual void FinishKvRevoke(RevokeId id, absl::Span<const RegionIndex> indexes) = 0;
  virtual void FinishParameterRevoke(RevokeId id) = 0;

  // Maps what the rotation says, answers the broker, and pushes RotationSettled. Copies into memory
  // that stages own again go on behind the gate.
  virtual void FinishRotation(RotationId id) = 0;

  // Answers TurnEnding.
  virtual void FinishTurn(TurnId id) = 0;

  // Unmaps KV slabs and gives them back unasked.
  virtual void ReleaseKv(absl::Span<const RegionIndex> indexes) = 0;

  // Rate-limited, but for changes of `active`, and deduplicated inside.
  virtual void SendReport(const WorkerLoad& load) = 0;

  virtual ParameterGate& gate() = 0;

  // Unmaps everything and ends the session; the last call.
  virtual void Detach() = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_MEMORY_CLIENT_H_
