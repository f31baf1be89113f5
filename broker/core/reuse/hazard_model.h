// P(a block is reused before its age bin ends | idle until it began), learned online for each
// class of blocks from votes.
//
// The estimate is the geometric mean of two:
//
// - A table: nodes keyed by ever longer prefixes of the features in kTableOrder hold votes for each
//   age bin. Each leans on the one before it like a Beta posterior with a prior of kShrinkage
//   votes, p_l = (reused_l + K p_{l-1}) / (votes_l + K); the first on what the 16 pairs say
//   (TransitionPairs), or on kPriorHazard without them. Evidence decays by count.
// - A logistic model, additive in the features: logit = w[bin] + sum_f (u[f][value] +
//   v[f][value][bin]), trained by stochastic gradient descent with a step for each weight (Duchi,
//   Hazan and Singer, "Adaptive subgradient methods", JMLR 2011).
//
// The table learns what features mean together once it has seen enough of it, the other what each
// means alone, soon.
//
// Memory: classes live while referred to; at most kMostNodes nodes, beyond which new classes make
// do with the shorter prefixes that exist.
//
// Complexity: O(features) a vote, O(features x age bins) for all hazards of a class. Threads: none.
#ifndef PALIMPSEST_BROKER_CORE_REUSE_HAZARD_MODEL_H_
#define PALIMPSEST_BROKER_CORE_REUSE_HAZARD_MODEL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "broker/core/reuse/age_bins.h"
#include "broker/core/reuse/reuse_class.h"
#include "broker/core/reuse/transition_pairs.h"
#include "common/strong_int.h"

namespace palimpsest::reuse {

// Dense; recycled once nothing refers to the class.
using ClassId = StrongInt<struct ReuseClassIdTag, uint32_t>;

// Which parts predict; what the others would add is in docs/benchmarks.md.
struct HazardModelOptions {
  bool pairs = true;
  bool features = true;
};

class HazardModel {
 public:
  static constexpr float kShrinkage = 30;
  static constexpr float kMemory = 1 << 16;
  static constexpr float kPriorHazard = 0.03F;
  static constexpr float kStep = 0.1F;
  static constexpr uint64_t kRootVotes = 256;
  static constexpr size_t kMostNodes = size_t{1} << 16;
  static constexpr std::array<Feature, 11> kTableOrder = {
      Feature::kLeftBehind, Feature::kExpected, Feature::kFromTail, Feature::kUses,
      Feature::kOrigin,     Feature::kEnding,   Feature::kOutput,   Feature::kLength,
      Feature::kGap,        Feature::kTurns,    Feature::kType};

  explicit HazardModel(const HazardModelOptions& options);

  // Adds a reference to the class. Features that no part looks at are dropped.
  ClassId Acquire(ReuseClass reuse_class);
  void Retain(ClassId id) { ++classes_[id.value()].references; }
  void Release(ClassId id);
  const ReuseClass& ClassOf(ClassId id) const { return classes_[id.value()].features; }
  // Differs for each class that ever was, also where they had the same id.
  uint64_t SerialOf(ClassId id) const { return classes_[id.value()].serial; }
  // Referred to.
  size_t classes() const { return by_features_.size(); }
  size_t nodes() const { return nodes_.size(); }

  // One vote, of which `share` was reused before `bin` closed. Returns what had been predicted.
  float Observe(ClassId id, size_t bin, float share);
  Hazards HazardsOf(ClassId id) const;

  TransitionPairs& pairs() { return pairs_; }
  const TransitionPairs& pairs() const { return pairs_; }

 private:
  static constexpr size_t kLevels = kTableOrder.size() + 1;

  struct Class {
    ReuseClass features;
    uint64_t serial = 0;
    uint32_t references = 0;
    uint32_t levels = 0;
    std::array<uint32_t, kLevels> nodes{};
  };
  using PerBin = std::array<float, kAgeBins>;
  using Node = std::array<Evidence, kAgeBins>;
  struct Weights {
    PerBin values{}, squares{};  // squares: sums of squared gradients
  };

  void FindNodes(Class& entry);
  void RefreshRoots();
  const Hazards& RootOf(const Class& entry) const;
  float Logit(const Class& entry, size_t bin) const;
  void Learn(const Class& entry, size_t bin, float gradient);

  const HazardModelOptions options_;
  TransitionPairs pairs_;
  // What the table leans on, as of kRootVotes votes ago at most.
  std::array<std::array<Hazards, kEndings>, kBlockTypes> roots_;
  uint64_t votes_ = 0;
  std::vector<Class> classes_;
  std::vector<ClassId> free_;
  uint64_t serials_ = 0;
  absl::flat_hash_map<uint64_t, ClassId> by_features_;
  std::vector<Node> nodes_;
  absl::flat_hash_map<uint64_t, uint32_t> by_prefix_;
  Weights bias_{};
  struct Weight {
    float value = 0, squares = 0;
  };
  std::array<std::array<Weight, kFeatureValues>, kFeatures> value_weights_{};
  std::vector<Weights> bin_weights_;  // by feature * kFeatureValues + value
};

}  // namespace palimpsest::reuse

#endif  // PALIMPSEST_BROKER_CORE_REUSE_HAZARD_MODEL_H_
