#include "worker/memory/rotation_plan.h"

#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

using Stages = absl::Span<const ParameterSlabs::StageSpan>;
using Held = SlabRegion::Held;

absl::Status Refused(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("a rotation that makes no sense: ", why));
}

// Slabs of each rotating stage; 0 if there is none.
absl::StatusOr<uint32_t> SlabsOfStage(const Rotation& rotation, Stages stages) {
  absl::Status status = ValidateRotation(rotation, static_cast<int32_t>(stages.size()));
  if (!status.ok()) return status;
  uint32_t slabs = 0;
  for (const int32_t stage : rotation.stages) {
    const uint32_t count = stages[static_cast<size_t>(stage)].count;
    if (slabs != 0 && count != slabs) return Refused("its stages have unequal sizes");
    slabs = count;
  }
  return slabs;
}

absl::Status CarryOut(absl::Span<const RotationMove> moves, uint32_t places,
                      ParameterTable& table) {
  absl::flat_hash_map<SlabId, std::map<RegionIndex, Held>::node_type> moved;
  absl::flat_hash_map<SlabId, std::pair<std::map<RegionIndex, Held>*, RegionIndex>> where;
  for (auto* slabs : {&table.own, &table.slots}) {
    for (const auto& [index, held] : *slabs) where[held.slab] = {slabs, index};
  }
  for (const RotationMove& move : moves) {
    const auto found = where.find(move.slab);
    if (found == where.end()) {
      return Refused(absl::StrCat("slab ", move.slab.ToString(),
                                  " is moved twice, or is no parameter's or slot's here"));
    }
    moved[move.slab] = found->second.first->extract(found->second.second);
    where.erase(found);
  }
  for (const RotationMove& move : moves) {
    if (move.to == RotationMove::To::kBroker) continue;
    auto& node = moved[move.slab];
    node.key() = node.mapped().index = move.index;
    auto& to = move.to == RotationMove::To::kParameter ? table.own : table.slots;
    if (move.index.value() >= places || !to.insert(std::move(node)).inserted) {
      return Refused(absl::StrCat("slab ", move.slab.ToString(), " is moved to place ",
                                  move.index.ToString(), ", which is outside or taken"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSlots(const ParameterTable& table, Stages stages, uint32_t slabs) {
  for (const int32_t stage : table.rotation.stages) {
    const ParameterSlabs::StageSpan& span = stages[static_cast<size_t>(stage)];
    const auto first = table.own.lower_bound(RegionIndex(span.first));
    if (first != table.own.end() && first->first.value() < span.first + span.count) {
      return Refused(absl::StrCat("stage ", stage, " rotates and has a slab of its own"));
    }
  }
  for (uint32_t i = 0; i < slabs * static_cast<uint32_t>(table.rotation.slots); ++i) {
    if (!table.slots.contains(RegionIndex(i))) {
      return Refused(absl::StrCat("slab ", i, " of its slots is missing"));
    }
  }
  return absl::OkStatus();
}

// What is mapped where.
struct Mapped {
  const Held* slab = nullptr;
  bool alias = false;
};
std::map<RegionIndex, Mapped> View(const ParameterTable& table, Stages stages) {
  std::map<RegionIndex, Mapped> view;
  for (const auto& [index, held] : table.own) view[index] = {&held, false};
  for (size_t i = 0; i < table.rotation.stages.size(); ++i) {
    const auto& span = stages[static_cast<size_t>(table.rotation.stages[i])];
    const uint32_t slot = static_cast<uint32_t>(table.rotation.SlotOf(i)) * span.count;
    for (uint32_t k = 0; k < span.count; ++k) {
      view[RegionIndex(span.first + k)] = {&table.slots.at(RegionIndex(slot + k)), true};
    }
  }
  return view;
}

}  // namespace

absl::StatusOr<RotationPlan> PlanRotation(const ParameterTable& before, Stages stages,
                                          const Rotation& rotation,
                                          absl::Span<const RotationMove> moves) {
  const absl::StatusOr<uint32_t> slabs = SlabsOfStage(rotation, stages);
  if (!slabs.ok()) return slabs.status();
  RotationPlan plan;
  plan.after = before;
  plan.after.rotation = rotation;
  const uint32_t places = stages.back().first + stages.back().count;
  absl::Status status = CarryOut(moves, places, plan.after);
  if (status.ok()) status = CheckSlots(plan.after, stages, *slabs);
  if (!status.ok()) return status;

  const std::map<RegionIndex, Mapped> from = View(before, stages), to = View(plan.after, stages);
  const auto same = [](const std::map<RegionIndex, Mapped>& view, RegionIndex index,
                       const Mapped& mapped) {
    const auto found = view.find(index);
    return found != view.end() && found->second.slab->slab == mapped.slab->slab &&
           found->second.alias == mapped.alias;
  };
  for (const auto& [index, mapped] : from) {
    if (!same(to, index, mapped)) plan.vacated.push_back(index);
  }
  for (const auto& [index, mapped] : to) {
    if (same(from, index, mapped)) continue;
    Held held = *mapped.slab;
    held.index = index;
    (mapped.alias ? plan.aliases : plan.own).push_back(std::move(held));
  }
  return plan;
}

}  // namespace palimpsest
