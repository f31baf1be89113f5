// What the broker does on the arbiter's behalf, and what it tells operators.
#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "broker/server/broker.h"
#include "broker/server/remap_log_view.h"
#include "broker/server/worker_messages.h"
#include "common/log.h"

namespace palimpsest {
namespace {

constexpr size_t kTransfersKept = 1024;
constexpr int kJournalTries = 20;
constexpr absl::Duration kJournalPause = absl::Milliseconds(250);

// The session that an action is about; nullopt for actions about none.
std::optional<SessionId> SessionOf(const ArbiterAction& action) {
  return std::visit(
      [](const auto& typed) -> std::optional<SessionId> {
        if constexpr (requires { typed.session; }) return typed.session;
        return std::nullopt;
      },
      action);
}

journal::Record OpenedRecord(const Broker::Session& session) {
  journal::Record record;
  journal::SessionOpened& opened = *record.mutable_session_opened();
  opened.set_session_id(session.id.value());
  opened.set_tenant(session.tenant_name);
  opened.set_pid(session.process->pid());
  opened.set_process_start(session.process->identity().start_ticks);
  opened.set_fingerprint(session.fingerprint);
  return record;
}

v1::Transfer::Kind KindToProto(TransferKind kind) {
  switch (kind) {
    case TransferKind::kRevoke:
      return v1::Transfer::KIND_REVOKE;
    case TransferKind::kGrant:
      return v1::Transfer::KIND_GRANT;
    case TransferKind::kRestore:
      return v1::Transfer::KIND_RESTORE;
    case TransferKind::kClean:
      return v1::Transfer::KIND_SCRUB;
    case TransferKind::kRotate:
      return v1::Transfer::KIND_ROTATE;
  }
  return v1::Transfer::KIND_UNSPECIFIED;
}

}  // namespace

void Broker::Collect() {
  for (ArbiterAction& action : arbiter_.TakeActions()) {
    if (const auto* finished = std::get_if<TransferFinished>(&action)) {
      if (transfers_.size() == kTransfersKept) transfers_.pop_front();
      transfers_.push_back(*finished);
    }
    Work work{std::move(action), nullptr, nullptr};
    if (const auto id = SessionOf(std::get<ArbiterAction>(work.what)); id.has_value()) {
      const auto found = sessions_.find(*id);
      if (found == sessions_.end()) continue;
      work.session = found->second;
      work.stream = found->second->stream;
      if (std::holds_alternative<SessionEnded>(std::get<ArbiterAction>(work.what))) {
        std::erase_if(lost_,
                      [&id](const auto& slab) { return slab.second.session_id() == id->value(); });
        found->second->stream = nullptr;
        peers_.End(*id);
        sessions_.erase(found);
      }
    }
    queue_.push_back(std::move(work));
  }
  for (const PeerImages::Offer& offer : peers_.Decide(parts_.clock.Now())) {
    const std::shared_ptr<Session>& session = sessions_.at(offer.session);
    queue_.push_back(Work{offer, session, session->stream});
  }
  if (std::min(arbiter_.NextDeadline(), peers_.NextDeadline()) < timer_deadline_) {
    timer_changed_.Signal();
  }
}

void Broker::Drain() {
  while (true) {
    std::vector<Work> batch;
    {
      MutexLock lock(&mu_);
      if (draining_ || queue_.empty()) return;
      draining_ = true;
      batch.swap(queue_);
    }
    Execute(batch);
    MutexLock lock(&mu_);
    draining_ = false;
  }
}

void Broker::Execute(std::vector<Work>& batch) {
  Record(batch);
  for (const Work& work : batch) {
    std::visit([this, &work](const auto& what) { Do(work, what); }, work.what);
  }
}

void Broker::Record(const std::vector<Work>& batch) {
  std::vector<journal::Record> records;
  for (const Work& work : batch) {
    if (const auto* attached = std::get_if<SendAttached>(&work.what)) {
      if (!attached->recorded) records.push_back(OpenedRecord(*work.session));
      continue;
    }
    if (!std::holds_alternative<ArbiterAction>(work.what)) continue;
    const ArbiterAction& action = std::get<ArbiterAction>(work.what);
    if (const auto* grant = std::get_if<SendGrant>(&action)) {
      for (const GrantedSlab& slab : grant->slabs) {
        const SlabDevice::Identity identity = parts_.device.IdentityOf(slab.slab);
        journal::SlabGranted& granted = *records.emplace_back().mutable_slab_granted();
        granted.set_slab_id(slab.slab.value());
        granted.set_device(identity.device);
        granted.set_inode(identity.inode);
        granted.set_session_id(grant->session.value());
        granted.set_role(RoleToProto(grant->role));
        granted.set_epoch(slab.epoch.value());
        granted.set_region_index(slab.region_index.value());
      }
    } else if (const auto* ended = std::get_if<SessionEnded>(&action)) {
      records.emplace_back().mutable_session_ended()->set_session_id(ended->session.value());
    }
  }
  if (!records.empty()) AppendOrDie(records);
}

void Broker::AppendOrDie(const std::vector<journal::Record>& records) {
  absl::Status status;
  for (int attempt = 0; attempt < kJournalTries; ++attempt) {
    status = parts_.journal.Append(records);
    if (status.ok()) return;
    Log(LogLevel::kError, "the journal cannot be written", {{"error", status}});
    absl::SleepFor(kJournalPause);
  }
  parts_.fatal(status);
}

double Broker::ImageBytesPerSecond() {
  const std::vector<SlabDevice::Link> links = parts_.device.Links();
  double rate = links.empty() ? 0 : links.front().to_device;
  for (const SlabDevice::Link& link : links) rate = std::min(rate, link.to_device);
  // Workers of the broker before this one were told then; this one measured while they copied, or
  // could not.
  MutexLock lock(&mu_);
  for (const TenantSnapshot& tenant : arbiter_.Snapshot().tenants) {
    if (!tenant.load.image_on_peer) rate = std::max(rate, tenant.load.image_bytes_per_second);
  }
  return rate;
}

void Broker::Do(const Work& work, const SendAttached& attached) {
  if (work.stream == nullptr) return;
  const Session& session = *work.session;
  v1::BrokerMessage message;
  v1::Attached& out = *message.mutable_attached();
  out.set_session_id(session.id.value());
  out.set_tenant(session.tenant_name);
  out.set_broker_generation(options_.arbiter.generation);
  out.set_slab_bytes(static_cast<uint64_t>(options_.slab_bytes.count()));
  out.set_pool_slabs(options_.arbiter.pool_slabs);
  out.set_quota_slabs(options_.tenants[session.tenant->value()].quota_slabs);
  out.set_workspace_slabs(options_.tenants[session.tenant->value()].workspace_slabs);
  out.set_backend(parts_.device.name());
  out.set_preemption(options_.memory_policy == MemoryPolicy::kSwap ? v1::PREEMPTION_SWAP
                                                                   : v1::PREEMPTION_RECOMPUTE);
  out.set_image_bytes_per_second(ImageBytesPerSecond());
  out.set_turns(options_.arbiter.sharing == Sharing::kTemporal);
  if (!options_.hibernate_after.empty()) {
    out.set_hibernate_after_seconds(
        absl::ToDoubleSeconds(options_.hibernate_after[session.tenant->value()]));
  }
  *out.mutable_image() = attached.image->manifest;
  if (parts_.blocks != nullptr) {
    out.set_block_token(
        parts_.blocks->Attached({session.id, *session.tenant, session.process, work.stream}));
  }
  if (attached.send_image) {
    const Token token =
        parts_.hand_overs.Offer(work.stream->connection(),
                                HandOver{DescriptorKind::kImage, {}, {attached.image->descriptor}},
                                options_.token_lifetime);
    out.set_image_token(token.ToBytes());
  }
  work.stream->Send(std::move(message));
  Log(LogLevel::kInfo, attached.recorded ? "worker returned" : "worker attached",
      {{"tenant", session.tenant_name}, {"session", session.id}, {"pid", session.process->pid()}});
  parts_.metrics.Attached(attached.recorded ? AttachOutcome::kReattached
                                            : AttachOutcome::kAttached);
}

void Broker::Do(const Work& work, const ArbiterAction& action) {
  std::visit([this, &work](const auto& typed) { Perform(work, typed); }, action);
}

void Broker::Perform(const Work& work, const SendGrant& grant) {
  if (work.stream == nullptr) return;
  HandOver what{DescriptorKind::kSlabs, {}, {}, static_cast<uint8_t>(parts_.device.pieces())};
  v1::BrokerMessage message;
  v1::Grant& out = *message.mutable_grant();
  out.set_grant_id(grant.grant.value());
  out.set_role(RoleToProto(grant.role));
  for (const GrantedSlab& slab : grant.slabs) {
    v1::GrantedSlab& granted = *out.add_slabs();
    granted.set_slab_id(slab.slab.value());
    granted.set_epoch(slab.epoch.value());
    granted.set_region_index(slab.region_index.value());
    // What a worker keeps of memory that is replaced would be lost to the pool.
    if (options_.cleaning == Options::Cleaning::kScrub) {
      granted.set_memory_id(parts_.device.MemoryId(slab.slab));
    }
    what.entries.push_back(SlabEntry{slab.slab, slab.epoch});
    // There is some: a slab without memory is not granted.
    const std::shared_ptr<const SlabDescriptors> memory = parts_.device.Descriptors(slab.slab);
    for (const UniqueFd& piece : *memory) {
      what.descriptors.push_back(std::shared_ptr<const UniqueFd>(memory, &piece));
    }
  }
  const Token token =
      parts_.hand_overs.Offer(work.stream->connection(), std::move(what), options_.token_lifetime);
  out.set_token(token.ToBytes());
  out.set_token_seconds(absl::ToDoubleSeconds(options_.token_lifetime));
  work.stream->Send(std::move(message));
}

void Broker::Perform(const Work& work, const SendRevoke& revoke) {
  if (work.stream == nullptr) return;
  v1::BrokerMessage message;
  v1::Revoke& out = *message.mutable_revoke();
  out.set_revoke_id(revoke.revoke.value());
  out.set_role(RoleToProto(revoke.role));
  for (const RegionIndex index : revoke.region_indexes) out.add_region_indexes(index.value());
  out.set_kv_slabs(revoke.kv_slabs);
  out.set_deadline_seconds(
      absl::ToDoubleSeconds(std::max(revoke.deadline - parts_.clock.Now(), absl::ZeroDuration())));
  work.stream->Send(std::move(message));
}

void Broker::Perform(const Work& work, const SendSetRotation& rotation) {
  Log(LogLevel::kInfo, "layers rotate",
      {{"tenant", work.session->tenant_name},
       {"freed", rotation.rotation.freed()},
       {"slots", rotation.rotation.slots},
       {"reason", MoveReasonName(rotation.reason)}});
  if (work.stream == nullptr) return;
  v1::BrokerMessage message;
  v1::SetRotation& out = *message.mutable_set_rotation();
  out.set_rotation_id(rotation.id.value());
  RotationToProto(rotation.rotation, *out.mutable_rotation());
  for (const SlabMove& move : rotation.moves) {
    v1::MovedSlab& moved = *out.add_moves();
    moved.set_slab_id(move.slab.value());
    moved.set_role(RoleToProto(move.role));
    moved.set_region_index(move.place.value());
  }
  out.set_deadline_seconds(absl::ToDoubleSeconds(
      std::max(rotation.deadline - parts_.clock.Now(), absl::ZeroDuration())));
  work.stream->Send(std::move(message));
}

void Broker::Perform(const Work& work, const SendActivateRefused& refused) {
  parts_.metrics.ActivationRefused(work.session->tenant_name);
  if (work.stream == nullptr) return;
  v1::BrokerMessage message;
  message.mutable_activate_refused()->set_message(refused.message);
  message.mutable_activate_refused()->set_retry_after_seconds(
      absl::ToDoubleSeconds(refused.retry_after));
  message.mutable_activate_refused()->set_reason(refused.eager ? v1::Activate::REASON_EAGER
                                                               : v1::Activate::REASON_REQUEST);
  work.stream->Send(std::move(message));
}

void Broker::Perform(const Work& work, const SendKvPressure& pressure) {
  parts_.metrics.KvPressure(work.session->tenant_name);
  if (work.stream == nullptr) return;
  v1::BrokerMessage message;
  message.mutable_kv_pressure()->set_target_slabs(pressure.target_slabs);
  work.stream->Send(std::move(message));
}

void Broker::Perform(const Work& work, const SendLinkLimit& limit) {
  if (work.stream == nullptr) return;
  v1::BrokerMessage message;
  message.mutable_link_limit()->set_bytes_per_second(limit.bytes_per_second);
  work.stream->Send(std::move(message));
}

void Broker::Perform(const Work& work, const KillProcess& kill) {
  const Session& session = *work.session;
  Log(LogLevel::kWarning, "worker killed",
      {{"tenant", session.tenant_name}, {"session", session.id}, {"why", kill.why}});
  if (session.process == nullptr) return;
  if (const absl::Status killed = session.process->Kill(); !killed.ok()) {
    Log(LogLevel::kError, "a worker cannot be killed; its slabs stay in quarantine",
        {{"pid", session.process->pid()}, {"error", killed}});
  }
}

void Broker::Perform(const Work&, const CleanSlabs& clean) { cleaner_->Enqueue(clean.slabs); }

void Broker::Perform(const Work& work, const SessionEnded&) {
  if (parts_.blocks != nullptr) parts_.blocks->Ended(work.session->id);
  // Only a worker that detached may still be connected.
  if (work.stream != nullptr) work.stream->Close("the session has ended");
}

void Broker::Perform(const Work&, const TransferFinished& transfer) {
  parts_.metrics.Moved(transfer, TenantName(transfer.tenant));
}

void Broker::Perform(const Work& work, const SendTakeTurn& turn) {
  parts_.metrics.TurnBegan(turn, work.session->tenant_name);
  if (work.stream == nullptr) return;
  v1::BrokerMessage message;
  message.mutable_take_turn()->set_turn_id(turn.turn.value());
  message.mutable_take_turn()->set_quantum_seconds(absl::ToDoubleSeconds(turn.quantum));
  work.stream->Send(std::move(message));
}

void Broker::Perform(const Work& work, const SendEndTurn& turn) {
  if (work.stream == nullptr) return;
  v1::BrokerMessage message;
  message.mutable_end_turn()->set_turn_id(turn.turn.value());
  message.mutable_end_turn()->set_deadline_seconds(
      absl::ToDoubleSeconds(std::max(turn.deadline - parts_.clock.Now(), absl::ZeroDuration())));
  work.stream->Send(std::move(message));
}

void Broker::SlabsClean(absl::Span<const SlabId> slabs) {
  std::vector<journal::Record> records;
  {
    MutexLock lock(&mu_);
    for (const SlabId slab : slabs) {
      journal::SlabReleased& released = *records.emplace_back().mutable_slab_released();
      released.set_slab_id(slab.value());
      released.set_epoch(arbiter_.ledger().record(slab).epoch.value());
    }
  }
  AppendOrDie(records);
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (const absl::Status status = arbiter_.OnSlabsClean(slabs, now); !status.ok()) {
      parts_.fatal(status);
    }
  });
}

v1::GetStatusResponse Broker::Status() {
  v1::GetStatusResponse out;
  FillStatus(out);
  if (parts_.blocks != nullptr) parts_.blocks->FillStatus(out);
  return out;
}

void Broker::FillStatus(v1::GetStatusResponse& out) {
  MutexLock lock(&mu_);
  const ArbiterSnapshot snapshot = arbiter_.Snapshot();
  out.set_broker_generation(options_.arbiter.generation);
  out.set_slab_bytes(static_cast<uint64_t>(options_.slab_bytes.count()));
  out.set_pool_slabs(snapshot.pool_slabs);
  out.set_free_slabs(snapshot.free_slabs);
  out.set_granted_slabs(snapshot.granted_slabs);
  out.set_revoking_slabs(snapshot.revoking_slabs);
  out.set_cleaning_slabs(snapshot.cleaning_slabs);
  out.set_quarantined_slabs(snapshot.quarantined_slabs + snapshot.lost_slabs);
  out.set_backend(parts_.device.name());
  out.set_memory_policy(std::string(MemoryPolicyName(options_.memory_policy)));
  out.set_slab_pieces(static_cast<uint32_t>(parts_.device.pieces()));
  out.set_peer_slabs(peers_.slabs());
  out.set_peer_slabs_free(peers_.free());
  out.set_sharing(options_.arbiter.sharing == Sharing::kTemporal ? "temporal" : "spatial");
  for (uint32_t i = 0; i < snapshot.tenants.size(); ++i) {
    FillTenant(snapshot.tenants[i], TenantId(i), *out.add_tenants());
  }
  const absl::Duration wall = absl::Now() - parts_.clock.Now();
  for (const TransferFinished& finished : transfers_) {
    v1::Transfer& transfer = *out.add_transfers();
    transfer.set_kind(KindToProto(finished.kind));
    transfer.set_tenant(TenantName(finished.tenant));
    transfer.set_role(RoleToProto(finished.role));
    transfer.set_slabs(finished.slabs);
    transfer.set_seconds(absl::ToDoubleSeconds(finished.duration));
    transfer.set_reason(std::string(MoveReasonName(finished.reason)));
    transfer.set_finished_at(
        absl::ToDoubleSeconds(finished.finished_at + wall - absl::UnixEpoch()));
  }
}

void Broker::FillTenant(const TenantSnapshot& tenant, TenantId id, v1::TenantMemory& out) {
  out.set_tenant(tenant.config.name);
  out.set_priority(tenant.config.priority);
  out.set_pinned(tenant.config.pinned);
  out.set_attached(tenant.attached);
  v1::Report& load = *out.mutable_load();
  load.set_active(tenant.load.active);
  load.set_running_sequences(tenant.load.running_sequences);
  load.set_waiting_sequences(tenant.load.waiting_sequences);
  load.set_kv_slabs_used(tenant.load.kv_slabs_used);
  load.set_kv_slabs_cached(tenant.load.kv_slabs_cached);
  load.set_kv_slabs_free(tenant.load.kv_slabs_free);
  load.set_context_bytes(static_cast<uint64_t>(tenant.load.context.count()));
  load.set_decode_step_seconds(absl::ToDoubleSeconds(tenant.load.decode_step));
  load.set_prefill_step_seconds(absl::ToDoubleSeconds(tenant.load.prefill_step));
  load.set_prefill_share(tenant.load.prefill_share);
  load.set_image_bytes_per_second(tenant.load.image_bytes_per_second);
  load.set_image_on_peer(tenant.load.image_on_peer);
  load.set_rotation_stall_seconds(absl::ToDoubleSeconds(tenant.load.rotation_stall));
  load.set_rotation_bytes(tenant.load.rotation_bytes);
  load.set_restored_bytes(tenant.load.restored_bytes);
  load.set_block_bytes(tenant.load.block_bytes);
  load.set_cached_slab_seconds(absl::ToDoubleSeconds(tenant.load.cached_slab));
  out.set_context_allowance_bytes(
      static_cast<uint64_t>(options_.context_allowance[id.value()].count()));
  out.set_parameter_slabs(tenant.parameter_slabs);
  out.set_kv_slabs(tenant.kv_slabs);
  out.set_slot_slabs(tenant.slot_slabs);
  for (const int32_t stage : tenant.rotation.stages) {
    out.add_rotating_stages(static_cast<uint32_t>(stage));
  }
  out.set_freed_layers(static_cast<uint32_t>(tenant.rotation.freed()));
  out.set_workspace_slabs(tenant.workspace_slabs);
  out.set_floor_slabs(tenant.config.floor_slabs);
  out.set_quota_slabs(tenant.config.quota_slabs);
  out.set_image_slabs(options_.image_slabs[id.value()]);
  out.set_grants_in_flight(tenant.grants_in_flight);
  out.set_revokes_in_flight(tenant.revokes_in_flight);
  out.set_activation_waiting(tenant.activation_waiting);
  out.set_kv_target_slabs(tenant.kv_target_slabs);
  out.set_link_limit_bytes_per_second(tenant.link_limit);
  out.set_has_turn(tenant.has_turn);
  out.set_waits_for_turn(tenant.waits_for_turn);
  out.set_fingerprint(absl::BytesToHexString(parts_.images.Fingerprint(id)));
  if (!tenant.session.has_value()) return;
  out.set_peer_image_slabs(peers_.Held(*tenant.session));
  const auto session = sessions_.find(*tenant.session);
  if (session == sessions_.end() || session->second->process == nullptr) return;
  out.set_pid(session->second->process->pid());
  out.set_fingerprint(absl::BytesToHexString(session->second->fingerprint));
}

v1::GetRemapLogResponse Broker::RemapDecisions(const v1::GetRemapLogRequest& request) {
  MutexLock lock(&mu_);
  return RemapLogView(
      arbiter_.remap_log(), request,
      [this](TenantId tenant) -> const std::string& { return TenantName(tenant); },
      absl::Now() - parts_.clock.Now());
}

size_t Broker::sessions() {
  MutexLock lock(&mu_);
  return sessions_.size();
}

absl::Status Broker::CheckConsistency() {
  MutexLock lock(&mu_);
  return arbiter_.CheckConsistency();
}

}  // namespace palimpsest
