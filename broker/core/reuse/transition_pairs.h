// How likely a block is reused when a conversation goes on in a certain way: a Beta posterior for
// each pair of block type and transition, and how soon each transition comes.
//
// The share of a type's blocks that a transition reuses has the posterior mean
//
//   m(type, transition) = (reused + K m(type)) / (reused + not + K)
//   m(type)             = (reused of the row + K m) / (all of the row + K)
//   m                   = (reused of all + K / 2) / (all + K)
//
// (hierarchical shrinkage, K = kShrinkage votes). Evidence decays by count: each vote multiplies
// what its pair, row and whole hold by 1 - 1/kMemory.
//
// Which transition comes is not known in advance. Transitions are competing risks (Prentice et al.,
// Biometrics 1978): r(transition, bin | ending) is the hazard of its coming in an age bin, shrunk
// towards that of all endings, and
//
//   hazard(type, ending, bin) = 1 - prod_transition (1 - r(transition, bin | ending) m(type,
//                                                                                    transition))
//
// Types are the four of cache::BlockType and "not known", which is a row of its own.
//
// Complexity: O(1) a vote. Threads: none.
#ifndef PALIMPSEST_BROKER_CORE_REUSE_TRANSITION_PAIRS_H_
#define PALIMPSEST_BROKER_CORE_REUSE_TRANSITION_PAIRS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "broker/core/cache/eviction_policy.h"
#include "broker/core/reuse/age_bins.h"

namespace palimpsest::reuse {

enum class Transition : uint8_t {
  kNextTurn,         // the user answers
  kToolReturn,       // the result of a tool call
  kBranch,           // a hand-off to another agent, or a turn that replaces part of an earlier one
  kNewConversation,  // one that shares a prefix
};
inline constexpr size_t kTransitions = 4;
inline constexpr size_t kBlockTypes = 5;
inline constexpr size_t kEndings = 3;

// Votes for and against, those before a new one decayed.
struct Evidence {
  float reused = 0;
  float survived = 0;

  // `share` of one vote is for, the rest against.
  void Add(float share, float memory) {
    const float keep = 1 - 1 / memory;
    reused = reused * keep + share;
    survived = survived * keep + (1 - share);
  }
  // The posterior mean under a prior of `strength` votes.
  float Mean(float prior, float strength) const {
    return (reused + strength * prior) / (reused + survived + strength);
  }
};

class TransitionPairs {
 public:
  static constexpr float kShrinkage = 8;
  static constexpr float kMemory = 4096;
  // Of one transition and age bin, before there is evidence.
  static constexpr float kPriorHazard = 0.01F;

  // `transition` happened to a path; `share` of its blocks of `type` was reused.
  void ObserveReuse(cache::BlockType type, Transition transition, float share);
  // Age bin `bin` of a path that had ended so closed: with a transition, or without any.
  void ObserveBin(cache::Ending ending, size_t bin, std::optional<Transition> transition);

  float ReuseMean(cache::BlockType type, Transition transition) const;
  float TransitionHazard(cache::Ending ending, Transition transition, size_t bin) const;
  Hazards HazardsOf(cache::BlockType type, cache::Ending ending) const;

 private:
  using Risks = std::array<std::array<Evidence, kAgeBins>, kTransitions>;

  std::array<std::array<Evidence, kTransitions>, kBlockTypes> pairs_{};
  std::array<Evidence, kBlockTypes> rows_{};
  Evidence whole_;
  std::array<Risks, kEndings> risks_{};
  Risks any_ending_{};
};

}  // namespace palimpsest::reuse

#endif  // PALIMPSEST_BROKER_CORE_REUSE_TRANSITION_PAIRS_H_
