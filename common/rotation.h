// Which layers of a model rotate: they have no memory of their own, and are copied from the
// parameter image into a slot each time they run (DESIGN: rotating layers). Pure data and
// arithmetic, shared by broker and worker.
#ifndef PALIMPSEST_COMMON_ROTATION_H_
#define PALIMPSEST_COMMON_ROTATION_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace palimpsest {

inline constexpr int32_t kMaxSlots = 2;

struct Rotation {
  // Indexes into ImageManifest.stages, ascending; empty: none rotates.
  std::vector<int32_t> stages;
  // Copies of a layer's slabs that the rotating layers share; 0 exactly if none rotates.
  int32_t slots = 0;

  bool none() const { return stages.empty(); }
  // Layers whose memory was given away (alpha): rotating ones less slots.
  int32_t freed() const { return static_cast<int32_t>(stages.size()) - slots; }
  // The slot at whose slabs the addresses of rotating stage number `i` (of `stages`) are mapped.
  int32_t SlotOf(size_t i) const { return static_cast<int32_t>(i) % slots; }

  friend bool operator==(const Rotation&, const Rotation&) = default;
};

// freed + slots of the layers first_stage .. first_stage + layers - 1, spread evenly: gaps between
// neighbours, the one around the end included, differ by at most 1. Where gaps
// are of two layers or more the first layer is not among them, so that a step has computed
// something when it needs one. None if freed is 0. Requires freed >= 0, slots of 1 or 2 and freed +
// slots <= layers.
Rotation EvenRotation(int32_t first_stage, int32_t layers, int32_t freed, int32_t slots);

// InvalidArgument unless the stages are ascending, within `stages`, more than the slots, and the
// slots are 1 or 2; or all is empty.
absl::Status ValidateRotation(const Rotation& rotation, int32_t stages);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_ROTATION_H_
