#include "broker/core/remap_policy.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace palimpsest {
namespace {

// One copy in each step, in the order in which copies go through the link.
struct CyclicCopy {
  double released;  // when its slot is free: negative where that is in the step before
  double used;
};

// The longest copies of a cycle that all end in time, in units of `period`. Copies that wait for
// each other from number j to number k start when j's slot is free and must be done when k is used:
// so many copies share that time. Requires at least one copy.
double LongestInTime(const std::vector<CyclicCopy>& copies, double period) {
  const size_t count = copies.size();
  double longest = period / static_cast<double>(count);
  for (size_t last = 0; last < count; ++last) {
    for (size_t waiting = 0; waiting < count; ++waiting) {
      const bool step_before = waiting > last;
      const CyclicCopy& first = copies[step_before ? last + count - waiting : last - waiting];
      const double window = copies[last].used - (first.released - (step_before ? period : 0.0));
      longest = std::min(longest, window / static_cast<double>(waiting + 1));
    }
  }
  return std::max(longest, 0.0);
}

bool Measured(const RotationCost& cost) {
  return cost.step_seconds > 0 && cost.link_bytes_per_second > 0 && cost.layer_bytes > Bytes(0);
}

double LayerSeconds(const RotationCost& cost) {
  return cost.step_seconds * (1.0 - cost.outside_share) / cost.layers;
}

// The longest copy that the sums allow.
double LongestBySum(const RotationCost& cost, int32_t freed, int32_t slots) {
  const int32_t rotating = freed + slots;
  const int32_t hiding = slots == 1 ? cost.layers - rotating : cost.layers;
  return LayerSeconds(cost) * hiding / rotating;
}

double LongestByGaps(const RotationCost& cost, int32_t freed, int32_t slots) {
  const double layer = LayerSeconds(cost);
  const double period = cost.step_seconds;
  const Rotation rotation = EvenRotation(0, cost.layers, freed, slots);
  const auto count = static_cast<int32_t>(rotation.stages.size());
  std::vector<CyclicCopy> copies;
  for (int32_t i = 0; i < count; ++i) {
    int32_t former = i - slots;
    double lapped = 0;
    if (former < 0) {
      // The slot's last user in the step before.
      former = count - 1 - (count - 1 - i) % slots;
      lapped = period;
    }
    copies.push_back({.released = (rotation.stages[former] + 1) * layer - lapped,
                      .used = rotation.stages[i] * layer});
  }
  double longest = LongestInTime(copies, period);
  std::stable_sort(copies.begin(), copies.end(), [](const CyclicCopy& a, const CyclicCopy& b) {
    return a.released < b.released;
  });
  return std::min(longest, LongestInTime(copies, period));
}

RotationLimit LimitOf(const RotationCost& cost, int32_t freed, int32_t slots) {
  if (!Measured(cost)) return RotationLimit::kUnmeasured;
  if (freed >= cost.cap_freed) return RotationLimit::kCap;
  if (freed + 1 + slots >= cost.layers) return RotationLimit::kLayers;
  if (CopySeconds(cost) > LongestBySum(cost, freed + 1, slots)) return RotationLimit::kSum;
  return RotationLimit::kGap;
}

RotationChoice Choice(const RotationCost& cost, int32_t freed, int32_t slots) {
  RotationChoice choice{.freed = freed, .slots = freed > 0 ? slots : 0};
  if (Measured(cost)) choice.copy_seconds = CopySeconds(cost);
  if (freed > 0) choice.longest_copy_seconds = LongestCopySeconds(cost, freed, slots);
  return choice;
}

}  // namespace

double BindingStepSeconds(const PhaseTimes& times) {
  const bool decodes = times.decode_seconds > 0 && 1.0 - times.prefill_share >= kPhaseThatCounts;
  const bool prefills = times.prefill_seconds > 0 && times.prefill_share >= kPhaseThatCounts;
  if (decodes && prefills) return std::min(times.decode_seconds, times.prefill_seconds);
  if (decodes) return times.decode_seconds;
  if (prefills) return times.prefill_seconds;
  // The phase that counts was not measured.
  return 0;
}

absl::string_view RotationLimitName(RotationLimit limit) {
  switch (limit) {
    case RotationLimit::kNone:
      return "none";
    case RotationLimit::kUnmeasured:
      return "unmeasured";
    case RotationLimit::kCap:
      return "cap";
    case RotationLimit::kLayers:
      return "layers";
    case RotationLimit::kSum:
      return "sum";
    case RotationLimit::kGap:
      return "gap";
  }
  return "invalid";
}

double CopySeconds(const RotationCost& cost) {
  return static_cast<double>(cost.layer_bytes.count()) / cost.link_bytes_per_second;
}

double LongestCopySeconds(const RotationCost& cost, int32_t freed, int32_t slots) {
  if (freed < 1 || slots < 1 || slots > kMaxSlots || freed + slots >= cost.layers) return 0;
  if (!(cost.step_seconds > 0) || !(cost.outside_share >= 0 && cost.outside_share < 1)) return 0;
  return std::min(LongestBySum(cost, freed, slots), LongestByGaps(cost, freed, slots));
}

bool Overlaps(const RotationCost& cost, int32_t freed, int32_t slots) {
  if (freed == 0) return true;
  if (freed > cost.cap_freed || freed + slots >= cost.layers || !Measured(cost)) return false;
  // The sum is quicker to find than the gaps.
  const double copy = CopySeconds(cost);
  return copy <= LongestBySum(cost, freed, slots) && copy <= LongestCopySeconds(cost, freed, slots);
}

int32_t MostFreed(const RotationCost& cost, int32_t slots) {
  if (!Measured(cost)) return 0;
  int32_t freed = std::min(cost.cap_freed, cost.layers - slots - 1);
  while (freed > 0 && !Overlaps(cost, freed, slots)) --freed;
  return std::max(freed, 0);
}

int32_t LeastFreed(const RotationCost& cost, int32_t slots, int32_t wanted) {
  const int32_t end = std::min(cost.cap_freed, cost.layers - slots - 1);
  for (int32_t freed = std::max(wanted, 1); freed <= end; ++freed) {
    if (Overlaps(cost, freed, slots)) return freed;
  }
  return 0;
}

RotationChoice ChooseRotation(const RotationCost& cost, SlotPreference preference) {
  const int32_t one = preference == SlotPreference::kTwo ? 0 : MostFreed(cost, 1);
  const int32_t two = preference == SlotPreference::kOne ? 0 : MostFreed(cost, 2);
  const bool second = two > one || preference == SlotPreference::kTwo;
  RotationChoice choice = Choice(cost, std::max(one, two), second ? 2 : 1);
  choice.limit = LimitOf(cost, choice.freed, second ? 2 : 1);
  return choice;
}

RotationChoice ChooseRotation(const RotationCost& cost, SlotPreference preference, int32_t wanted) {
  if (wanted <= 0) return Choice(cost, 0, 1);
  const int32_t one = preference == SlotPreference::kTwo ? 0 : LeastFreed(cost, 1, wanted);
  const int32_t two = preference == SlotPreference::kOne ? 0 : LeastFreed(cost, 2, wanted);
  if (one == 0 && two == 0) return ChooseRotation(cost, preference);
  const bool second = one == 0 || (two > 0 && two < one);
  return Choice(cost, second ? two : one, second ? 2 : 1);
}

}  // namespace palimpsest
