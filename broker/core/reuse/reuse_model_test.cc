// The parts of the predictor, each against numbers worked out by hand or a plain reading of its
// formula.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "broker/core/reuse/age_bins.h"
#include "broker/core/reuse/calibration.h"
#include "broker/core/reuse/hazard_model.h"
#include "broker/core/reuse/reuse_class.h"
#include "broker/core/reuse/transition_pairs.h"
#include "broker/core/reuse/victim_queue.h"

namespace palimpsest::reuse {
namespace {

using cache::BlockType;
using cache::Ending;

TEST(ReuseClass, FeaturesGrowInSteps) {
  EXPECT_EQ(FromTailClass(0), 0);
  EXPECT_EQ(FromTailClass(1), 1);
  EXPECT_EQ(FromTailClass(2), 2);
  EXPECT_EQ(FromTailClass(5), 2);
  EXPECT_EQ(FromTailClass(6), 3);
  EXPECT_EQ(FromTailClass(1000), 3);
  EXPECT_EQ(UsesClass(1), 0);
  EXPECT_EQ(UsesClass(101), 8);
  EXPECT_EQ(GapClass(std::nullopt), 0);
  EXPECT_EQ(GapClass(absl::Seconds(-1)), 1);
  EXPECT_EQ(GapClass(absl::Seconds(2)), 2);
  EXPECT_EQ(GapClass(absl::Seconds(9)), 4);
  EXPECT_GT(GapClass(absl::InfiniteDuration()), 16);
  EXPECT_EQ(CountClass(0), 0);
  EXPECT_EQ(CountClass(8), 4);
  EXPECT_EQ(OutputClass(-1), 0);
  EXPECT_EQ(OutputClass(20), 2);
  EXPECT_EQ(ExpectedClass(absl::Seconds(1)), 2);
  EXPECT_NE(EndingClass(Ending::kToolCall, true), EndingClass(Ending::kToolCall, false));
  EXPECT_EQ(LeftBehindClass(1, 100), 0) << "all share a first block";
  EXPECT_EQ(LeftBehindClass(20, 100), 1);
  EXPECT_EQ(LeftBehindClass(60, 100), 3);
  EXPECT_EQ(LeftBehindClass(98, 100), 2);
}

TEST(ReuseClass, PacksEveryFeatureApart) {
  std::vector<uint64_t> packed;
  for (size_t i = 0; i < kFeatures; ++i) {
    ReuseClass reuse_class;
    reuse_class.Set(static_cast<Feature>(i), 1000);
    EXPECT_EQ(reuse_class[static_cast<Feature>(i)], kFeatureValues - 1);
    packed.push_back(reuse_class.Packed());
  }
  std::sort(packed.begin(), packed.end());
  EXPECT_EQ(std::unique(packed.begin(), packed.end()), packed.end());
}

TEST(AgeBins, GrowByTheCubeRootOfTwo) {
  EXPECT_DOUBLE_EQ(AgeBinEnd(0), 2);
  EXPECT_DOUBLE_EQ(AgeBinEnd(3), 4);
  EXPECT_DOUBLE_EQ(AgeBinEnd(36), 8192);
  for (size_t bin = 1; bin < kAgeBins; ++bin) {
    EXPECT_NEAR(AgeBinWidth(bin), AgeBinEnd(bin) - AgeBinEnd(bin - 1), 1e-3);
  }
}

// The formula of HitDensity as it stands.
double BestRate(const Hazards& hazards, size_t age) {
  double best = 0;
  for (size_t horizon = age; horizon < kAgeBins; ++horizon) {
    double survival = 1;
    double hits = 0;
    double seconds = 0;
    for (size_t bin = age; bin <= horizon; ++bin) {
      hits += survival * hazards[bin];
      seconds += survival * AgeBinWidth(bin) * (1 - hazards[bin] / 2);
      survival *= 1 - hazards[bin];
    }
    best = std::max(best, hits / seconds);
  }
  return best;
}

TEST(HitDensity, IsTheBestRateOverAllHorizons) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform;
  for (int round = 0; round < 300; ++round) {
    Hazards hazards;
    const int shape = round % 3;
    for (size_t bin = 0; bin < kAgeBins; ++bin) {
      const float draw = uniform(random);
      hazards[bin] = shape == 0 ? draw : shape == 1 ? draw * 0.01F : (draw > 0.9F ? 0.9F : 0);
    }
    const auto worth = HitDensity(hazards);
    for (size_t age = 0; age < kAgeBins; ++age) {
      const double best = BestRate(hazards, age);
      EXPECT_NEAR(worth[age], best, 1e-4 * best + 1e-12) << "age " << age;
    }
  }
}

TEST(HitDensity, WaitsForALikelyHitBehindAnUnlikelyTime) {
  Hazards hazards{};
  hazards[6] = 1;  // 6.35 to 8 s
  const auto worth = HitDensity(hazards);
  EXPECT_NEAR(worth[0], 1 / (6.3496 + (8 - 6.3496) / 2), 1e-4);
  EXPECT_GT(worth[5], worth[0]) << "closer";
  EXPECT_EQ(worth[7], 0) << "past";
}

TEST(Evidence, DecaysByCount) {
  Evidence evidence;
  evidence.Add(1, 4);
  evidence.Add(0.5F, 4);
  EXPECT_FLOAT_EQ(evidence.reused, 0.75F + 0.5F);
  EXPECT_FLOAT_EQ(evidence.survived, 0.5F);
  for (int i = 0; i < 1000; ++i) evidence.Add(0, 4);
  EXPECT_NEAR(evidence.survived, 4, 1e-3) << "a memory of four votes";
  EXPECT_NEAR(evidence.reused, 0, 1e-3);
}

TEST(TransitionPairs, APairLeansOnItsRowAndThenOnTheWhole) {
  TransitionPairs pairs;
  EXPECT_FLOAT_EQ(pairs.ReuseMean(BlockType::kSystemPrompt, Transition::kNextTurn), 0.5F);
  pairs.ObserveReuse(BlockType::kSystemPrompt, Transition::kNextTurn, 1);
  // K = 8: whole (1 + 4) / 9, row (1 + 8 whole) / 9, pair (1 + 8 row) / 9.
  const float whole = 5.0F / 9;
  const float row = (1 + 8 * whole) / 9;
  EXPECT_FLOAT_EQ(pairs.ReuseMean(BlockType::kSystemPrompt, Transition::kNextTurn),
                  (1 + 8 * row) / 9);
  EXPECT_FLOAT_EQ(pairs.ReuseMean(BlockType::kSystemPrompt, Transition::kBranch), row);
  EXPECT_FLOAT_EQ(pairs.ReuseMean(BlockType::kReasoning, Transition::kBranch), whole);
}

TEST(TransitionPairs, TransitionsAreCompetingRisks) {
  TransitionPairs pairs;
  for (int i = 0; i < 3000; ++i) {
    pairs.ObserveBin(Ending::kToolCall, 4,
                     i % 2 == 0 ? std::optional(Transition::kToolReturn) : std::nullopt);
    pairs.ObserveBin(Ending::kEndOfTurn, 4,
                     i % 10 == 0 ? std::optional(Transition::kNextTurn) : std::nullopt);
    pairs.ObserveReuse(BlockType::kToolContext, Transition::kToolReturn, 1);
    pairs.ObserveReuse(BlockType::kToolContext, Transition::kNextTurn, 0.25F);
    pairs.ObserveReuse(BlockType::kReasoning, Transition::kNextTurn, 0);
  }
  EXPECT_NEAR(pairs.TransitionHazard(Ending::kToolCall, Transition::kToolReturn, 4), 0.5, 0.01);
  EXPECT_NEAR(pairs.TransitionHazard(Ending::kEndOfTurn, Transition::kNextTurn, 4), 0.1, 0.01);
  EXPECT_NEAR(pairs.TransitionHazard(Ending::kEndOfTurn, Transition::kNextTurn, 5), 0.01, 1e-3)
      << "no evidence in this bin";
  EXPECT_NEAR(pairs.HazardsOf(BlockType::kToolContext, Ending::kToolCall)[4], 0.5, 0.02);
  EXPECT_NEAR(pairs.HazardsOf(BlockType::kToolContext, Ending::kEndOfTurn)[4], 0.025, 0.01);
  EXPECT_LT(pairs.HazardsOf(BlockType::kReasoning, Ending::kEndOfTurn)[4], 0.01);
}

ReuseClass ClassWith(Feature feature, uint64_t value) {
  ReuseClass reuse_class;
  reuse_class.Set(feature, value);
  return reuse_class;
}

TEST(HazardModel, OneVoteMovesBothEstimatesByTheirFormulas) {
  HazardModel model({.pairs = false, .features = true});
  const ClassId id = model.Acquire({});
  EXPECT_NEAR(model.HazardsOf(id)[3], 0.03, 1e-6);
  EXPECT_NEAR(model.Observe(id, 3, 1), 0.03, 1e-6) << "what was predicted before the vote";
  // The table: twelve levels, each (1 + 30 p) / 31. The logistic model: a bias and two weights a
  // feature, each a step of 0.1 x 0.97 / sqrt(1 + 0.97^2).
  double table = 0.03;
  for (int level = 0; level < 12; ++level) table = (1 + 30 * table) / 31;
  const double step = 0.1 * 0.97 / std::sqrt(1 + 0.97 * 0.97);
  const double logit = std::log(0.03 / 0.97) + 25 * step;
  EXPECT_NEAR(model.HazardsOf(id)[3], std::sqrt(table / (1 + std::exp(-logit))), 1e-5);
}

TEST(HazardModel, LearnsWhatTellsClassesApart) {
  HazardModel model({});
  const ClassId often = model.Acquire(ClassWith(Feature::kEnding, 2));
  const ClassId seldom = model.Acquire(ClassWith(Feature::kEnding, 1));
  const ClassId unseen = model.Acquire(ClassWith(Feature::kTurns, 5));
  std::mt19937 random(2);
  for (int i = 0; i < 20000; ++i) {
    model.Observe(often, 5, random() % 10 < 4 ? 1 : 0);
    model.Observe(seldom, 5, random() % 100 < 2 ? 1 : 0);
  }
  EXPECT_NEAR(model.HazardsOf(often)[5], 0.4, 0.05);
  EXPECT_NEAR(model.HazardsOf(seldom)[5], 0.02, 0.01);
  EXPECT_GT(model.HazardsOf(unseen)[5], model.HazardsOf(seldom)[5]) << "leans on all";
  EXPECT_LT(model.HazardsOf(often)[6], 0.2) << "another bin";
}

TEST(HazardModel, ClassesLiveWhileReferredToAndNodesAreBounded) {
  HazardModel model({});
  const ClassId first = model.Acquire(ClassWith(Feature::kGap, 1));
  EXPECT_EQ(model.Acquire(ClassWith(Feature::kGap, 1)), first);
  const uint64_t serial = model.SerialOf(first);
  model.Release(first);
  EXPECT_EQ(model.classes(), 1);
  model.Release(first);
  EXPECT_EQ(model.classes(), 0);
  EXPECT_EQ(model.Acquire(ClassWith(Feature::kGap, 2)), first) << "recycled";
  EXPECT_NE(model.SerialOf(first), serial);
  std::mt19937 random(3);
  for (int i = 0; i < 20000; ++i) {
    ReuseClass reuse_class;
    for (size_t f = 0; f + 1 < kFeatures; ++f) {
      reuse_class.Set(static_cast<Feature>(f), random() % kFeatureValues);
    }
    const ClassId id = model.Acquire(reuse_class);
    model.Observe(id, 1, 0.5F);
    model.Release(id);
  }
  EXPECT_EQ(model.nodes(), HazardModel::kMostNodes);
  EXPECT_EQ(model.classes(), 1);
}

TEST(HazardModel, PairsAloneTellTypesAndEndingsApartOnly) {
  HazardModel model({.pairs = true, .features = false});
  ReuseClass a = ClassWith(Feature::kType, static_cast<uint64_t>(BlockType::kReasoning));
  ReuseClass b = a;
  b.Set(Feature::kGap, 3);
  EXPECT_EQ(model.Acquire(a), model.Acquire(b));
  b.Set(Feature::kEnding, EndingClass(Ending::kToolCall, false));
  EXPECT_NE(model.Acquire(a), model.Acquire(b));
}

TEST(Calibration, ScoresByHand) {
  Calibration calibration;
  EXPECT_EQ(calibration.Brier(), 0);
  calibration.Add(0.5, 1);
  calibration.Add(0.5, 0);
  calibration.Add(0.1, 0);
  calibration.Add(0, 0);
  EXPECT_DOUBLE_EQ(calibration.Brier(), (0.25 + 0.25 + 0.01) / 4);
  EXPECT_DOUBLE_EQ(calibration.BrierOfMean(), 1.0 / 4 - 1.0 / 16);
  EXPECT_EQ(calibration.bins()[0], (Calibration::Bin{.votes = 1}));
  EXPECT_EQ(calibration.bins()[5], (Calibration::Bin{.votes = 1, .predicted = 0.1}));
  EXPECT_EQ(calibration.bins()[9], (Calibration::Bin{.votes = 2, .predicted = 1, .happened = 1}));
}

// Random changes; the least worth of all is on top after each.
TEST(VictimQueueProperty, TopIsTheLeastOfAll) {
  struct Item {
    ClassId id;
    size_t bin = 0;
    int turn = 0;
  };
  std::mt19937 random(4);
  VictimQueue queue;
  std::vector<VictimQueue::Worths> worths(6);
  const auto set_worth = [&](size_t i) {
    for (float& worth : worths[i]) worth = static_cast<float>(random() % 50);
    queue.SetWorth(ClassId(static_cast<uint32_t>(i)), worths[i]);
  };
  for (size_t i = 0; i < worths.size(); ++i) set_worth(i);
  std::map<SegmentId, Item> items;
  for (int turn = 0; turn < 20000; ++turn) {
    const SegmentId segment(static_cast<uint32_t>(random() % 40));
    if (random() % 20 == 0) {
      set_worth(random() % worths.size());
    } else if (items.erase(segment) > 0) {
      queue.Remove(segment);
    } else {
      const ClassId id(static_cast<uint32_t>(random() % worths.size()));
      const size_t bin = random() % 8;
      queue.Insert(segment, id, bin);
      items[segment] = {id, bin, turn};
    }
    ASSERT_EQ(queue.empty(), items.empty());
    if (items.empty()) continue;
    const auto worth = [&worths](const Item& item) { return worths[item.id.value()][item.bin]; };
    const Item& top = items.at(queue.Top());
    EXPECT_EQ(queue.TopWorth(), worth(top));
    std::vector<bool> live(worths.size());
    for (const auto& [other, item] : items) {
      ASSERT_GE(worth(item), worth(top));
      if (item.id == top.id && item.bin == top.bin) {
        EXPECT_GE(item.turn, top.turn) << "first in";
      }
      live[item.id.value()] = true;
    }
    EXPECT_EQ(queue.live().size(), std::count(live.begin(), live.end(), true));
  }
}

}  // namespace
}  // namespace palimpsest::reuse
