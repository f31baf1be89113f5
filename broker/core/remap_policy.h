// How many layers of a running model may give their memory away without slowing it down: a layer
// that rotates is copied from the image into a slot each time it runs, which costs nothing as long
// as every copy is hidden behind the compute of other layers. Pure functions of measured numbers.
//
// The model. A step runs `layers` equal layers one after another and spends the rest of its time
// (embedding, head, sampling) behind the last one; steps follow each other without a pause. Layers
// rotate as EvenRotation (common/rotation.h) says; each has its slot. The copy of a layer begins
// when the former user of its slot has run and the copies before it are through the link, and must
// end before the layer runs. Whether copies that wait for the link go in the order in which slots
// fall free, in the order of use, or by use among those whose slots are free: what is promised here
// holds.
//
// The conditions, with T the time of one copy, c that of one layer's compute, L layers, `a` freed:
//   one slot:  T (a + 1) <= c (L - (a + 1)), the compute of the other layers;
//   two slots: T (a + 2) <= c L, the compute of all;
//   and every copy fits between the moment its slot is free and its own use.
// Sums are those of parameter remapping (MIRAGE, 2025); the third is exact for this model, because
// sums are not enough where layers are unevenly spaced or two slots take turns in an odd number.
#ifndef PALIMPSEST_BROKER_CORE_REMAP_POLICY_H_
#define PALIMPSEST_BROKER_CORE_REMAP_POLICY_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "common/bytes.h"
#include "common/rotation.h"

namespace palimpsest {

// What rotation costs a tenant and what it gains. Ranks run in lockstep and a slab spans all of
// them, so one decision holds for all: bytes are those of one rank, all are alike; the rate is that
// of the slowest, and steps are those of all together.
struct RotationCost {
  // Layers that can rotate: those with equally many slabs.
  int32_t layers = 0;
  Bytes layer_bytes;
  // Slabs of a layer, which is what a freed layer gives.
  int32_t stage_slabs = 0;
  // Seconds of a step in the phase that binds (BindingStepSeconds); 0: not known, nothing rotates.
  double step_seconds = 0;
  // Share of the step that is not spent in these layers, from 0 to below 1.
  double outside_share = 0;
  // Rate at which the image is copied, of which only the share that is granted (link_budget.h); 0:
  // not known, nothing rotates.
  double link_bytes_per_second = 0;
  // Never more layers than this are freed.
  int32_t cap_freed = 0;
};

// A tenant's steps, as its worker measured and smoothed them; 0: none of that phase yet.
struct PhaseTimes {
  double decode_seconds = 0;
  double prefill_seconds = 0;
  // Share of the steps that have prompt chunks, from 0 to 1.
  double prefill_share = 0;
};

// A phase that makes up less than this share of the steps does not bind: its rare steps may stall.
inline constexpr double kPhaseThatCounts = 0.05;

// The shortest step among the phases that count: the one with the least compute to hide copies
// behind. 0 if none was measured.
double BindingStepSeconds(const PhaseTimes& times);

enum class SlotPreference : uint8_t { kAuto, kOne, kTwo };

// What keeps a choice from freeing one layer more.
enum class RotationLimit : uint8_t {
  kNone,        // nothing: no more was wanted
  kUnmeasured,  // step or link is not known yet
  kCap,         // the share of layers that may be freed
  kLayers,      // some layer must not rotate
  kSum,         // the copies of a step take longer than its compute
  kGap,         // a copy does not fit before its use
};
// "none", "unmeasured", "cap", "layers", "sum", "gap".
absl::string_view RotationLimitName(RotationLimit limit);

struct RotationChoice {
  int32_t freed = 0;
  int32_t slots = 0;  // 0 exactly if freed is 0
  // How long a layer's copy takes, and how long it might take at most.
  double copy_seconds = 0;
  double longest_copy_seconds = 0;
  RotationLimit limit = RotationLimit::kNone;
};

// Seconds that one copy takes. Requires a link that is known.
double CopySeconds(const RotationCost& cost);

// The longest copy with which all three conditions hold; 0 if `freed` layers cannot be freed with
// these slots at whatever speed. Does not look at the cap. O((freed + slots)^2).
double LongestCopySeconds(const RotationCost& cost, int32_t freed, int32_t slots);

// Whether `freed` layers may be freed: within the cap, and every copy hidden. 0 layers always may.
bool Overlaps(const RotationCost& cost, int32_t freed, int32_t slots);

// The largest number of layers for which Overlaps holds, 0 if none. Never falls when the link or
// the step is larger, or the cap.
int32_t MostFreed(const RotationCost& cost, int32_t slots);

// The smallest number of at least `wanted` for which Overlaps holds; 0 if there is none. Numbers in
// between may fail where larger ones do not: two slots take turns badly in an odd number.
int32_t LeastFreed(const RotationCost& cost, int32_t slots, int32_t wanted);

// The choice that frees most; one slot if two free no more.
RotationChoice ChooseRotation(const RotationCost& cost, SlotPreference preference);

// The choice that frees `wanted` layers or as few more as possible, with one slot where both free
// the same; the one that frees most if none frees as many. Nothing for 0.
RotationChoice ChooseRotation(const RotationCost& cost, SlotPreference preference, int32_t wanted);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_REMAP_POLICY_H_
