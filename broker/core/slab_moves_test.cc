#include "broker/core/slab_moves.h"

#include <map>
#include <random>
#include <set>
#include <string>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

// An embedding, layers of `slabs` each, a head.
std::vector<ParameterStage> Model(int32_t layers, uint32_t slabs) {
  std::vector<ParameterStage> stages = {{0, 3}};
  for (int32_t i = 0; i < layers; ++i) {
    stages.push_back({stages.back().first_slab + stages.back().slab_count, slabs, true});
  }
  stages.push_back({stages.back().first_slab + slabs, 2});
  return stages;
}

struct Table {
  std::vector<ParameterStage> stages;
  std::vector<std::optional<SlabId>> parameters;
  std::vector<std::optional<SlabId>> slots;
  uint32_t next_slab = 0;

  explicit Table(const std::vector<ParameterStage>& model) : stages(model) {
    for (uint32_t i = 0; i < stages.back().first_slab + stages.back().slab_count; ++i) {
      parameters.push_back(SlabId(next_slab++));
    }
  }
  SlabPlaces places() const { return {stages, parameters, slots}; }

  void AddSpare(uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) slots.push_back(SlabId(next_slab++));
  }

  // What a worker does; the slabs given back.
  std::vector<SlabId> Apply(const std::vector<SlabMove>& moves) {
    std::vector<SlabId> back;
    std::set<SlabId> moved;
    for (const SlabMove& move : moves) EXPECT_TRUE(moved.insert(move.slab).second);
    for (auto* const own : {&parameters, &slots}) {
      for (auto& place : *own) {
        if (place.has_value() && moved.contains(*place)) place.reset();
      }
    }
    for (const SlabMove& move : moves) {
      if (move.role == SlabRole::kNone) {
        back.push_back(move.slab);
        continue;
      }
      auto& places = move.role == SlabRole::kSlot ? slots : parameters;
      if (move.place.value() >= places.size()) places.resize(move.place.value() + 1);
      EXPECT_FALSE(places[move.place.value()].has_value());
      places[move.place.value()] = move.slab;
    }
    while (!slots.empty() && !slots.back().has_value()) slots.pop_back();
    return back;
  }

  size_t held() const {
    size_t count = 0;
    for (const auto* own : {&parameters, &slots}) {
      for (const auto& place : *own) count += place.has_value() ? 1 : 0;
    }
    return count;
  }
};

// Every stage that does not rotate is complete, slots are, and nothing is spare.
void ExpectWhole(const Table& table, const Rotation& rotation, uint32_t slabs) {
  EXPECT_TRUE(CheckPlaces(table.places(), rotation).ok());
  EXPECT_EQ(table.slots.size(), slabs * static_cast<uint32_t>(rotation.slots));
  const std::set<int32_t> rotating(rotation.stages.begin(), rotation.stages.end());
  for (size_t stage = 0; stage < table.stages.size(); ++stage) {
    for (uint32_t i = 0; i < table.stages[stage].slab_count; ++i) {
      EXPECT_EQ(table.parameters[table.stages[stage].first_slab + i].has_value(),
                !rotating.contains(static_cast<int32_t>(stage)));
    }
  }
  std::set<SlabId> seen;
  for (const auto* own : {&table.parameters, &table.slots}) {
    for (const auto& place : *own) {
      EXPECT_TRUE(!place.has_value() || seen.insert(*place).second);
    }
  }
}

std::vector<Rotation> AllRotations(int32_t layers) {
  std::vector<Rotation> all = {Rotation()};
  for (int32_t slots = 1; slots <= kMaxSlots; ++slots) {
    for (int32_t freed = 1; freed + slots <= layers; ++freed) {
      all.push_back(EvenRotation(1, layers, freed, slots));
    }
  }
  return all;
}

TEST(PlanMoves, LeadsFromAnyRotationToAnyOther) {
  for (const int32_t layers : {2, 3, 5, 8, 13}) {
    for (const uint32_t slabs : {1u, 3u}) {
      Table table(Model(layers, slabs));
      const auto whole = static_cast<int64_t>(table.held());
      for (const Rotation& from : AllRotations(layers)) {
        for (const Rotation& to : AllRotations(layers)) {
          Table at = table;
          const auto there = PlanMoves(at.places(), Rotation(), from);
          ASSERT_TRUE(there.ok()) << there.status();
          EXPECT_EQ(at.Apply(*there).size(), static_cast<size_t>(from.freed()) * slabs);
          ExpectWhole(at, from, slabs);

          const int32_t fewer = std::max(from.freed() - to.freed(), 0);
          at.AddSpare(static_cast<uint32_t>(fewer) * slabs);
          const auto moves = PlanMoves(at.places(), from, to);
          ASSERT_TRUE(moves.ok()) << moves.status();
          const int32_t more = std::max(to.freed() - from.freed(), 0);
          EXPECT_EQ(at.Apply(*moves).size(), static_cast<size_t>(more) * slabs);
          ExpectWhole(at, to, slabs);
          EXPECT_EQ(static_cast<int64_t>(at.held()), whole - int64_t{to.freed()} * slabs);
        }
      }
    }
  }
}

TEST(PlanMoves, LeavesWhatNeedNotMove) {
  Table table(Model(8, 2));
  const Rotation rotation = EvenRotation(1, 8, 3, 1);
  table.Apply(*PlanMoves(table.places(), Rotation(), rotation));
  EXPECT_TRUE(PlanMoves(table.places(), rotation, rotation)->empty());
}

TEST(PlanMoves, GivesBackSpareSlabsThatAreNotNeeded) {
  Table table(Model(8, 2));
  const Rotation three = EvenRotation(1, 8, 3, 1);
  table.Apply(*PlanMoves(table.places(), Rotation(), three));
  table.AddSpare(3);
  const auto moves = PlanMoves(table.places(), three, EvenRotation(1, 8, 2, 1));
  ASSERT_TRUE(moves.ok());
  EXPECT_EQ(table.Apply(*moves).size(), 1u);
  ExpectWhole(table, EvenRotation(1, 8, 2, 1), 2);
}

TEST(PlanMoves, RefusesWhatCannotBe) {
  Table table(Model(8, 2));
  const Rotation three = EvenRotation(1, 8, 3, 1);
  // The places are not those of that rotation.
  EXPECT_FALSE(PlanMoves(table.places(), three, Rotation()).ok());
  // The embedding cannot rotate.
  EXPECT_FALSE(PlanMoves(table.places(), Rotation(), Rotation{{0, 2}, 1}).ok());
  table.Apply(*PlanMoves(table.places(), Rotation(), three));
  // Too few slabs.
  EXPECT_FALSE(PlanMoves(table.places(), three, Rotation()).ok());
  // A stage that is missing cannot begin to rotate.
  const Rotation four = EvenRotation(1, 8, 4, 1);
  for (const int32_t stage : four.stages) {
    if (!std::count(three.stages.begin(), three.stages.end(), stage)) {
      table.parameters[table.stages[stage].first_slab].reset();
    }
  }
  EXPECT_FALSE(PlanMoves(table.places(), three, four).ok());
}

TEST(PlanDissolution, GivesBackAllSlots) {
  Table table(Model(8, 2));
  table.Apply(*PlanMoves(table.places(), Rotation(), EvenRotation(1, 8, 3, 2)));
  table.AddSpare(1);
  EXPECT_EQ(table.Apply(PlanDissolution(table.places())).size(), 5u);
  EXPECT_TRUE(table.slots.empty());
  EXPECT_TRUE(CheckPlaces(table.places(), Rotation()).ok());
}

TEST(FindRotatableLayers, TakesTheLongestRunOfEqualLayers) {
  std::vector<ParameterStage> stages = Model(6, 2);
  RotatableLayers found = FindRotatableLayers(stages);
  EXPECT_EQ(found.first_stage, 1);
  EXPECT_EQ(found.layers, 6);
  EXPECT_EQ(found.slabs, 2u);
  stages[2].slab_count = 5;
  found = FindRotatableLayers(stages);
  EXPECT_EQ(found.first_stage, 3);
  EXPECT_EQ(found.layers, 4);
  for (ParameterStage& stage : stages) stage.may_rotate = false;
  EXPECT_EQ(FindRotatableLayers(stages).layers, 0);
  stages[3].may_rotate = true;
  EXPECT_EQ(FindRotatableLayers(stages).layers, 0);
}

}  // namespace
}  // namespace palimpsest
