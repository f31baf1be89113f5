#include "broker/core/reuse/transition_pairs.h"

#include <cassert>

namespace palimpsest::reuse {
namespace {

size_t Index(cache::BlockType type) {
  const auto index = static_cast<size_t>(type);
  assert(index < kBlockTypes);
  return index;
}

size_t Index(cache::Ending ending) {
  const auto index = static_cast<size_t>(ending);
  assert(index < kEndings);
  return index;
}

}  // namespace

void TransitionPairs::ObserveReuse(cache::BlockType type, Transition transition, float share) {
  assert(share >= 0 && share <= 1);
  pairs_[Index(type)][static_cast<size_t>(transition)].Add(share, kMemory);
  rows_[Index(type)].Add(share, kMemory);
  whole_.Add(share, kMemory);
}

void TransitionPairs::ObserveBin(cache::Ending ending, size_t bin,
                                 std::optional<Transition> transition) {
  assert(bin < kAgeBins);
  for (size_t i = 0; i < kTransitions; ++i) {
    const bool came = transition.has_value() && static_cast<size_t>(*transition) == i;
    risks_[Index(ending)][i][bin].Add(came ? 1 : 0, kMemory);
    any_ending_[i][bin].Add(came ? 1 : 0, kMemory);
  }
}

float TransitionPairs::ReuseMean(cache::BlockType type, Transition transition) const {
  const float whole = whole_.Mean(0.5F, kShrinkage);
  const float row = rows_[Index(type)].Mean(whole, kShrinkage);
  return pairs_[Index(type)][static_cast<size_t>(transition)].Mean(row, kShrinkage);
}

float TransitionPairs::TransitionHazard(cache::Ending ending, Transition transition,
                                        size_t bin) const {
  assert(bin < kAgeBins);
  const auto index = static_cast<size_t>(transition);
  const float any = any_ending_[index][bin].Mean(kPriorHazard, kShrinkage);
  return risks_[Index(ending)][index][bin].Mean(any, kShrinkage);
}

Hazards TransitionPairs::HazardsOf(cache::BlockType type, cache::Ending ending) const {
  std::array<float, kTransitions> means;
  for (size_t i = 0; i < kTransitions; ++i) means[i] = ReuseMean(type, static_cast<Transition>(i));
  Hazards hazards;
  for (size_t bin = 0; bin < kAgeBins; ++bin) {
    hazards[bin] = 1;
    for (size_t i = 0; i < kTransitions; ++i) {
      hazards[bin] *= 1 - TransitionHazard(ending, static_cast<Transition>(i), bin) * means[i];
    }
    hazards[bin] = 1 - hazards[bin];
  }
  return hazards;
}

}  // namespace palimpsest::reuse
