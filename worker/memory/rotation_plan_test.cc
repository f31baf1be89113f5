#include "worker/memory/rotation_plan.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;
using Stages = std::vector<ParameterSlabs::StageSpan>;
using To = RotationMove::To;

Stages StagesOf(const std::vector<uint32_t>& counts) {
  Stages stages;
  uint32_t first = 0;
  for (const uint32_t count : counts) {
    stages.push_back({first, count});
    first += count;
  }
  return stages;
}

SlabRegion::Held Held(uint32_t slab, uint32_t place) {
  return {SlabId(slab), Epoch(slab + 1), RegionIndex(place), nullptr, 0};
}

// Every place has a slab of its own, with the place's number.
ParameterTable Whole(const Stages& stages) {
  ParameterTable table;
  for (uint32_t i = 0; i < stages.back().first + stages.back().count; ++i) {
    table.own.emplace(RegionIndex(i), Held(i, i));
  }
  return table;
}

RotationMove Move(uint32_t slab, To to, uint32_t place = 0) {
  return {SlabId(slab), to, RegionIndex(place)};
}

std::vector<uint32_t> Numbers(const std::vector<RegionIndex>& indexes) {
  std::vector<uint32_t> numbers;
  for (const RegionIndex index : indexes) numbers.push_back(index.value());
  return numbers;
}

std::vector<std::string> Text(const std::vector<SlabRegion::Held>& slabs) {
  std::vector<std::string> text;
  for (const auto& slab : slabs) text.push_back(slab.index.ToString() + "=" + slab.slab.ToString());
  return text;
}

TEST(PlanRotation, LayersLoseTheirSlabsToASlotAndGetThemBack) {
  const Stages stages = StagesOf({1, 2, 2, 2, 1});
  // Layers 1 and 3 rotate in the slabs that 1 had; those of 3 are given back.
  const auto on = PlanRotation(
      Whole(stages), stages, {{1, 3}, 1},
      {{Move(1, To::kSlot, 0), Move(2, To::kSlot, 1), Move(5, To::kBroker), Move(6, To::kBroker)}});
  ASSERT_TRUE(on.ok()) << on.status();
  EXPECT_THAT(Numbers(on->vacated), ::testing::ElementsAre(1, 2, 5, 6));
  EXPECT_TRUE(on->own.empty());
  EXPECT_THAT(Text(on->aliases), ::testing::ElementsAre("1=1", "2=2", "5=1", "6=2"));
  EXPECT_EQ(on->after.own.size(), 4);
  EXPECT_EQ(on->after.slots.size(), 2);

  ParameterTable granted = on->after;
  for (const uint32_t spare : {2, 3}) {
    granted.slots.emplace(RegionIndex(spare), Held(10 + spare, spare));
  }
  const auto off = PlanRotation(granted, stages, {},
                                {{Move(1, To::kParameter, 1), Move(2, To::kParameter, 2),
                                  Move(12, To::kParameter, 5), Move(13, To::kParameter, 6)}});
  ASSERT_TRUE(off.ok()) << off.status();
  EXPECT_THAT(Text(off->own), ::testing::ElementsAre("1=1", "2=2", "5=12", "6=13"));
  EXPECT_TRUE(off->aliases.empty());
  EXPECT_TRUE(off->after.slots.empty());
  EXPECT_EQ(off->after.own.at(RegionIndex(5)).epoch, Epoch(13));
}

TEST(PlanRotation, LayersWithoutAnyMemoryAreMissing) {
  const Stages stages = StagesOf({1, 1, 1, 1});
  auto plan = PlanRotation(Whole(stages), stages, {{1, 2}, 1},
                           {{Move(1, To::kSlot, 0), Move(2, To::kBroker)}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  plan = PlanRotation(plan->after, stages, {}, {{Move(1, To::kBroker)}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(Numbers(plan->vacated), ::testing::ElementsAre(1, 2));
  EXPECT_TRUE(plan->own.empty() && plan->aliases.empty() && plan->after.slots.empty());
}

TEST(PlanRotation, NonsenseIsRefused) {
  const Stages stages = StagesOf({1, 1, 1, 2});
  const ParameterTable whole = Whole(stages);
  const auto refused = [&](const Rotation& rotation, const std::vector<RotationMove>& moves) {
    const auto plan = PlanRotation(whole, stages, rotation, moves);
    EXPECT_TRUE(absl::IsInvalidArgument(plan.status()));
    return std::string(plan.status().message());
  };
  const Rotation two = {{1, 2}, 1};
  EXPECT_THAT(refused({{1, 9}, 1}, {}), HasSubstr("a rotation names"));
  EXPECT_THAT(refused({{1, 3}, 1}, {}), HasSubstr("unequal"));
  EXPECT_THAT(refused(two, {}), HasSubstr("slab of its own"));
  EXPECT_THAT(refused(two, {Move(1, To::kBroker), Move(2, To::kBroker)}), HasSubstr("missing"));
  EXPECT_THAT(refused(two, {Move(1, To::kSlot, 1), Move(2, To::kBroker)}), HasSubstr("missing"));
  EXPECT_THAT(refused(two, {Move(77, To::kSlot, 0)}), HasSubstr("is no parameter's"));
  EXPECT_THAT(refused(two, {Move(1, To::kSlot, 0), Move(1, To::kBroker)}), HasSubstr("twice"));
  EXPECT_THAT(refused(two, {Move(1, To::kSlot, 0), Move(2, To::kSlot, 0)}), HasSubstr("taken"));
  EXPECT_THAT(refused(two, {Move(1, To::kSlot, 5), Move(2, To::kBroker)}), HasSubstr("outside"));
  EXPECT_THAT(refused({}, {Move(1, To::kParameter, 2)}), HasSubstr("taken"));
  EXPECT_THAT(refused({}, {Move(1, To::kParameter, 5)}), HasSubstr("outside"));
}

// Random tables, rotations and moves: what is accepted is consistent, and carrying the plan out on
// a map of the region gives what the table says.
TEST(PlanRotationFuzz, WhatIsAcceptedLeavesEverySlabAtOnePlaceAndEveryViewRight) {
  std::mt19937 random(3);
  int accepted = 0;
  for (int round = 0; round < 3000; ++round) {
    const uint32_t size = 1 + random() % 2;
    const int32_t layers = 3 + static_cast<int32_t>(random() % 4);
    std::vector<uint32_t> counts(static_cast<size_t>(layers), size);
    counts.front() = 1;
    const Stages stages = StagesOf(counts);
    ParameterTable table = Whole(stages);
    std::map<uint32_t, std::string> view;  // place to slab, with a mark for an alias
    for (const auto& [index, held] : table.own) view[index.value()] = held.slab.ToString();
    for (int change = 0; change < 4; ++change) {
      const int32_t slots = 1 + static_cast<int32_t>(random() % 2);
      const int32_t freed = static_cast<int32_t>(random()) % (layers - slots);
      const Rotation rotation = EvenRotation(1, layers - 1, std::max(0, freed), slots);
      std::set<uint32_t> rotating;
      for (const int32_t stage : rotation.stages) {
        const auto& span = stages[static_cast<size_t>(stage)];
        for (uint32_t k = 0; k < span.count; ++k) rotating.insert(span.first + k);
      }
      // Everything held is dealt out anew; now and then wrongly.
      std::vector<SlabId> slabs;
      for (const auto* held : {&table.own, &table.slots}) {
        for (const auto& [index, slab] : *held) slabs.push_back(slab.slab);
      }
      std::shuffle(slabs.begin(), slabs.end(), random);
      std::vector<RotationMove> moves;
      const auto deal = [&](To to, uint32_t place) {
        if (slabs.empty() || random() % 256 == 0) return;
        moves.push_back({slabs.back(), to, RegionIndex(place)});
        slabs.pop_back();
      };
      for (uint32_t i = 0; i < size * static_cast<uint32_t>(rotation.slots); ++i) {
        deal(To::kSlot, i);
      }
      for (uint32_t i = 0; i < stages.back().first + stages.back().count; ++i) {
        if (!rotating.contains(i)) deal(To::kParameter, i);
      }
      for (const SlabId slab : slabs) moves.push_back({slab, To::kBroker, RegionIndex(0)});
      std::shuffle(moves.begin(), moves.end(), random);
      const auto plan = PlanRotation(table, stages, rotation, moves);
      if (!plan.ok()) continue;
      ++accepted;
      for (const RegionIndex place : plan->vacated) ASSERT_EQ(view.erase(place.value()), 1);
      for (const auto& slab : plan->own) {
        ASSERT_TRUE(view.emplace(slab.index.value(), slab.slab.ToString()).second);
      }
      for (const auto& slab : plan->aliases) {
        ASSERT_TRUE(view.emplace(slab.index.value(), "~" + slab.slab.ToString()).second);
      }
      table = plan->after;
      std::map<uint32_t, std::string> expected;
      for (const auto& [index, held] : table.own) {
        ASSERT_EQ(held.index, index);
        ASSERT_EQ(held.epoch, Epoch(held.slab.value() + 1));
        expected[index.value()] = held.slab.ToString();
      }
      for (size_t i = 0; i < rotation.stages.size(); ++i) {
        const auto& span = stages[static_cast<size_t>(rotation.stages[i])];
        for (uint32_t k = 0; k < size; ++k) {
          const uint32_t place = static_cast<uint32_t>(rotation.SlotOf(i)) * size + k;
          ASSERT_FALSE(expected.contains(span.first + k));
          expected[span.first + k] = "~" + table.slots.at(RegionIndex(place)).slab.ToString();
        }
      }
      ASSERT_EQ(view, expected);
    }
  }
  EXPECT_GT(accepted, 5000);
}

}  // namespace
}  // namespace palimpsest
