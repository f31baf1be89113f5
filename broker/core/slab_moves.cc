#include "broker/core/slab_moves.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

// Slabs of one slot.
uint32_t SlotSlabs(const SlabPlaces& places, const Rotation& rotation) {
  return rotation.none() ? 0 : places.stages[rotation.stages.front()].slab_count;
}

bool Rotates(const Rotation& rotation, int32_t stage) {
  return std::binary_search(rotation.stages.begin(), rotation.stages.end(), stage);
}

absl::Status CheckLayers(const SlabPlaces& places, const Rotation& rotation) {
  absl::Status status = ValidateRotation(rotation, static_cast<int32_t>(places.stages.size()));
  for (const int32_t stage : rotation.stages) {
    if (!status.ok()) break;
    if (places.stages[stage].may_rotate &&
        places.stages[stage].slab_count == SlotSlabs(places, rotation)) {
      continue;
    }
    status = absl::InvalidArgumentError(
        absl::StrCat("stage ", stage, " of ", places.stages[stage].slab_count,
                     " slabs cannot rotate, or not with stages of ", SlotSlabs(places, rotation)));
  }
  return status;
}

}  // namespace

RotatableLayers FindRotatableLayers(absl::Span<const ParameterStage> stages) {
  RotatableLayers longest, run;
  for (size_t i = 0; i < stages.size(); ++i) {
    if (!stages[i].may_rotate) {
      run = RotatableLayers();
      continue;
    }
    if (run.layers == 0 || stages[i].slab_count != run.slabs) {
      run = {.first_stage = static_cast<int32_t>(i), .layers = 0, .slabs = stages[i].slab_count};
    }
    ++run.layers;
    if (run.layers > longest.layers) longest = run;
  }
  return longest.layers < 2 ? RotatableLayers() : longest;
}

absl::Status CheckPlaces(const SlabPlaces& places, const Rotation& rotation) {
  if (absl::Status status = CheckLayers(places, rotation); !status.ok()) return status;
  for (const int32_t stage : rotation.stages) {
    const ParameterStage& own = places.stages[stage];
    for (uint32_t i = own.first_slab; i < own.first_slab + own.slab_count; ++i) {
      if (!places.parameters[i].has_value()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("stage ", stage, " rotates but has a slab of its own at place ", i));
    }
  }
  const uint32_t needed = SlotSlabs(places, rotation) * static_cast<uint32_t>(rotation.slots);
  for (uint32_t i = 0; i < needed; ++i) {
    if (i < places.slots.size() && places.slots[i].has_value()) continue;
    return absl::InvalidArgumentError(absl::StrCat("a slot has no slab at place ", i));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SlabMove>> PlanMoves(const SlabPlaces& places, const Rotation& from,
                                                const Rotation& to) {
  absl::Status status = CheckPlaces(places, from);
  if (status.ok()) status = CheckLayers(places, to);
  if (!status.ok()) return status;
  const auto slot_places = [&places](const Rotation& rotation) {
    return SlotSlabs(places, rotation) * static_cast<uint32_t>(rotation.slots);
  };
  const uint32_t kept = std::min(slot_places(from), slot_places(to));
  std::vector<SlabId> released;  // first those that are mapped nowhere
  for (uint32_t i = kept; i < places.slots.size(); ++i) {
    if (places.slots[i].has_value()) released.push_back(*places.slots[i]);
  }
  std::reverse(released.begin(), released.end());
  for (const int32_t stage : to.stages) {
    if (Rotates(from, stage)) continue;
    const ParameterStage& own = places.stages[stage];
    for (uint32_t i = own.first_slab; i < own.first_slab + own.slab_count; ++i) {
      if (!places.parameters[i].has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat("stage ", stage, " is to rotate but is missing"));
      }
      released.push_back(*places.parameters[i]);
    }
  }
  std::vector<SlabMove> moves;
  for (const int32_t stage : from.stages) {
    if (Rotates(to, stage)) continue;
    const ParameterStage& own = places.stages[stage];
    for (uint32_t i = own.first_slab; i < own.first_slab + own.slab_count; ++i) {
      moves.push_back({SlabId(), SlabRole::kParameter, RegionIndex(i)});
    }
  }
  for (uint32_t i = kept; i < slot_places(to); ++i) {
    moves.push_back({SlabId(), SlabRole::kSlot, RegionIndex(i)});
  }
  if (released.size() < moves.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the rotation takes ", moves.size() - released.size(), " more slabs than there are"));
  }
  for (size_t i = 0; i < moves.size(); ++i) moves[i].slab = released[i];
  for (size_t i = moves.size(); i < released.size(); ++i) {
    moves.push_back({released[i], SlabRole::kNone, RegionIndex()});
  }
  return moves;
}

std::vector<SlabMove> PlanDissolution(const SlabPlaces& places) {
  std::vector<SlabMove> moves;
  for (const std::optional<SlabId>& slab : places.slots) {
    if (slab.has_value()) moves.push_back({*slab, SlabRole::kNone, RegionIndex()});
  }
  return moves;
}

}  // namespace palimpsest
