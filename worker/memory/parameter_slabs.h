// The state of each parameter slab of a worker, and what follows from it for the gate: pure
// bookkeeping, used under GrpcMemoryClient's lock.
//
//   kAbsent    -> kPromised   Promise: a grant names it
//   kPromised  -> kMapped     Mapped
//   kPromised  -> kAbsent     Lose: the session ended before it was mapped
//   kMapped    -> kRestoring  BeginRestore
//   kRestoring -> kQueued     Queued: its copy is under way, and an event will tell its end
//   kRestoring, kQueued -> kRestored  Restored
//   kRestoring, kQueued -> kMapped    AbandonRestore
//   kMapped, kRestored, kRotating -> kAbsent   Unmapped
//   kAbsent    -> kRotating   Rotate: its place shows a slot's slab
//
// Beside that a slab may be revoked: it is still there, but its stage is closed, it is not restored
// any more, and it is not unmapped while something is written to it. Other transitions abort.
#ifndef PALIMPSEST_WORKER_MEMORY_PARAMETER_SLABS_H_
#define PALIMPSEST_WORKER_MEMORY_PARAMETER_SLABS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"
#include "worker/memory/parameter_gate.h"

namespace palimpsest {

class ParameterSlabs {
 public:
  enum class State : uint8_t {
    kAbsent,
    kPromised,
    kMapped,
    kRestoring,
    kQueued,
    kRestored,
    kRotating
  };

  struct StageSpan {
    uint32_t first = 0;
    uint32_t count = 0;
  };

  // Stages cover the slabs 0 .. n-1 in order. `gate` is kept up to date with them.
  ParameterSlabs(const std::vector<StageSpan>& stages, ParameterGateImpl* gate);

  State state(RegionIndex index) const { return slabs_[index.value()].state; }
  bool revoked(RegionIndex index) const { return slabs_[index.value()].revoked; }
  // Whether it must not be unmapped yet.
  bool BeingWritten(RegionIndex index) const {
    return state(index) == State::kRestoring || state(index) == State::kQueued;
  }
  uint32_t size() const { return static_cast<uint32_t>(slabs_.size()); }
  uint32_t restored() const { return restored_; }

  void Promise(RegionIndex index);
  void Mapped(RegionIndex index);
  // False when the slab was revoked and is not to be restored.
  bool BeginRestore(RegionIndex index);
  void Queued(RegionIndex index);
  void Restored(RegionIndex index);
  // No-op for a slab that is not being restored.
  void AbandonRestore(RegionIndex index);
  void Unmapped(RegionIndex index);
  // Of all slabs of a stage, one after the other.
  void Rotate(RegionIndex index);
  void Revoke(RegionIndex index);
  // The revoke is void: the slab stays.
  void Unrevoke(RegionIndex index);
  // All promised slabs become absent.
  void LosePromises();

  // Whether no slab is absent or revoked.
  bool Available() const { return missing_ == 0; }

 private:
  struct Slab {
    State state = State::kAbsent;
    bool revoked = false;
    int stage = 0;
  };
  // Slabs of a stage, and those of them that decide about its gate.
  struct Stage {
    uint32_t not_restored = 0;
    uint32_t queued = 0;
    uint32_t missing = 0;
    uint32_t rotating = 0;
    uint32_t slabs = 0;
  };

  void Change(RegionIndex index, State state, bool revoked);

  std::vector<Slab> slabs_;
  std::vector<Stage> stages_;
  uint32_t missing_ = 0;
  uint32_t restored_ = 0;
  ParameterGateImpl* const gate_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_PARAMETER_SLABS_H_
