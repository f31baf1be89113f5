// Which slab goes where when other layers of a model begin to rotate. Pure.
//
// Places: a rotating stage has no slabs of its own. Slot s of a rotation has the slot places
// s * n to s * n + n - 1, where n is the number of slabs of a rotating stage; slabs at slot places
// behind those are spare: granted, so that stages which cease to rotate can be filled, and mapped
// nowhere.
#ifndef PALIMPSEST_BROKER_CORE_SLAB_MOVES_H_
#define PALIMPSEST_BROKER_CORE_SLAB_MOVES_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "broker/core/parameter_stage.h"
#include "broker/core/slab_ledger.h"
#include "common/ids.h"
#include "common/rotation.h"

namespace palimpsest {

// Neighbouring stages with equally many slabs, any of which may rotate.
struct RotatableLayers {
  int32_t first_stage = 0;
  int32_t layers = 0;
  // Of each layer.
  uint32_t slabs = 0;
};

// The longest run of such stages, the first one of several; no layers if there are not two.
RotatableLayers FindRotatableLayers(absl::Span<const ParameterStage> stages);

// The slabs that a session has at its places.
struct SlabPlaces {
  absl::Span<const ParameterStage> stages;
  absl::Span<const std::optional<SlabId>> parameters;
  absl::Span<const std::optional<SlabId>> slots;  // spare ones behind those of the slots
};

// InvalidArgument unless the rotation names layers that may rotate, these have no slabs of their
// own, and its slots are complete.
absl::Status CheckPlaces(const SlabPlaces& places, const Rotation& rotation);

struct SlabMove {
  SlabId slab;
  // kParameter, kSlot, or kNone: it is given back.
  SlabRole role = SlabRole::kNone;
  RegionIndex place;

  friend bool operator==(const SlabMove&, const SlabMove&) = default;
};

// Leads from rotation `from` to `to`: slots of `to` are complete, stages that cease to rotate have
// slabs of their own, those that begin to have none, no spare slab is left, and what is not needed
// is given back. Slabs move only where they must. Fails, with InvalidArgument, if places and `from`
// disagree, if a stage that is to rotate lacks slabs, or if there are too few: going to fewer
// freed layers takes n spare slabs for each.
absl::StatusOr<std::vector<SlabMove>> PlanMoves(const SlabPlaces& places, const Rotation& from,
                                                const Rotation& to);

// Leads to no rotation by giving back every slot and spare slab: stages that rotated are missing
// then.
std::vector<SlabMove> PlanDissolution(const SlabPlaces& places);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_SLAB_MOVES_H_
