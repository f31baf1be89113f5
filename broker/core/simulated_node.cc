#include "broker/core/simulated_node.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

// More rounds of answering everything than any decision may need to come to rest.
// Report in broker.proto: at least every second.
constexpr absl::Duration kReportPeriod = absl::Seconds(1);
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

void SimulatedNode::Drain() {
  for (ArbiterAction& action : arbiter_->TakeActions()) {
    std::visit([this](auto& a) { Do(std::move(a)); }, action);
  }
}

void SimulatedNode::Do(SendGrant grant) {
  absl::StrAppend(&log_, "grant ", grant.session.value(), " ", SlabRoleName(grant.role));
  const auto found = workers_.find(grant.session);
  if (found == workers_.end() || found->second.killed || !found->second.connected) {
    return Problem("a grant to a session that is not connected");
  }
  SimulatedWorker& worker = found->second;
  std::set<RegionIndex> places;
  for (const auto& [slab, entry] : worker.held) {
    if (entry.role == grant.role) places.insert(entry.region_index);
  }
  std::optional<RegionIndex> previous;
  for (const GrantedSlab& slab : grant.slabs) {
    absl::StrAppend(&log_, " ", slab.slab.value(), "@", slab.epoch.value());
    Shadow& shadow = shadow_[slab.slab.value()];
    if (shadow.holder.has_value()) Problem("a slab was granted that a process may still touch");
    const bool same = options_.skip_clean_for_same_tenant && shadow.dirty_by == worker.tenant;
    if (shadow.dirty_by.has_value() && !same) Problem("a slab was granted before it was cleaned");
    if (slab.epoch <= shadow.epoch || (slab.epoch.value() >> 32) != options_.generation) {
      Problem("an epoch did not grow or is of another generation");
    }
    if (grant.role != SlabRole::kKv) {
      if (!places.insert(slab.region_index).second) Problem("a place was granted twice");
      if (previous.has_value() && slab.region_index <= *previous) Problem("not in stage order");
      previous = slab.region_index;
    }
    shadow = Shadow{.holder = grant.session, .dirty_by = worker.tenant, .epoch = slab.epoch};
    const HeldSlab entry{slab.slab, slab.epoch, grant.role, slab.region_index};
    worker.held[slab.slab] = entry;
    journal_[slab.slab] = {grant.session, entry};
  }
  log_ += "\n";
  if (worker.held.size() > tenants_[worker.tenant.value()].config.quota_slabs) {
    Problem("a tenant exceeded its quota");
  }
  worker.grants.push_back(std::move(grant));
  NoteActivation(worker);
}

void SimulatedNode::CheckParameterRevoke(const SimulatedWorker& worker, const SendRevoke& revoke) {
  if (tenants_[worker.tenant.value()].config.pinned) Problem("a pinned tenant lost parameters");
  if (now_ < worker.irrevocable_until) Problem("parameters were revoked within their residence");
  std::set<RegionIndex> asked(revoke.region_indexes.begin(), revoke.region_indexes.end());
  std::set<RegionIndex> held, pending;
  for (const auto& [slab, entry] : worker.held) {
    if (entry.role == SlabRole::kParameter) held.insert(entry.region_index);
  }
  for (const SendRevoke& other : worker.revokes) {
    pending.insert(other.region_indexes.begin(), other.region_indexes.end());
  }
  // Whole stages, the last ones: nothing behind the first place asked for stays.
  for (const RegionIndex place : held) {
    if (place >= *asked.begin() && !asked.contains(place) && !pending.contains(place)) {
      Problem("a revoke left a hole in front of parameters that stay");
      break;
    }
  }
  for (const RegionIndex place : asked) {
    if (!held.contains(place)) Problem("a place was revoked that is vacant");
  }
}

void SimulatedNode::Do(SendRevoke revoke) {
  absl::StrAppend(&log_, "revoke ", revoke.session.value(), " ", SlabRoleName(revoke.role), " ",
                  revoke.kv_slabs, "+", revoke.region_indexes.size(), "\n");
  const auto found = workers_.find(revoke.session);
  if (found == workers_.end() || found->second.killed || !found->second.connected) {
    return Problem("a revoke for a session that is not connected");
  }
  SimulatedWorker& worker = found->second;
  if (revoke.deadline <= now_) Problem("a revoke without time to answer");
  if (revoke.kv_slabs == 0 && revoke.region_indexes.empty()) Problem("a revoke of nothing");
  if (revoke.role == SlabRole::kParameter) CheckParameterRevoke(worker, revoke);
  if (revoke.role == SlabRole::kWorkspace) Problem("a workspace was revoked");
  if (revoke.kv_slabs > worker.Count(SlabRole::kKv)) Problem("more KV revoked than held");
  worker.revokes.push_back(std::move(revoke));
}

void SimulatedNode::CheckRotation(const SimulatedWorker& worker, const SendSetRotation& rotation) {
  const SimulatedTenant& tenant = tenants_[worker.tenant.value()];
  uint32_t given_back = 0, slots = 0;
  for (const SlabMove& move : rotation.moves) given_back += move.role == SlabRole::kNone ? 1 : 0;
  if (!worker.rotation.none()) {
    slots = tenant.stages[worker.rotation.stages.front()].slab_count *
            static_cast<uint32_t>(worker.rotation.slots);
  }
  const uint32_t spare = worker.Count(SlabRole::kSlot) - slots;
  if (tenant.config.pinned) Problem("a pinned tenant's layers rotate");
  if (given_back > spare && now_ < worker.irrevocable_until) {
    Problem("layers were taken within their residence");
  }
  if (rotation.deadline <= now_) Problem("a rotation without time to answer");
  if (!worker.rotations.empty()) Problem("two rotations at a time");
  for (const SendGrant& grant : worker.grants) {
    if (grant.role == SlabRole::kParameter || grant.role == SlabRole::kSlot) {
      Problem("a rotation while parameters are being granted");
    }
  }
  for (const SendRevoke& revoke : worker.revokes) {
    if (revoke.role == SlabRole::kParameter) Problem("a rotation while parameters are revoked");
  }
  for (const SlabMove& move : rotation.moves) {
    const auto held = worker.held.find(move.slab);
    if (held == worker.held.end() ||
        (held->second.role != SlabRole::kParameter && held->second.role != SlabRole::kSlot)) {
      Problem("a rotation moves a slab that is neither parameter nor slot");
    }
  }
}

void SimulatedNode::Do(SendSetRotation rotation) {
  absl::StrAppend(&log_, "rotate ", rotation.session.value(), " to ", rotation.rotation.freed(),
                  " freed in ", rotation.rotation.slots, " slots, ", rotation.moves.size(),
                  " moves\n");
  const auto found = workers_.find(rotation.session);
  if (found == workers_.end() || found->second.killed || !found->second.connected) {
    return Problem("a rotation for a session that is not connected");
  }
  CheckRotation(found->second, rotation);
  found->second.rotations.push_back(std::move(rotation));
}

void SimulatedNode::CarryOut(SimulatedWorker& worker, const SendSetRotation& rotation) {
  std::vector<SlabId> given_back;
  for (const SlabMove& move : rotation.moves) {
    if (move.role == SlabRole::kParameter && rotation.rotation.freed() < worker.rotation.freed()) {
      worker.irrevocable_until = now_ + options_.min_residence;
    }
    if (move.role == SlabRole::kNone) {
      given_back.push_back(move.slab);
      continue;
    }
    HeldSlab& held = worker.held[move.slab];
    held.role = move.role;
    held.region_index = move.place;
  }
  worker.rotation = rotation.rotation;
  GiveUp(worker, given_back);
  CheckPlaces(worker);
}

// Every place of a worker that is not being granted or revoked anything has one slab: those of
// slots, and those of stages, except that rotating ones have none and missing ones may lack some.
void SimulatedNode::CheckPlaces(const SimulatedWorker& worker) {
  const std::vector<ParameterStage>& stages = tenants_[worker.tenant.value()].stages;
  std::vector<std::optional<SlabId>> parameters(stages.back().first_slab +
                                                stages.back().slab_count);
  std::vector<std::optional<SlabId>> slots(options_.pool_slabs);
  for (const auto& [slab, held] : worker.held) {
    if (held.role != SlabRole::kParameter && held.role != SlabRole::kSlot) continue;
    auto& place = (held.role == SlabRole::kSlot ? slots : parameters)[held.region_index.value()];
    if (place.has_value()) Problem("two slabs at one place");
    place = slab;
  }
  const absl::Status status = palimpsest::CheckPlaces({stages, parameters, slots}, worker.rotation);
  if (!status.ok()) Problem(status.ToString());
}

void SimulatedNode::FinishRotation(SimulatedWorker& worker) {
  const SendSetRotation rotation = std::move(worker.rotations.front());
  worker.rotations.pop_front();
  CarryOut(worker, rotation);
  NoteActivation(worker);
  arbiter_->OnRotationDone(worker.session, rotation.id, now_);
  Drain();
}

void SimulatedNode::FinishRotationAndLoseConnection(SimulatedWorker& worker) {
  CarryOut(worker, worker.rotations.front());
  worker.rotations.clear();
  LoseConnection(worker);
}

void SimulatedNode::Do(const SendActivateRefused& refused) {
  absl::StrAppend(&log_, "refused ", refused.session.value(), "\n");
  if (refused.message.empty() || refused.retry_after <= absl::ZeroDuration()) {
    Problem("a refusal without words or hint");
  }
  if (const auto found = workers_.find(refused.session); found != workers_.end()) {
    ++found->second.refusals;
    found->second.activation_deadline.reset();
  }
}

void SimulatedNode::Do(const SendKvPressure& pressure) {
  absl::StrAppend(&log_, "pressure ", pressure.session.value(), " ", pressure.target_slabs, "\n");
  if (const auto found = workers_.find(pressure.session); found != workers_.end()) {
    ++found->second.pressures;
  }
}

void SimulatedNode::Do(const SendLinkLimit& limit) {
  absl::StrAppend(&log_, "link limit ", limit.session.value(), " ", limit.bytes_per_second, "\n");
  const auto found = workers_.find(limit.session);
  if (found == workers_.end() || found->second.killed || !found->second.connected) {
    return Problem("a limit for a session that is not connected");
  }
  if (!std::isfinite(limit.bytes_per_second) || limit.bytes_per_second < 0 ||
      limit.bytes_per_second == found->second.link_limit) {
    Problem("a limit that is none or was told before");
  }
  found->second.link_limit = limit.bytes_per_second;
}

void SimulatedNode::Do(const SendTakeTurn& turn) {
  absl::StrAppend(&log_, "turn ", turn.session.value(), " ", turn.turn.value(), "\n");
  const auto found = workers_.find(turn.session);
  if (found == workers_.end() || found->second.killed || !found->second.connected) {
    return Problem("a turn for a session that is not connected");
  }
  for (const auto& [session, other] : workers_) {
    if (other.turn.has_value() && other.connected) Problem("two have a turn");
  }
  found->second.turn = turn.turn;
  found->second.turn_ending = false;
  ++found->second.turns;
}

void SimulatedNode::Do(const SendEndTurn& turn) {
  absl::StrAppend(&log_, "end turn ", turn.session.value(), "\n");
  const auto found = workers_.find(turn.session);
  if (found == workers_.end() || found->second.turn != turn.turn || found->second.turn_ending) {
    return Problem("a turn is asked back from one that does not have it");
  }
  if (turn.deadline <= now_) Problem("no time to end a turn");
  found->second.turn_ending = true;
}

void SimulatedNode::Do(const KillProcess& kill) {
  absl::StrAppend(&log_, "kill ", kill.session.value(), " ", kill.why, "\n");
  const auto found = workers_.find(kill.session);
  if (found == workers_.end()) return Problem("a kill of a process that is gone");
  if (std::exchange(found->second.killed, true)) Problem("killed twice");
  found->second.connected = false;
  found->second.activation_deadline.reset();
}

void SimulatedNode::Do(const CleanSlabs& clean) {
  absl::StrAppend(&log_, "clean ", clean.slabs.size(), "\n");
  for (const SlabId slab : clean.slabs) {
    if (shadow_[slab.value()].holder.has_value()) {
      Problem("a slab is cleaned while a process may touch it");
    }
    to_clean_.push_back(slab);
  }
}

void SimulatedNode::Do(const SessionEnded& ended) {
  absl::StrAppend(&log_, "ended ", ended.session.value(), "\n");
  if (workers_.contains(ended.session)) Problem("a session ended before its process");
}

void SimulatedNode::Do(const TransferFinished& transfer) {
  if (transfer.duration < absl::ZeroDuration()) Problem("a transfer took negative time");
  transfers_.push_back(transfer);
}

bool SimulatedNode::Complete(const SimulatedWorker& worker) const {
  const std::vector<ParameterStage>& stages = tenants_[worker.tenant.value()].stages;
  uint32_t needed = stages.back().first_slab + stages.back().slab_count;
  for (const int32_t stage : worker.rotation.stages) needed -= stages[stage].slab_count;
  return worker.Count(SlabRole::kParameter) == needed && worker.rotations.empty();
}

void SimulatedNode::NoteActivation(SimulatedWorker& worker) {
  if (!Complete(worker)) return;
  worker.activation_deadline.reset();
  worker.was_complete = true;
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

void SimulatedNode::Report(SimulatedWorker& worker, bool active, uint32_t used, uint32_t idle) {
  worker.load = SessionLoad{.active = active,
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
      while (worker.connected && !worker.killed && !worker.rotations.empty()) {
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
