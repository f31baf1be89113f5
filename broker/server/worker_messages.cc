#include "broker/server/worker_messages.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr uint32_t kMaxCount = 1 << 24;
constexpr Bytes kMaxContext = GiB(1024);
constexpr uint32_t kMaxStages = 1 << 16;
constexpr double kMaxBytesPerSecond = 1e15;
// Of a worker that runs for years.
constexpr double kMaxStallSeconds = 1e10;

// Checks that each of `ids` is in the pool and comes once.
class SlabSet {
 public:
  explicit SlabSet(uint32_t pool_slabs) : seen_(pool_slabs) {}

  absl::Status Add(uint32_t id) {
    if (id >= seen_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("slab ", id, " is not one of the pool's ", seen_.size()));
    }
    if (seen_[id]) return absl::InvalidArgumentError(absl::StrCat("slab ", id, " is named twice"));
    seen_[id] = true;
    return absl::OkStatus();
  }

 private:
  std::vector<bool> seen_;
};

absl::StatusOr<std::vector<SlabId>> CheckedSlabs(
    const google::protobuf::RepeatedField<uint32_t>& ids, uint32_t pool_slabs) {
  SlabSet seen(pool_slabs);
  std::vector<SlabId> slabs;
  slabs.reserve(ids.size());
  for (const uint32_t id : ids) {
    if (absl::Status status = seen.Add(id); !status.ok()) return status;
    slabs.push_back(SlabId(id));
  }
  return slabs;
}

absl::StatusOr<absl::Duration> CheckedSeconds(double seconds, absl::string_view field) {
  if (!(seconds >= 0.0 && seconds <= 86400.0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " is ", seconds, ", expected 0 to 86400 seconds"));
  }
  return absl::Seconds(seconds);
}

// Also refuses what is not a number.
absl::Status CheckRange(double value, double most, absl::string_view field) {
  if (value >= 0.0 && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("Report.", field, " is ", value, ", expected 0 to ", most));
}

absl::Status CheckSpeeds(const v1::Report& report) {
  absl::Status status = CheckRange(report.decode_step_seconds(), 86400.0, "decode_step_seconds");
  status.Update(CheckRange(report.prefill_step_seconds(), 86400.0, "prefill_step_seconds"));
  status.Update(CheckRange(report.prefill_share(), 1.0, "prefill_share"));
  status.Update(
      CheckRange(report.image_bytes_per_second(), kMaxBytesPerSecond, "image_bytes_per_second"));
  status.Update(
      CheckRange(report.rotation_stall_seconds(), kMaxStallSeconds, "rotation_stall_seconds"));
  status.Update(CheckRange(report.cached_slab_seconds(), 86400.0, "cached_slab_seconds"));
  return status;
}

absl::StatusOr<WorkerEvent> CheckedLoad(const v1::Report& report) {
  for (const uint32_t count :
       {report.running_sequences(), report.waiting_sequences(), report.kv_slabs_used(),
        report.kv_slabs_cached(), report.kv_slabs_free()}) {
    if (count > kMaxCount) {
      return absl::InvalidArgumentError(
          absl::StrCat("a report counts ", count, ", expected at most ", kMaxCount));
    }
  }
  if (report.context_bytes() > static_cast<uint64_t>(kMaxContext.count())) {
    return absl::InvalidArgumentError(absl::StrCat("a report of ", report.context_bytes(),
                                                   " bytes beside slabs, expected at most ",
                                                   kMaxContext.count()));
  }
  if (absl::Status status = CheckSpeeds(report); !status.ok()) return status;
  return SessionLoad{.active = report.active(),
                     .running_sequences = report.running_sequences(),
                     .waiting_sequences = report.waiting_sequences(),
                     .kv_slabs_used = report.kv_slabs_used(),
                     .kv_slabs_cached = report.kv_slabs_cached(),
                     .kv_slabs_free = report.kv_slabs_free(),
                     .context = Bytes(static_cast<int64_t>(report.context_bytes())),
                     .decode_step = absl::Seconds(report.decode_step_seconds()),
                     .prefill_step = absl::Seconds(report.prefill_step_seconds()),
                     .prefill_share = report.prefill_share(),
                     .image_bytes_per_second = report.image_bytes_per_second(),
                     .image_on_peer = report.image_on_peer(),
                     .rotation_stall = absl::Seconds(report.rotation_stall_seconds()),
                     .rotation_bytes = report.rotation_bytes(),
                     .restored_bytes = report.restored_bytes(),
                     .block_bytes = report.block_bytes(),
                     .cached_slab = absl::Seconds(report.cached_slab_seconds())};
}

absl::StatusOr<WorkerEvent> CheckedReason(v1::Activate::Reason reason) {
  switch (reason) {
    case v1::Activate::REASON_REQUEST:
      return ActivateEvent{ActivateReason::kRequest};
    case v1::Activate::REASON_EAGER:
      return ActivateEvent{ActivateReason::kEager};
    default:
      return absl::InvalidArgumentError(absl::StrCat("Activate.reason is ",
                                                     static_cast<int>(reason),
                                                     ", expected REASON_REQUEST or REASON_EAGER"));
  }
}

absl::StatusOr<WorkerEvent> CheckedTarget(const v1::SetKvTarget& target, uint32_t pool_slabs) {
  if (target.target_slabs() > pool_slabs || target.needed_slabs() > target.target_slabs()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "SetKvTarget asks for ", target.target_slabs(), " slabs, ", target.needed_slabs(),
        " of them needed; expected needed <= target <= ", pool_slabs));
  }
  return KvTargetEvent{target.target_slabs(), target.needed_slabs()};
}

absl::StatusOr<WorkerEvent> CheckedMapped(const v1::GrantMapped& mapped) {
  const auto map = CheckedSeconds(mapped.map_seconds(), "GrantMapped.map_seconds");
  if (!map.ok()) return map.status();
  const auto restore = CheckedSeconds(mapped.restore_seconds(), "GrantMapped.restore_seconds");
  if (!restore.ok()) return restore.status();
  return GrantMappedEvent{GrantId(mapped.grant_id()), *map, *restore};
}

absl::StatusOr<WorkerEvent> CheckedChunks(const v1::ChunksUnmapped& unmapped) {
  const auto count = static_cast<uint32_t>(unmapped.chunk_ids_size());
  if (count < 1 || count > kMaxUnmappedChunks) {
    return absl::InvalidArgumentError(absl::StrCat("ChunksUnmapped names ", count,
                                                   " chunks, expected 1 to ", kMaxUnmappedChunks));
  }
  return ChunksUnmappedEvent{{unmapped.chunk_ids().begin(), unmapped.chunk_ids().end()}};
}

}  // namespace

absl::StatusOr<WorkerEvent> ParseWorkerMessage(const v1::WorkerMessage& message,
                                               uint32_t pool_slabs) {
  switch (message.message_case()) {
    case v1::WorkerMessage::kActivate:
      return CheckedReason(message.activate().reason());
    case v1::WorkerMessage::kSetKvTarget:
      return CheckedTarget(message.set_kv_target(), pool_slabs);
    case v1::WorkerMessage::kRevokeDone: {
      auto slabs = CheckedSlabs(message.revoke_done().slab_ids(), pool_slabs);
      if (!slabs.ok()) return slabs.status();
      return RevokeDoneEvent{RevokeId(message.revoke_done().revoke_id()), *std::move(slabs),
                             message.revoke_done().more()};
    }
    case v1::WorkerMessage::kReleaseKv: {
      auto slabs = CheckedSlabs(message.release_kv().slab_ids(), pool_slabs);
      if (!slabs.ok()) return slabs.status();
      return ReleaseKvEvent{*std::move(slabs)};
    }
    case v1::WorkerMessage::kGrantMapped:
      return CheckedMapped(message.grant_mapped());
    case v1::WorkerMessage::kReport:
      return CheckedLoad(message.report());
    case v1::WorkerMessage::kTurnEnded:
      return TurnEndedEvent{TurnId(message.turn_ended().turn_id())};
    case v1::WorkerMessage::kDetach:
      return DetachEvent{};
    case v1::WorkerMessage::kRotationDone:
      return RotationDoneEvent{RotationId(message.rotation_done().rotation_id())};
    case v1::WorkerMessage::kPeerImageDone:
      return PeerImageEvent{PeerImageId(message.peer_image_done().peer_image_id()),
                            message.peer_image_done().slabs()};
    case v1::WorkerMessage::kChunksUnmapped:
      return CheckedChunks(message.chunks_unmapped());
    case v1::WorkerMessage::kAttach:
      return absl::InvalidArgumentError("Attach comes once, as the first message");
    case v1::WorkerMessage::MESSAGE_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("a message of no known kind");
}

absl::StatusOr<std::vector<HeldSlab>> CheckedHeldSlabs(const v1::Reattach& reattach,
                                                       uint32_t pool_slabs) {
  SlabSet seen(pool_slabs);
  std::vector<HeldSlab> held;
  held.reserve(reattach.slabs_size());
  for (const v1::HeldSlab& slab : reattach.slabs()) {
    if (absl::Status status = seen.Add(slab.slab_id()); !status.ok()) return status;
    const SlabRole role = RoleFromNumber(slab.role());
    if (role == SlabRole::kNone) {
      return absl::InvalidArgumentError(
          absl::StrCat("slab ", slab.slab_id(), " is held in role ", static_cast<int>(slab.role()),
                       ", expected PARAMETER, KV, SLOT or WORKSPACE"));
    }
    held.push_back(HeldSlab{SlabId(slab.slab_id()), Epoch(slab.epoch()), role,
                            RegionIndex(slab.region_index())});
  }
  return held;
}

absl::StatusOr<Rotation> CheckedRotation(const v1::Rotation& rotation) {
  if (rotation.stages_size() > static_cast<int>(kMaxStages) || rotation.slots() > kMaxSlots) {
    return absl::InvalidArgumentError(
        absl::StrCat("a rotation of ", rotation.stages_size(), " stages in ", rotation.slots(),
                     " slots, expected at most ", kMaxStages, " in ", kMaxSlots));
  }
  Rotation checked{.stages = {}, .slots = static_cast<int32_t>(rotation.slots())};
  for (const uint32_t stage : rotation.stages()) {
    if (stage >= kMaxStages) {
      return absl::InvalidArgumentError(
          absl::StrCat("stage ", stage, " rotates, of at most ", kMaxStages));
    }
    checked.stages.push_back(static_cast<int32_t>(stage));
  }
  return checked;
}

void RotationToProto(const Rotation& rotation, v1::Rotation& out) {
  for (const int32_t stage : rotation.stages) out.add_stages(static_cast<uint32_t>(stage));
  out.set_slots(static_cast<uint32_t>(rotation.slots));
}

v1::SlabRole RoleToProto(SlabRole role) {
  switch (role) {
    case SlabRole::kParameter:
      return v1::SLAB_ROLE_PARAMETER;
    case SlabRole::kKv:
      return v1::SLAB_ROLE_KV;
    case SlabRole::kSlot:
      return v1::SLAB_ROLE_SLOT;
    case SlabRole::kWorkspace:
      return v1::SLAB_ROLE_WORKSPACE;
    case SlabRole::kNone:
      break;
  }
  return v1::SLAB_ROLE_UNSPECIFIED;
}

SlabRole RoleFromNumber(int role) {
  switch (role) {
    case v1::SLAB_ROLE_PARAMETER:
      return SlabRole::kParameter;
    case v1::SLAB_ROLE_KV:
      return SlabRole::kKv;
    case v1::SLAB_ROLE_SLOT:
      return SlabRole::kSlot;
    case v1::SLAB_ROLE_WORKSPACE:
      return SlabRole::kWorkspace;
    default:
      return SlabRole::kNone;
  }
}

}  // namespace palimpsest
