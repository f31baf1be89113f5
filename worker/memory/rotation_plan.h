// What a SetRotation of the broker changes in a worker's parameter memory, or why it makes no
// sense. Pure.
#ifndef PALIMPSEST_WORKER_MEMORY_ROTATION_PLAN_H_
#define PALIMPSEST_WORKER_MEMORY_ROTATION_PLAN_H_

#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "common/rotation.h"
#include "worker/memory/parameter_slabs.h"
#include "worker/memory/regions.h"

namespace palimpsest {

// The slabs that a worker holds for parameters.
struct ParameterTable {
  // At places of their own in the parameter region.
  std::map<RegionIndex, SlabRegion::Held> own;
  // By slot * (slabs of a rotating stage) + slab of the slot, mapped at the addresses of that
  // slot's rotating stages; those behind the slots are spare and mapped nowhere. `index` is that
  // number.
  std::map<RegionIndex, SlabRegion::Held> slots;
  Rotation rotation;
};

// See MovedSlab in broker.proto.
struct RotationMove {
  enum class To : uint8_t { kParameter, kSlot, kBroker };
  SlabId slab;
  To to = To::kBroker;
  RegionIndex index;
};

struct RotationPlan {
  ParameterTable after;
  // Places whose slab or whose kind (own, alias) changes, and those of them that get one again.
  std::vector<RegionIndex> vacated;
  std::vector<SlabRegion::Held> own;
  std::vector<SlabRegion::Held> aliases;
};

// InvalidArgument unless every moved slab is held and moved once, no place has two, rotating stages
// are equally large and have no slab of their own, and every slab of every slot is there.
absl::StatusOr<RotationPlan> PlanRotation(const ParameterTable& before,
                                          absl::Span<const ParameterSlabs::StageSpan> stages,
                                          const Rotation& rotation,
                                          absl::Span<const RotationMove> moves);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_ROTATION_PLAN_H_
