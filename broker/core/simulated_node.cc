#include "broker/core/simulated_node.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

// Report in broker.proto: at least every second.
constexpr absl::Duration kReportPeriod = absl::Seconds(1);
// More rounds of answering everything than any decision may need to come to rest.
constexpr int kSettlingRounds = 300;

}  // namespace

std::vector<ParameterStage> EvenStages(uint32_t count, uint32_t slabs) {
  std::vector<ParameterStage> stages;
  for (uint32_t i = 0; i < count; ++i) stages.push_back({i * slabs, slabs});
  return stages;
}

std::vector<ParameterStage> RotatingStages(uint32_t count, uint32_t slabs) {
  std::vector<ParameterStage> stages = EvenStages(count, slabs);
  for (uint32_t i = 1; i + 1 < count; ++i) stages[i].may_rotate = true;
  return stages;
}

std::vector<SlabId> SimulatedWorker::Slabs(SlabRole role) const {
  std::vector<SlabId> slabs;
  for (const auto& [slab, entry] : held) {
    if (entry.role == role) slabs.push_back(slab);
  }
  return slabs;
}

SimulatedNode::SimulatedNode(ArbiterOptions options, std::vector<SimulatedTenant> tenants,
                             LedgerFactory ledgers)
    : options_(options),
      tenants_(std::move(tenants)),
      ledgers_(std::move(ledgers)),
      shadow_(options.pool_slabs) {
  arbiter_ = MakeArbiter();
  if (options_.rotation.enabled) image_bytes_per_second_ = 50e9;
}

std::unique_ptr<Arbiter> SimulatedNode::MakeArbiter() {
  auto ledger = ledgers_ ? ledgers_(options_.pool_slabs, options_.generation)
                         : std::make_unique<SlabLedger>(options_.pool_slabs, options_.generation);
  auto arbiter = std::make_unique<Arbiter>(options_, std::move(ledger));
  for (const SimulatedTenant& tenant : tenants_) {
    if (!arbiter->AddTenant(tenant.config).ok()) Problem("a tenant was refused");
  }
  return arbiter;
}

void SimulatedNode::Problem(const std::string& what) {
  problems_.push_back(absl::StrCat("at ", absl::FormatTime(now_, absl::UTCTimeZone()), ": ", what));
}

SimulatedWorker* SimulatedNode::WorkerOf(uint32_t tenant) {
  for (auto& [session, worker] : workers_) {
    if (worker.tenant == TenantId(tenant)) return &worker;
  }
  return nullptr;
}

absl::StatusOr<SessionId> SimulatedNode::Attach(uint32_t tenant) {
  auto session = arbiter_->OnAttach(TenantId(tenant), tenants_[tenant].stages, now_);
  if (session.ok()) {
    SimulatedWorker& worker = workers_[*session];
    worker.tenant = TenantId(tenant);
    worker.session = *session;
  }
  Drain();
  return session;
}

absl::Status SimulatedNode::Reattach(SimulatedWorker& worker) {
  // What was under way when the connection broke is lost; the worker has only what it had mapped.
  for (const SendGrant& grant : worker.grants) {
    std::vector<SlabId> never_fetched;
    for (const GrantedSlab& slab : grant.slabs) {
      if (worker.held.contains(slab.slab)) never_fetched.push_back(slab.slab);
    }
    GiveUp(worker, never_fetched);
  }
  worker.grants.clear();
  worker.revokes.clear();
  worker.rotations.clear();
  worker.link_limit = 0;
  std::vector<HeldSlab> held;
  for (const auto& [slab, entry] : worker.held) held.push_back(entry);
  worker.turn.reset();
  worker.turn_ending = false;
  // Connected before the call, because answers of it arrive with Drain.
  worker.connected = true;
  const absl::Status status =
      arbiter_->OnReattach(worker.session, worker.tenant, tenants_[worker.tenant.value()].stages,
                           held, worker.rotation, now_);
  if (!status.ok()) worker.connected = false;
  worker.activation_deadline.reset();
  Drain();
  return status;
}

void SimulatedNode::Activate(SimulatedWorker& worker, ActivateReason reason) {
  if (!worker.activation_deadline.has_value() && reason == ActivateReason::kRequest) {
    worker.activation_deadline = now_ + options_.activation_deadline;
  }
  arbiter_->OnActivate(worker.session, reason, now_);
  Drain();
  NoteActivation(worker);
}

void SimulatedNode::SetKvTarget(SimulatedWorker& worker, uint32_t target, uint32_t needed) {
  arbiter_->OnSetKvTarget(worker.session, target, needed, now_);
  Drain();
}

void SimulatedNode::Report(SimulatedWorker& worker, bool active, uint32_t used, uint32_t idle,
                           uint32_t waiting) {
  worker.load = SessionLoad{.active = active,
                            .waiting_sequences = waiting,
                            .kv_slabs_used = used,
                            .kv_slabs_cached = idle,
                            .decode_step = absl::Milliseconds(20),
                            .image_bytes_per_second = image_bytes_per_second_,
                            .cached_slab = cached_slab_};
  worker.next_report = now_ + kReportPeriod;
  arbiter_->OnReport(worker.session, *worker.load, now_);
  Drain();
}

absl::Time SimulatedNode::NextReport() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [session, worker] : workers_) {
    if (worker.connected && !worker.hung) next = std::min(next, worker.next_report);
  }
  return next;
}

void SimulatedNode::RepeatReports() {
  for (auto& [session, worker] : workers_) {
    if (!worker.connected || worker.hung || worker.next_report > now_) continue;
    worker.next_report = now_ + kReportPeriod;
    worker.load->image_bytes_per_second = image_bytes_per_second_;
    worker.load->cached_slab = cached_slab_;
    arbiter_->OnReport(session, *worker.load, now_);
    Drain();
  }
}

void SimulatedNode::MapGrant(SimulatedWorker& worker, absl::Duration restore) {
  const SendGrant grant = worker.grants.front();
  worker.grants.pop_front();
  if (grant.role == SlabRole::kParameter) {
    worker.irrevocable_until = now_ + options_.min_residence;
  }
  arbiter_->OnGrantMapped(worker.session, grant.grant, absl::Milliseconds(1), restore, now_);
  Drain();
}

void SimulatedNode::GiveUp(SimulatedWorker& worker, const std::vector<SlabId>& slabs) {
  for (const SlabId slab : slabs) {
    if (worker.held.erase(slab) > 0) shadow_[slab.value()].holder.reset();
  }
}

std::vector<SlabId> SimulatedNode::AnswerTo(const SimulatedWorker& worker,
                                            const SendRevoke& revoke) {
  std::vector<SlabId> slabs;
  if (revoke.role == SlabRole::kKv) {
    // Those in grants that are not mapped cannot be chosen yet.
    std::set<SlabId> unmapped;
    for (const SendGrant& grant : worker.grants) {
      for (const GrantedSlab& slab : grant.slabs) unmapped.insert(slab.slab);
    }
    for (const SlabId slab : worker.Slabs(SlabRole::kKv)) {
      if (slabs.size() < revoke.kv_slabs && !unmapped.contains(slab)) slabs.push_back(slab);
    }
  } else {
    const std::set<RegionIndex> places(revoke.region_indexes.begin(), revoke.region_indexes.end());
    for (const auto& [slab, entry] : worker.held) {
      if (entry.role == SlabRole::kParameter && places.contains(entry.region_index)) {
        slabs.push_back(slab);
      }
    }
  }
  return slabs;
}

void SimulatedNode::AnswerRevoke(SimulatedWorker& worker, uint32_t spare) {
  const SendRevoke revoke = worker.revokes.front();
  worker.revokes.pop_front();
  std::vector<SlabId> slabs = AnswerTo(worker, revoke);
  slabs.resize(slabs.size() - std::min<size_t>(spare, slabs.size()));
  AnswerRevokeWith(worker, revoke.revoke, slabs);
}

void SimulatedNode::AnswerRevokePart(SimulatedWorker& worker, uint32_t count) {
  SendRevoke& revoke = worker.revokes.front();
  std::vector<SlabId> slabs = AnswerTo(worker, revoke);
  slabs.resize(std::min<size_t>(count, slabs.size()));
  for (const SlabId slab : slabs) std::erase(revoke.region_indexes, worker.held[slab].region_index);
  if (revoke.role == SlabRole::kKv) revoke.kv_slabs -= static_cast<uint32_t>(slabs.size());
  const RevokeId id = revoke.revoke;
  GiveUp(worker, slabs);
  absl::StrAppend(&log_, "part ", slabs.size(), "\n");
  arbiter_->OnRevokePart(worker.session, id, slabs, now_);
  Drain();
}

void SimulatedNode::AnswerRevokeWith(SimulatedWorker& worker, RevokeId revoke,
                                     const std::vector<SlabId>& slabs) {
  GiveUp(worker, slabs);
  arbiter_->OnRevokeDone(worker.session, revoke, slabs, now_);
  Drain();
}

void SimulatedNode::AnswerEndTurn(SimulatedWorker& worker) {
  const TurnId turn = *std::exchange(worker.turn, std::nullopt);
  worker.turn_ending = false;
  arbiter_->OnTurnEnded(worker.session, turn, now_);
  Drain();
}

void SimulatedNode::ReleaseKv(SimulatedWorker& worker, uint32_t count) {
  std::vector<SlabId> slabs = worker.Slabs(SlabRole::kKv);
  slabs.resize(std::min<size_t>(slabs.size(), count));
  GiveUp(worker, slabs);
  arbiter_->OnReleaseKv(worker.session, slabs, now_);
  Drain();
}

void SimulatedNode::Detach(SimulatedWorker& worker) {
  worker.detached = true;
  worker.connected = false;
  worker.activation_deadline.reset();
  arbiter_->OnDetach(worker.session, now_);
  Drain();
}

void SimulatedNode::LoseConnection(SimulatedWorker& worker) {
  worker.connected = false;
  worker.activation_deadline.reset();
  arbiter_->OnConnectionLost(worker.session, now_);
  Drain();
}

void SimulatedNode::ProcessGone(SessionId session) {
  for (Shadow& shadow : shadow_) {
    if (shadow.holder == session) shadow.holder.reset();
  }
  workers_.erase(session);
  arbiter_->OnProcessGone(session, now_);
  Drain();
}

void SimulatedNode::Clean(size_t count) {
  std::vector<SlabId> slabs;
  for (; count > 0 && !to_clean_.empty(); --count) {
    slabs.push_back(to_clean_.front());
    to_clean_.pop_front();
    shadow_[slabs.back().value()].dirty_by.reset();
    journal_.erase(slabs.back());
  }
  if (slabs.empty()) return;
  if (const absl::Status status = arbiter_->OnSlabsClean(slabs, now_); !status.ok()) {
    Problem(status.ToString());
  }
  Drain();
}

void SimulatedNode::RestartBroker() {
  ++options_.generation;
  arbiter_ = MakeArbiter();
  to_clean_.clear();
  std::map<SessionId, JournalSession> sessions;
  for (auto& [session, worker] : workers_) {
    sessions[session] = JournalSession{.session = session, .tenant = worker.tenant, .slabs = {}};
    worker.connected = false;
    // A process that was sent SIGKILL or is exiting never acts again, but may linger.
    worker.detached = worker.detached || std::exchange(worker.killed, false);
    worker.activation_deadline.reset();
  }
  std::set<SlabId> journaled;
  for (const auto& [slab, entry] : journal_) {
    const auto session = sessions.find(entry.first);
    if (session == sessions.end()) continue;
    session->second.slabs.push_back(entry.second);
    journaled.insert(slab);
  }
  // Whatever no living process has is created anew.
  for (uint32_t i = 0; i < shadow_.size(); ++i) {
    if (journaled.contains(SlabId(i))) continue;
    if (shadow_[i].holder.has_value()) Problem("the journal forgot a slab that a process holds");
    shadow_[i].dirty_by.reset();
    journal_.erase(SlabId(i));
  }
  std::vector<JournalSession> list;
  for (auto& [id, session] : sessions) list.push_back(std::move(session));
  if (const absl::Status status = arbiter_->AdoptFromJournal(list, now_); !status.ok()) {
    Problem(status.ToString());
  }
  Drain();
}

void SimulatedNode::Advance(absl::Duration duration) {
  const absl::Time end = now_ + duration;
  while (now_ < end) {
    now_ = std::min(end, std::max(now_, std::min(arbiter_->NextDeadline(), NextReport())));
    arbiter_->OnTick(now_);
    Drain();
    RepeatReports();
    if (arbiter_->NextDeadline() <= now_) {
      Problem("a deadline stays behind the clock");
      now_ = end;
    }
    for (const auto& [session, worker] : workers_) {
      // Under temporal sharing it counts from the turn's begin, which this account does not know.
      if (options_.sharing == Sharing::kSpatial && worker.activation_deadline.has_value() &&
          *worker.activation_deadline <= now_) {
        Problem("an activation waits past its deadline");
      }
    }
  }
}

void SimulatedNode::Settle() {
  int rounds = 0;
  for (bool moved = true; moved;) {
    if (++rounds > kSettlingRounds) return Problem("slabs move round and round while nobody asks");
    moved = false;
    std::vector<SessionId> sessions;
    for (const auto& [session, worker] : workers_) sessions.push_back(session);
    for (const SessionId session : sessions) {
      SimulatedWorker& worker = workers_[session];
      if (worker.killed || worker.detached) {
        ProcessGone(session);
        moved = true;
        continue;
      }
      if (worker.hung) continue;
      while (worker.connected && !worker.killed && !worker.grants.empty()) {
        MapGrant(worker);
        moved = true;
      }
      while (worker.connected && !worker.killed && !worker.revokes.empty()) {
        AnswerRevoke(worker);
        moved = true;
      }
      // One a round: each may ask for another.
      if (worker.connected && !worker.killed && !worker.rotations.empty()) {
        FinishRotation(worker);
        moved = true;
      }
      if (worker.connected && !worker.killed && worker.turn_ending) {
        AnswerEndTurn(worker);
        moved = true;
      }
    }
    moved = moved || !to_clean_.empty();
    Clean(to_clean_.size());
  }
}

void SimulatedNode::CheckInvariants() {
  if (const absl::Status status = arbiter_->CheckConsistency(); !status.ok()) {
    Problem(status.ToString());
  }
  const ArbiterSnapshot snapshot = arbiter_->Snapshot();
  const uint32_t sum = snapshot.free_slabs + snapshot.granted_slabs + snapshot.revoking_slabs +
                       snapshot.cleaning_slabs + snapshot.quarantined_slabs + snapshot.lost_slabs;
  if (sum != snapshot.pool_slabs || sum != options_.pool_slabs) Problem("the sums are wrong");
  const SlabLedger& ledger = arbiter_->ledger();
  for (uint32_t i = 0; i < shadow_.size(); ++i) {
    const SlabRecord& record = ledger.record(SlabId(i));
    if (!shadow_[i].holder.has_value()) continue;
    if (record.owner != shadow_[i].holder || record.epoch != shadow_[i].epoch) {
      Problem(absl::StrCat("slab ", i, " may be touched by session ", shadow_[i].holder->value(),
                           " but the ledger has it ", SlabStateName(record.state)));
    }
  }
  for (const auto& [session, worker] : workers_) {
    CheckPlaces(worker);
    if (!worker.connected || !worker.rotations.empty()) continue;
    for (const auto& [slab, held] : worker.held) {
      const SlabRecord& record = ledger.record(slab);
      if (record.role != held.role || record.region_index != held.region_index) {
        Problem(absl::StrCat("slab ", slab.value(), " is not where the ledger has it"));
      }
    }
  }
  const bool any_rotates = std::any_of(
      snapshot.tenants.begin(), snapshot.tenants.end(),
      [](const TenantSnapshot& tenant) { return tenant.attached && tenant.rotation.freed() > 0; });
  for (const TenantSnapshot& tenant : snapshot.tenants) {
    if (tenant.attached && tenant.link_limit != workers_.at(*tenant.session).link_limit) {
      Problem("a worker knows another limit than it should");
    }
    if (tenant.attached && tenant.link_limit > 0 && !any_rotates) {
      Problem("a worker is held back although nothing rotates");
    }
    const uint32_t held =
        tenant.parameter_slabs + tenant.slot_slabs + tenant.kv_slabs + tenant.workspace_slabs;
    if (held > tenant.config.quota_slabs) Problem("a tenant is above its quota");
    if (tenant.attached && tenant.workspace_slabs < tenant.config.workspace_slabs &&
        snapshot.free_slabs > 0) {
      Problem("a worker lacks workspace while slabs are free");
    }
  }
}

}  // namespace palimpsest
