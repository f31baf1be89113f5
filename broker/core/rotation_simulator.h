// For tests: runs a rotating model's steps one layer and one copy after another and counts the time
// for which layers wait for their copies. Knows nothing of the conditions in remap_policy.h.
#ifndef PALIMPSEST_BROKER_CORE_ROTATION_SIMULATOR_H_
#define PALIMPSEST_BROKER_CORE_ROTATION_SIMULATOR_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/rotation.h"

namespace palimpsest {

struct SimulatedModel {
  int32_t layers = 0;
  double layer_seconds = 0;
  double outside_seconds = 0;  // of each step, behind the layers
  double copy_seconds = 0;
};

// Which copy goes through the link next: that of the slot that fell free first; that of the next
// use, even if its slot must be waited for; or of those whose slots are free the next to be used.
enum class CopyOrder : uint8_t { kBySlotFree, kByUse, kFreeByUse };

// Seconds that `steps` steps wait in all. At first the slots hold their first users.
inline double StalledSeconds(const SimulatedModel& model, const Rotation& rotation, CopyOrder order,
                             int32_t steps) {
  const auto rotating = static_cast<int64_t>(rotation.stages.size());
  const int64_t uses = rotating * steps;
  const auto slot_of = [&](int64_t use) { return use % rotating % rotation.slots; };
  std::vector<int64_t> former(uses, -1);  // the use before in the same slot
  std::vector<double> arrived(uses, 0.0);
  std::vector<double> ended(uses, 0.0);
  std::vector<int64_t> last(rotation.slots, -1);
  std::vector<int64_t> next(uses, -1);
  for (int64_t use = 0; use < uses; ++use) {
    former[use] = last[slot_of(use)];
    if (former[use] >= 0) next[former[use]] = use;
    last[slot_of(use)] = use;
  }
  double clock = 0;
  double link_free = 0;
  double stalled = 0;
  int64_t use = 0;
  std::vector<int64_t> free;  // uses whose slots are free, not copied yet
  const auto copy_free_until = [&](int64_t needed) {
    while (std::find(free.begin(), free.end(), needed) != free.end()) {
      double begin = ended[former[free.front()]];
      for (const int64_t waiting : free) begin = std::min(begin, ended[former[waiting]]);
      begin = std::max(begin, link_free);
      auto chosen = free.end();
      for (auto waiting = free.begin(); waiting != free.end(); ++waiting) {
        const bool ready = ended[former[*waiting]] <= begin;
        if (ready && (chosen == free.end() || *waiting < *chosen)) chosen = waiting;
      }
      link_free = begin + model.copy_seconds;
      arrived[*chosen] = link_free;
      free.erase(chosen);
    }
  };
  for (int32_t step = 0; step < steps; ++step) {
    for (int32_t layer = 0; layer < model.layers; ++layer) {
      if (!std::binary_search(rotation.stages.begin(), rotation.stages.end(), layer)) {
        clock += model.layer_seconds;
        continue;
      }
      if (order == CopyOrder::kByUse && former[use] >= 0) {
        link_free = std::max(link_free, ended[former[use]]) + model.copy_seconds;
        arrived[use] = link_free;
      }
      if (order == CopyOrder::kFreeByUse) copy_free_until(use);
      stalled += std::max(arrived[use] - clock, 0.0);
      clock = std::max(clock, arrived[use]) + model.layer_seconds;
      ended[use] = clock;
      if (order == CopyOrder::kBySlotFree && next[use] >= 0) {
        link_free = std::max(link_free, clock) + model.copy_seconds;
        arrived[next[use]] = link_free;
      }
      if (next[use] >= 0) free.push_back(next[use]);
      ++use;
    }
    clock += model.outside_seconds;
  }
  return stalled;
}

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_ROTATION_SIMULATOR_H_
