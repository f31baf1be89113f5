// What a worker may say: its messages as the arbiter's types, or the reason why they are none.
// Pure. Everything is bounded by the pool's size; numbers are finite.
#ifndef PALIMPSEST_BROKER_SERVER_WORKER_MESSAGES_H_
#define PALIMPSEST_BROKER_SERVER_WORKER_MESSAGES_H_

#include <cstdint>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "broker/core/arbiter.h"
#include "broker/core/peer_images.h"
#include "common/rotation.h"
#include "proto/palimpsest/v1/broker.pb.h"

namespace palimpsest {

struct ActivateEvent {
  ActivateReason reason = ActivateReason::kRequest;
};
struct KvTargetEvent {
  uint32_t target_slabs = 0;
  uint32_t needed_slabs = 0;
};
struct RevokeDoneEvent {
  RevokeId revoke;
  std::vector<SlabId> slabs;
  // The rest of the answer follows.
  bool more = false;
};
struct ReleaseKvEvent {
  std::vector<SlabId> slabs;
};
struct GrantMappedEvent {
  GrantId grant;
  absl::Duration map;
  absl::Duration restore;
};
struct RotationDoneEvent {
  RotationId rotation;
};
struct PeerImageEvent {
  PeerImageId id;
  uint32_t slabs = 0;
};
struct TurnEndedEvent {
  TurnId turn;
};
struct ChunksUnmappedEvent {
  std::vector<uint32_t> chunks;
};
struct DetachEvent {};

inline constexpr uint32_t kMaxUnmappedChunks = 1 << 16;

using WorkerEvent = std::variant<ActivateEvent, KvTargetEvent, RevokeDoneEvent, ReleaseKvEvent,
                                 GrantMappedEvent, RotationDoneEvent, PeerImageEvent, SessionLoad,
                                 TurnEndedEvent, ChunksUnmappedEvent, DetachEvent>;

// Any message but Attach, which is legal only as the first one. Slabs are of the pool and named
// once; durations are between 0 and a day; counts at most 2^24. At most kMaxUnmappedChunks chunks,
// whatever their numbers are.
absl::StatusOr<WorkerEvent> ParseWorkerMessage(const v1::WorkerMessage& message,
                                               uint32_t pool_slabs);

// Each slab at most once, in the role PARAMETER, KV, SLOT or WORKSPACE.
absl::StatusOr<std::vector<HeldSlab>> CheckedHeldSlabs(const v1::Reattach& reattach,
                                                       uint32_t pool_slabs);

// At most 2^16 stages and kMaxSlots slots; whether they make sense is for the arbiter to say.
absl::StatusOr<Rotation> CheckedRotation(const v1::Rotation& rotation);
void RotationToProto(const Rotation& rotation, v1::Rotation& out);

v1::SlabRole RoleToProto(SlabRole role);

// The inverse, for a role that a journal holds; kNone for a number that is no role.
SlabRole RoleFromNumber(int role);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_WORKER_MESSAGES_H_
