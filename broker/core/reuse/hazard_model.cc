#include "broker/core/reuse/hazard_model.h"

#include <cassert>
#include <cmath>

namespace palimpsest::reuse {
namespace {

// Of a value of Feature::kEnding.
size_t EndingOf(uint8_t value) { return value & 3U; }

float Sigmoid(float logit) { return 1 / (1 + std::exp(-logit)); }

void Descend(float& weight, float& squares, float gradient) {
  squares += gradient * gradient;
  weight -= HazardModel::kStep * gradient / std::sqrt(1 + squares);
}

}  // namespace

HazardModel::HazardModel(const HazardModelOptions& options)
    : options_(options), bin_weights_(kFeatures * kFeatureValues) {
  assert(options.pairs || options.features);
  bias_.values.fill(std::log(kPriorHazard / (1 - kPriorHazard)));
  RefreshRoots();
}

ClassId HazardModel::Acquire(ReuseClass reuse_class) {
  if (!options_.features) {
    ReuseClass kept;
    kept.Set(Feature::kType, reuse_class[Feature::kType]);
    kept.Set(Feature::kEnding, reuse_class[Feature::kEnding]);
    reuse_class = kept;
  }
  const auto [found, inserted] = by_features_.try_emplace(reuse_class.Packed());
  if (inserted) {
    if (free_.empty()) {
      free_.push_back(ClassId(static_cast<uint32_t>(classes_.size())));
      classes_.emplace_back();
    }
    found->second = free_.back();
    free_.pop_back();
    Class& entry = classes_[found->second.value()];
    entry = {.features = reuse_class, .serial = ++serials_};
    if (options_.features) FindNodes(entry);
  }
  ++classes_[found->second.value()].references;
  return found->second;
}

void HazardModel::Release(ClassId id) {
  Class& entry = classes_[id.value()];
  assert(entry.references > 0);
  if (--entry.references > 0) return;
  by_features_.erase(entry.features.Packed());
  free_.push_back(id);
}

void HazardModel::FindNodes(Class& entry) {
  ReuseClass prefix;
  for (size_t level = 0; level < kLevels; ++level) {
    if (level > 0) {
      const Feature feature = kTableOrder[level - 1];
      prefix.Set(feature, entry.features[feature]);
    }
    // The level tells prefixes apart whose last values are 0.
    const uint64_t key = prefix.Packed() << 4 | level;
    static_assert(kFeatures * 4 + 4 <= 64 && kLevels <= 16);
    auto found = by_prefix_.find(key);
    if (found == by_prefix_.end()) {
      if (nodes_.size() >= kMostNodes) return;
      found = by_prefix_.emplace(key, static_cast<uint32_t>(nodes_.size())).first;
      nodes_.emplace_back();
    }
    entry.nodes[entry.levels++] = found->second;
  }
}

void HazardModel::RefreshRoots() {
  for (size_t type = 0; type < kBlockTypes; ++type) {
    for (size_t ending = 0; ending < kEndings; ++ending) {
      Hazards& root = roots_[type][ending];
      if (options_.pairs) {
        root = pairs_.HazardsOf(static_cast<cache::BlockType>(type),
                                static_cast<cache::Ending>(ending));
      } else {
        root.fill(kPriorHazard);
      }
    }
  }
}

const Hazards& HazardModel::RootOf(const Class& entry) const {
  return roots_[entry.features[Feature::kType]][EndingOf(entry.features[Feature::kEnding])];
}

float HazardModel::Observe(ClassId id, size_t bin, float share) {
  assert(bin < kAgeBins && share >= 0 && share <= 1);
  const Class& entry = classes_[id.value()];
  if (++votes_ % kRootVotes == 0) RefreshRoots();
  float table = RootOf(entry)[bin];
  if (!options_.features) return table;
  for (size_t level = 0; level < entry.levels; ++level) {
    Evidence& evidence = nodes_[entry.nodes[level]][bin];
    table = evidence.Mean(table, kShrinkage);
    evidence.Add(share, kMemory);
  }
  const float predicted = Sigmoid(Logit(entry, bin));
  Learn(entry, bin, predicted - share);
  return std::sqrt(table * predicted);
}

void HazardModel::Learn(const Class& entry, size_t bin, float gradient) {
  Descend(bias_.values[bin], bias_.squares[bin], gradient);
  for (size_t i = 0; i < kFeatures; ++i) {
    const size_t value = entry.features[static_cast<Feature>(i)];
    Weight& weight = value_weights_[i][value];
    Descend(weight.value, weight.squares, gradient);
    Weights& weights = bin_weights_[i * kFeatureValues + value];
    Descend(weights.values[bin], weights.squares[bin], gradient);
  }
}

Hazards HazardModel::HazardsOf(ClassId id) const {
  const Class& entry = classes_[id.value()];
  Hazards hazards = RootOf(entry);
  if (!options_.features) return hazards;
  for (size_t level = 0; level < entry.levels; ++level) {
    const Node& node = nodes_[entry.nodes[level]];
    for (size_t bin = 0; bin < kAgeBins; ++bin) {
      hazards[bin] = node[bin].Mean(hazards[bin], kShrinkage);
    }
  }
  PerBin logits = bias_.values;
  for (size_t i = 0; i < kFeatures; ++i) {
    const size_t value = entry.features[static_cast<Feature>(i)];
    const float all_bins = value_weights_[i][value].value;
    const PerBin& values = bin_weights_[i * kFeatureValues + value].values;
    for (size_t bin = 0; bin < kAgeBins; ++bin) logits[bin] += all_bins + values[bin];
  }
  for (size_t bin = 0; bin < kAgeBins; ++bin) {
    hazards[bin] = std::sqrt(hazards[bin] * Sigmoid(logits[bin]));
  }
  return hazards;
}

float HazardModel::Logit(const Class& entry, size_t bin) const {
  float logit = bias_.values[bin];
  for (size_t i = 0; i < kFeatures; ++i) {
    const size_t value = entry.features[static_cast<Feature>(i)];
    logit += value_weights_[i][value].value + bin_weights_[i * kFeatureValues + value].values[bin];
  }
  return logit;
}

}  // namespace palimpsest::reuse
