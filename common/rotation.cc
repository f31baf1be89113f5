#include "common/rotation.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace palimpsest {

Rotation EvenRotation(int32_t first_stage, int32_t layers, int32_t freed, int32_t slots) {
  Rotation rotation;
  if (freed == 0) return rotation;
  rotation.slots = slots;
  const int64_t count = freed + slots;
  const int64_t shift = layers / (2 * count);  // half a gap
  for (int64_t i = 0; i < count; ++i) {
    rotation.stages.push_back(first_stage + static_cast<int32_t>(shift + i * layers / count));
  }
  return rotation;
}

absl::Status ValidateRotation(const Rotation& rotation, int32_t stages) {
  if (rotation.none() && rotation.slots == 0) return absl::OkStatus();
  const bool ascending =
      std::adjacent_find(rotation.stages.begin(), rotation.stages.end(),
                         [](int32_t a, int32_t b) { return a >= b; }) == rotation.stages.end();
  if (rotation.none() || rotation.slots < 1 || rotation.slots > kMaxSlots || !ascending ||
      rotation.freed() < 1 || rotation.stages.front() < 0 || rotation.stages.back() >= stages) {
    return absl::InvalidArgumentError(
        absl::StrCat("a rotation names ascending stages below ", stages,
                     ", more of them than its 1 to ", kMaxSlots, " slots; this one names ",
                     rotation.stages.size(), " with ", rotation.slots, " slots"));
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
