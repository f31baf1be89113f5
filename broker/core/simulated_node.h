// A node without processes and memory: an arbiter, simulated workers and a simulated server that
// cleans slabs and keeps a journal, under a simulated clock. It keeps its own account of who may
// touch which slab, made only from the actions and from what the workers do, and notes every action
// that breaks an invariant. Used by table tests (cooperative workers) and by the model fuzzer.
#ifndef PALIMPSEST_BROKER_CORE_SIMULATED_NODE_H_
#define PALIMPSEST_BROKER_CORE_SIMULATED_NODE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "broker/core/arbiter.h"

namespace palimpsest {

struct SimulatedTenant {
  TenantConfig config;
  std::vector<ParameterStage> stages;
};

// `count` stages of `slabs` each.
std::vector<ParameterStage> EvenStages(uint32_t count, uint32_t slabs);

// The same, of which all but the first and the last may rotate.
std::vector<ParameterStage> RotatingStages(uint32_t count, uint32_t slabs);

// One process. By itself it only repeats its last Report every second, unless it hangs: a test
// makes it map grants and answer revokes.
struct SimulatedWorker {
  TenantId tenant;
  SessionId session;
  bool connected = true;
  bool killed = false;    // SIGKILL was sent; it holds its slabs until it is gone
  bool detached = false;  // it is exiting
  bool hung = false;      // it does nothing at all
  std::optional<SessionLoad> load;
  absl::Time next_report = absl::InfiniteFuture();
  std::map<SlabId, HeldSlab> held;
  std::deque<SendGrant> grants;           // received, not mapped
  std::deque<SendRevoke> revokes;         // received, not answered
  std::deque<SendSetRotation> rotations;  // received, not carried out
  // What its memory is mapped for.
  Rotation rotation;
  // Temporal sharing: the turn it has, and whether it was asked back.
  std::optional<TurnId> turn;
  bool turn_ending = false;
  int turns = 0;
  // It had all of its parameters, rotating or not, once since it last attached or returned.
  bool was_complete = false;
  // The last parameters mapped: when, and how long they may not be revoked.
  absl::Time irrevocable_until = absl::InfinitePast();
  std::optional<absl::Time> activation_deadline;
  int refusals = 0;
  int pressures = 0;
  double link_limit = 0;

  std::vector<SlabId> Slabs(SlabRole role) const;
  uint32_t Count(SlabRole role) const { return static_cast<uint32_t>(Slabs(role).size()); }
};

class SimulatedNode {
 public:
  using LedgerFactory =
      std::function<std::unique_ptr<SlabLedger>(uint32_t pool_slabs, uint32_t generation)>;

  SimulatedNode(ArbiterOptions options, std::vector<SimulatedTenant> tenants,
                LedgerFactory ledgers = nullptr);

  Arbiter& arbiter() { return *arbiter_; }
  absl::Time now() const { return now_; }
  const ArbiterOptions& options() const { return options_; }
  // What broke, in words; empty is good.
  const std::vector<std::string>& problems() const { return problems_; }
  // Everything the arbiter did, in words.
  const std::string& log() const { return log_; }
  const std::vector<TransferFinished>& transfers() const { return transfers_; }
  // Processes that are not gone.
  std::map<SessionId, SimulatedWorker>& workers() { return workers_; }
  // The tenant's process; null if there is none.
  SimulatedWorker* WorkerOf(uint32_t tenant);

  // Whether every stage of the worker has its slabs or rotates.
  bool Complete(const SimulatedWorker& worker) const;

  // Worker actions. Each ends by carrying out what the arbiter wants.
  absl::StatusOr<SessionId> Attach(uint32_t tenant);
  absl::Status Reattach(SimulatedWorker& worker);
  void Activate(SimulatedWorker& worker, ActivateReason reason = ActivateReason::kRequest);
  void SetKvTarget(SimulatedWorker& worker, uint32_t target, uint32_t needed);
  void Report(SimulatedWorker& worker, bool active, uint32_t used, uint32_t idle,
              uint32_t waiting = 0);
  void MapGrant(SimulatedWorker& worker, absl::Duration restore = absl::Milliseconds(10));
  // Gives up the first slabs held; `spare` fewer than asked, against the rules if it holds them.
  void AnswerRevoke(SimulatedWorker& worker, uint32_t spare = 0);
  // A part of the answer to the first revoke, of up to `count` slabs.
  void AnswerRevokePart(SimulatedWorker& worker, uint32_t count);
  void AnswerRevokeWith(SimulatedWorker& worker, RevokeId revoke, const std::vector<SlabId>& slabs);
  // Carries out the first SetRotation and answers it.
  void FinishRotation(SimulatedWorker& worker);
  // Carries it out, but the answer is lost with the connection.
  void FinishRotationAndLoseConnection(SimulatedWorker& worker);
  void AnswerEndTurn(SimulatedWorker& worker);
  void ReleaseKv(SimulatedWorker& worker, uint32_t count);
  void Detach(SimulatedWorker& worker);
  void LoseConnection(SimulatedWorker& worker);
  void ProcessGone(SessionId session);

  // The server finishes cleaning up to `count` slabs.
  void Clean(size_t count);
  void RestartBroker();
  // Advances the clock, stopping at every deadline and when reports are due.
  void Advance(absl::Duration duration);
  // Workers that do not hang map and answer everything, the server cleans, killed processes go,
  // until nothing moves. The clock stands still.
  void Settle();

  // Sums and counts of the arbiter, that no workspace waits for others' memory, and that it agrees
  // with this account of who holds what.
  void CheckInvariants();
  size_t cleaning() const { return to_clean_.size(); }

  // From the next restart of the broker on.
  void set_rotation(const RotationOptions& rotation) { options_.rotation = rotation; }
  // What workers say from their next Report on: at first nothing where layers cannot rotate, and
  // otherwise 50e9.
  void set_image_bytes_per_second(double rate) { image_bytes_per_second_ = rate; }
  // And how much time each cached slab of theirs saves; at first none.
  void set_cached_slab(absl::Duration saves) { cached_slab_ = saves; }

 private:
  struct Shadow {
    std::optional<SessionId> holder;   // may touch it: granted, or its process lives
    std::optional<TenantId> dirty_by;  // has traces of this tenant
    Epoch epoch;
  };

  void Problem(const std::string& what);
  std::unique_ptr<Arbiter> MakeArbiter();
  void Drain();
  void Do(SendGrant grant);
  void Do(SendRevoke revoke);
  void Do(SendSetRotation rotation);
  void Do(const SendActivateRefused& refused);
  void Do(const SendKvPressure& pressure);
  void Do(const SendLinkLimit& limit);
  void Do(const SendTakeTurn& turn);
  void Do(const SendEndTurn& turn);
  void Do(const KillProcess& kill);
  void Do(const CleanSlabs& clean);
  void Do(const SessionEnded& ended);
  void Do(const TransferFinished& transfer);
  void CheckRotation(const SimulatedWorker& worker, const SendSetRotation& rotation);
  void CarryOut(SimulatedWorker& worker, const SendSetRotation& rotation);
  void CheckPlaces(const SimulatedWorker& worker);
  void CheckParameterRevoke(const SimulatedWorker& worker, const SendRevoke& revoke);
  static std::vector<SlabId> AnswerTo(const SimulatedWorker& worker, const SendRevoke& revoke);
  void GiveUp(SimulatedWorker& worker, const std::vector<SlabId>& slabs);
  void NoteActivation(SimulatedWorker& worker);
  absl::Time NextReport() const;
  void RepeatReports();

  ArbiterOptions options_;
  std::vector<SimulatedTenant> tenants_;
  LedgerFactory ledgers_;
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  std::unique_ptr<Arbiter> arbiter_;
  std::map<SessionId, SimulatedWorker> workers_;
  std::vector<Shadow> shadow_;
  std::map<SlabId, std::pair<SessionId, HeldSlab>> journal_;
  std::deque<SlabId> to_clean_;
  double image_bytes_per_second_ = 0;  // not measured
  absl::Duration cached_slab_;
  std::vector<TransferFinished> transfers_;
  std::vector<std::string> problems_;
  std::string log_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_SIMULATED_NODE_H_
