// The link of GrpcMemoryClient: sessions with one broker after the other, what they say and are
// told.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/monotonic_time.h"
#include "worker/memory/grpc_memory_client.h"

namespace palimpsest {
namespace {

// Report in broker.proto.
constexpr absl::Duration kReportAtMost = absl::Milliseconds(100);
constexpr absl::Duration kReportAtLeast = absl::Seconds(1);

absl::Duration Seconds(double seconds) { return absl::Seconds(std::clamp(seconds, 0.0, 86400.0)); }

// Nothing if the role is none that a rotation moves slabs to.
std::optional<RotationMove::To> MoveTarget(v1::SlabRole role) {
  switch (role) {
    case v1::SLAB_ROLE_PARAMETER:
      return RotationMove::To::kParameter;
    case v1::SLAB_ROLE_SLOT:
      return RotationMove::To::kSlot;
    case v1::SLAB_ROLE_UNSPECIFIED:
      return RotationMove::To::kBroker;
    default:
      return std::nullopt;
  }
}

// At reattach these mean that this worker has no place any more.
bool IsFinal(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsNotFound(status) ||
         absl::IsPermissionDenied(status) || absl::IsInvalidArgument(status);
}

}  // namespace

void GrpcMemoryClient::LinkLoop() {
  absl::Duration backoff = options_.min_backoff;
  for (;;) {
    const absl::Time start = MonotonicNow();
    EndSession(ReadSession());
    // A session that ends at once is as good as none.
    if (MonotonicNow() - start > options_.max_backoff) backoff = options_.min_backoff;
    for (;;) {
      if (!AwaitBackoff(backoff)) return;
      backoff = std::min(backoff * 2, options_.max_backoff);
      const absl::Status status = Reconnect();
      if (status.ok()) break;
      if (IsFinal(status)) return Fatal(status);
      Log(LogLevel::kInfo, "the broker is not back yet", {{"status", status}});
    }
    TellArena();
    Wake();
  }
}

absl::Status GrpcMemoryClient::ReadSession() {
  std::shared_ptr<BrokerConnection> connection;
  {
    MutexLock lock(&mu_);
    connection = connection_;
  }
  absl::Status broken;
  while (std::optional<v1::BrokerMessage> message = connection->Read()) {
    broken = Handle(*std::move(message));
    Wake();
    if (!broken.ok()) {
      connection->Shutdown();
      break;
    }
  }
  {
    // The stream has ended, so that a write in progress returns.
    MutexLock lock(&mu_);
    connected_ = false;
    while (writing_) changed_.Wait(&mu_);
  }
  const absl::Status end = connection->Finish();
  return broken.ok() ? end : broken;
}

void GrpcMemoryClient::EndSession(const absl::Status& reason) {
  TellArenaLost();
  {
    MutexLock lock(&mu_);
    connection_->Shutdown();  // a fetch in progress fails
    connected_ = false;
    changed_.SignalAll();
    std::erase_if(map_tasks_,
                  [](const MapTask& task) { return std::holds_alternative<MapGrant>(task); });
    // What the engine gave back is unmapped first, so that it is not claimed to be held.
    while (!stopping_ && (mapping_ || !map_tasks_.empty())) changed_.Wait(&mu_);
    if (stopping_) return;
  }
  backend_.DropKept();
  {
    MutexLock lock(&mu_);
    const bool was_available = slabs_->Available();
    slabs_->LosePromises();
    for (const auto& [id, revoke] : revokes_) {
      for (const RegionIndex index : revoke.indexes) {
        if (slabs_->revoked(index)) slabs_->Unrevoke(index);
      }
    }
    revokes_.clear();
    wanted_rotation_.reset();
    ending_turn_.reset();
    RestoreTask rest;  // what was mapped and passed over because it was revoked
    for (uint32_t i = 0; i < slabs_->size(); ++i) {
      if (slabs_->state(RegionIndex(i)) == ParameterSlabs::State::kMapped) {
        rest.indexes.push_back(RegionIndex(i));
      }
    }
    if (!rest.indexes.empty()) restore_tasks_.push_back(std::move(rest));
    if (detaching_) return;
    LeavePeer(std::nullopt);
    Push(BrokerLost{std::string(reason.message())});
    if (!was_available && slabs_->Available()) Push(ParametersComing{});
  }
  if (instruments_.connected != nullptr) instruments_.connected->Set(0);
  Log(LogLevel::kWarning, "the broker is lost; what is mapped stays in use", {{"reason", reason}});
  Wake();
}

bool GrpcMemoryClient::AwaitBackoff(absl::Duration backoff) {
  // Half of it at least, so that many workers do not come back at the same instant.
  std::uniform_real_distribution<double> share(0.5, 1.0);
  const absl::Time deadline = MonotonicNow() + backoff * share(jitter_);
  MutexLock lock(&mu_);
  while (!stopping_ && !detaching_ && !fatal_) {
    if (changed_.WaitWithDeadline(&mu_, deadline)) break;
  }
  return !stopping_ && !detaching_ && !fatal_;
}

absl::Status GrpcMemoryClient::Reconnect() {
  auto connection = std::make_shared<BrokerConnection>(options_.connection);
  const HeldMemory held = BeginSession(connection);
  absl::StatusOr<v1::Attached> attached = connection->Open(&held);
  if (!attached.ok()) return attached.status();
  if (absl::Status status = CheckSameMemory(*attached); !status.ok()) return status;
  MutexLock lock(&mu_);
  SessionAttached(*attached, /*reattached=*/true);
  return absl::OkStatus();
}

HeldMemory GrpcMemoryClient::BeginSession(std::shared_ptr<BrokerConnection> connection) {
  MutexLock lock(&mu_);
  // The next broker does not know of that memory.
  while (peer_kept_ && !stopping_ && !detaching_) changed_.Wait(&mu_);
  connection_ = std::move(connection);
  if (stopping_) connection_->Shutdown();
  // Between two of the mapper's tasks: what is unmapped later is told in the new session.
  while (mapping_) changed_.Wait(&mu_);
  ++session_epoch_;
  outgoing_.clear();
  HeldMemory held{session_,           parameters_->held(),     kv_->held(),
                  workspace_->held(), manifest_.fingerprint(), restorer_->image().get()};
  for (const auto& [index, slab] : slots_) held.slots.push_back(slab);
  held.rotation = rotation_;
  return held;
}

absl::Status GrpcMemoryClient::CheckSameMemory(const v1::Attached& attached) const {
  if (attached.image().fingerprint() != manifest_.fingerprint() ||
      attached.slab_bytes() != static_cast<uint64_t>(slab_bytes_.count()) ||
      attached.workspace_slabs() != workspace_->places() || attached.backend() != backend_.name()) {
    return absl::FailedPreconditionError(
        "the broker came back with another image, workspace, back-end or slab size; start the "
        "worker anew");
  }
  return absl::OkStatus();
}

void GrpcMemoryClient::SessionAttached(const v1::Attached& attached, bool reattached) {
  session_ = SessionId(attached.session_id());
  block_token_ = attached.block_token();
  pacer_.SetLimit(0);
  // What this process was told first may be better: a broker that starts anew measures beside
  // others.
  const double told = attached.image_bytes_per_second();
  if (!restorer_->copies_slabs() && std::isfinite(told)) {
    host_bytes_per_second_ = std::max(host_bytes_per_second_, told);
    image_bytes_per_second_ = host_bytes_per_second_;
    image_on_peer_ = false;
  }
  connected_ = true;
  kv_target_sent_ = false;
  load_sent_ = false;
  load_time_ = absl::InfinitePast();
  if (activation_.has_value()) SendActivation();
  Push(BrokerConnected{reattached, attached.turns()});
  changed_.SignalAll();
  if (instruments_.connected != nullptr) {
    instruments_.connected->Set(1);
    if (reattached) instruments_.reconnects->Increment();
  }
  Log(LogLevel::kInfo, reattached ? "reattached to the broker" : "attached to the broker",
      {{"session", session_},
       {"tenant", attached.tenant()},
       {"generation", attached.broker_generation()}});
}

absl::Status GrpcMemoryClient::Handle(v1::BrokerMessage message) {
  switch (message.message_case()) {
    case v1::BrokerMessage::kGrant:
      return HandleGrant(std::move(*message.mutable_grant()));
    case v1::BrokerMessage::kRevoke:
      return HandleRevoke(message.revoke());
    case v1::BrokerMessage::kSetRotation:
      return HandleSetRotation(message.set_rotation());
    case v1::BrokerMessage::kPeerImage:
      return HandlePeerImage(message.peer_image());
    case v1::BrokerMessage::kActivateRefused: {
      const bool eager = message.activate_refused().reason() == v1::Activate::REASON_EAGER;
      MutexLock lock(&mu_);
      // The one for requests, sent meanwhile, is answered by itself.
      if (eager && activation_ == ActivationReason::kRequest) return absl::OkStatus();
      activation_.reset();
      if (eager) return absl::OkStatus();
      Push(ActivationRefused{message.activate_refused().message(),
                             Seconds(message.activate_refused().retry_after_seconds())});
      return absl::OkStatus();
    }
    case v1::BrokerMessage::kKvPressure: {
      MutexLock lock(&mu_);
      Push(KvPressureSeen{static_cast<int32_t>(
          std::min<uint32_t>(message.kv_pressure().target_slabs(), kv_->places()))});
      return absl::OkStatus();
    }
    case v1::BrokerMessage::kLinkLimit: {
      const double limit = message.link_limit().bytes_per_second();
      if (!(limit >= 0 && std::isfinite(limit))) break;
      pacer_.SetLimit(limit);
      return absl::OkStatus();
    }
    case v1::BrokerMessage::kTakeTurn: {
      MutexLock lock(&mu_);
      Push(TurnBegun{TurnId(message.take_turn().turn_id()),
                     Seconds(message.take_turn().quantum_seconds())});
      return absl::OkStatus();
    }
    case v1::BrokerMessage::kEndTurn:
      HandleEndTurn(message.end_turn());
      return absl::OkStatus();
    case v1::BrokerMessage::kImageProgress:
      return absl::OkStatus();
    case v1::BrokerMessage::kUnmapChunks:
      return HandleUnmapChunks(message.unmap_chunks());
    case v1::BrokerMessage::kAttached:
    case v1::BrokerMessage::MESSAGE_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("the broker sent a message that makes no sense in a session");
}

absl::Status GrpcMemoryClient::HandleGrant(v1::Grant grant) {
  if (grant.slabs_size() == 0 ||
      (grant.role() != v1::SLAB_ROLE_PARAMETER && grant.role() != v1::SLAB_ROLE_KV &&
       grant.role() != v1::SLAB_ROLE_WORKSPACE && grant.role() != v1::SLAB_ROLE_SLOT)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a grant of ", grant.slabs_size(), " slabs in role ", static_cast<int>(grant.role())));
  }
  MutexLock lock(&mu_);
  const bool was_available = slabs_->Available();
  if (grant.role() == v1::SLAB_ROLE_PARAMETER) {
    for (const v1::GrantedSlab& slab : grant.slabs()) {
      const RegionIndex index(slab.region_index());
      if (index.value() >= slabs_->size() ||
          slabs_->state(index) != ParameterSlabs::State::kAbsent) {
        return absl::InvalidArgumentError(
            absl::StrCat("a grant for place ", index.ToString(),
                         " of the parameter region, which is outside or taken"));
      }
      slabs_->Promise(index);
    }
  }
  map_tasks_.push_back(MapGrant{session_epoch_, std::move(grant), MonotonicNow()});
  changed_.SignalAll();
  if (!was_available && slabs_->Available()) {
    activation_.reset();
    Push(ParametersComing{});
  }
  return absl::OkStatus();
}

absl::Status GrpcMemoryClient::HandleRevoke(const v1::Revoke& revoke) {
  const RevokeId id(revoke.revoke_id());
  const absl::Time deadline = MonotonicNow() + Seconds(revoke.deadline_seconds());
  MutexLock lock(&mu_);
  if (revokes_.contains(id)) return absl::InvalidArgumentError("a revoke came twice");
  if (revoke.role() == v1::SLAB_ROLE_KV) {
    revokes_[id] = PendingRevoke{};
    const auto slabs = static_cast<int32_t>(std::min<uint32_t>(revoke.kv_slabs(), kv_->places()));
    Push(KvRevoked{id, slabs, deadline});
    return absl::OkStatus();
  }
  if (revoke.role() != v1::SLAB_ROLE_PARAMETER || revoke.region_indexes().empty()) {
    return absl::InvalidArgumentError("a revoke of nothing, or in an unknown role");
  }
  PendingRevoke pending;
  for (const uint32_t place : revoke.region_indexes()) {
    const RegionIndex index(place);
    if (place >= slabs_->size() || slabs_->revoked(index) ||
        slabs_->state(index) == ParameterSlabs::State::kAbsent) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a revoke of place ", place, " of the parameter region, where nothing is to be taken"));
    }
    slabs_->Revoke(index);
    pending.indexes.push_back(index);
  }
  Push(ParametersRevoked{id, pending.indexes, deadline});
  revokes_[id] = std::move(pending);
  return absl::OkStatus();
}

absl::Status GrpcMemoryClient::HandleSetRotation(const v1::SetRotation& message) {
  Rotate rotate{RotationId(message.rotation_id()), {}, {}};
  const absl::Time deadline = MonotonicNow() + Seconds(message.deadline_seconds());
  for (const uint32_t stage : message.rotation().stages()) {
    if (stage >= stages_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("a rotation of stage ", stage, " of ", stages_.size()));
    }
    rotate.rotation.stages.push_back(static_cast<int32_t>(stage));
  }
  rotate.rotation.slots =
      static_cast<int32_t>(std::min<uint32_t>(message.rotation().slots(), kMaxSlots + 1));
  for (const v1::MovedSlab& slab : message.moves()) {
    const std::optional<RotationMove::To> to = MoveTarget(slab.role());
    if (!to.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat("a rotation that moves slab ", slab.slab_id(),
                                                     " to role ", static_cast<int>(slab.role())));
    }
    rotate.moves.push_back({SlabId(slab.slab_id()), *to, RegionIndex(slab.region_index())});
  }
  MutexLock lock(&mu_);
  if (wanted_rotation_.has_value()) {
    return absl::InvalidArgumentError("a rotation came before the last one was answered");
  }
  Push(RotationWanted{rotate.id, rotate.rotation, deadline});
  wanted_rotation_ = std::move(rotate);
  return absl::OkStatus();
}

void GrpcMemoryClient::HandleEndTurn(const v1::EndTurn& turn) {
  const TurnId id(turn.turn_id());
  MutexLock lock(&mu_);
  ending_turn_ = id;
  Push(TurnEnding{id, MonotonicNow() + Seconds(turn.deadline_seconds())});
}

void GrpcMemoryClient::Send(v1::WorkerMessage message) {
  outgoing_.push_back(std::move(message));
  changed_.SignalAll();
}

v1::WorkerMessage GrpcMemoryClient::ReportMessage() const {
  const WorkerLoad& load = *load_;
  v1::WorkerMessage message;
  v1::Report& report = *message.mutable_report();
  report.set_active(load.active);
  report.set_running_sequences(static_cast<uint32_t>(load.running_sequences));
  report.set_waiting_sequences(static_cast<uint32_t>(load.waiting_sequences));
  report.set_kv_slabs_used(static_cast<uint32_t>(load.kv_slabs_used));
  report.set_kv_slabs_cached(static_cast<uint32_t>(load.kv_slabs_cached));
  report.set_kv_slabs_free(static_cast<uint32_t>(load.kv_slabs_free));
  report.set_context_bytes(static_cast<uint64_t>(context_bytes_.count()));
  report.set_decode_step_seconds(load.decode_step_seconds);
  report.set_prefill_step_seconds(load.prefill_step_seconds);
  report.set_prefill_share(load.prefill_share);
  report.set_image_bytes_per_second(image_bytes_per_second_);
  report.set_image_on_peer(image_on_peer_);
  report.set_rotation_stall_seconds(load.rotation_stall_seconds);
  report.set_rotation_bytes(static_cast<uint64_t>((load.rotation_bytes + rotation_bytes_).count()));
  report.set_cached_slab_seconds(load.cached_slab_seconds);
  const auto copied = [this](LinkPacer::Kind kind) {
    return static_cast<uint64_t>(pacer_.copied(kind).count());
  };
  report.set_restored_bytes(copied(LinkPacer::Kind::kRestore));
  report.set_block_bytes(copied(LinkPacer::Kind::kBlocks));
  return message;
}

std::optional<v1::WorkerMessage> GrpcMemoryClient::NextMessage(absl::Time now) {
  if (!connected_) return std::nullopt;
  // First, so that slabs which are given back below a lowered target are not granted again.
  if (kv_target_.has_value() && !kv_target_sent_) {
    kv_target_sent_ = true;
    v1::WorkerMessage message;
    *message.mutable_set_kv_target() = *kv_target_;
    return message;
  }
  if (!outgoing_.empty()) {
    v1::WorkerMessage message = std::move(outgoing_.front());
    outgoing_.pop_front();
    return message;
  }
  if (load_.has_value() && now - load_time_ >= (load_sent_ ? kReportAtLeast : kReportAtMost)) {
    load_sent_ = true;
    load_time_ = now;
    return ReportMessage();
  }
  return std::nullopt;
}

void GrpcMemoryClient::WriterLoop() {
  for (;;) {
    std::shared_ptr<BrokerConnection> connection;
    std::optional<v1::WorkerMessage> message;
    {
      MutexLock lock(&mu_);
      while (!stopping_ && !(message = NextMessage(MonotonicNow())).has_value()) {
        const bool report_due = connected_ && load_.has_value();
        const absl::Time next = load_time_ + (load_sent_ ? kReportAtLeast : kReportAtMost);
        changed_.WaitWithDeadline(&mu_, report_due ? next : absl::InfiniteFuture());
      }
      if (stopping_) return;
      connection = connection_;
      writing_ = true;
    }
    if (connection->Write(*message) && message->has_detach()) connection->FinishWriting();
    MutexLock lock(&mu_);
    writing_ = false;
    changed_.SignalAll();
  }
}

void GrpcMemoryClient::Fatal(const absl::Status& status) {
  {
    MutexLock lock(&mu_);
    if (fatal_ || stopping_ || detaching_) return;
    fatal_ = true;
    changed_.SignalAll();
  }
  Log(LogLevel::kError, "the worker cannot go on", {{"status", status}});
  gate_->Fail(status);
  Wake();
  if (options_.on_fatal) options_.on_fatal(status);
}

void GrpcMemoryClient::DropConnection(const absl::Status& reason) {
  Log(LogLevel::kError, "the session with the broker is given up", {{"reason", reason}});
  std::shared_ptr<BrokerConnection> connection;
  {
    MutexLock lock(&mu_);
    connection = connection_;
  }
  connection->Shutdown();
}

}  // namespace palimpsest
