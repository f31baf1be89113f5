#include "broker/core/reuse/reuse_class.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace palimpsest::reuse {
namespace {

// 0 below `unit`, then one more for each doubling.
uint64_t DoublingsOf(absl::Duration time, absl::Duration unit) {
  const double ratio = absl::FDivDuration(time, unit);
  if (!(ratio >= 1)) return 0;
  return 1 + static_cast<uint64_t>(std::log2(std::min(ratio, 1e15)));
}

}  // namespace

uint64_t ReuseClass::Packed() const {
  static_assert(kFeatures * 4 <= 64 && kFeatureValues == 16);
  uint64_t packed = 0;
  for (const uint8_t value : values_) packed = packed << 4 | value;
  return packed;
}

uint64_t FromTailClass(uint32_t from_tail) {
  const auto step = std::upper_bound(kFromTailSteps.begin(), kFromTailSteps.end(), from_tail);
  return static_cast<uint64_t>(step - kFromTailSteps.begin());
}

uint64_t UsesClass(uint32_t uses) {
  constexpr std::array<uint32_t, 8> kSteps = {2, 3, 4, 5, 7, 11, 21, 101};
  const auto step = std::upper_bound(kSteps.begin(), kSteps.end(), uses);
  return static_cast<uint64_t>(step - kSteps.begin());
}

uint64_t GapClass(std::optional<absl::Duration> gap) {
  if (!gap.has_value()) return 0;
  return 1 + DoublingsOf(*gap, absl::Seconds(2));
}

uint64_t OutputClass(int64_t tokens) {
  if (tokens <= 0) return 0;
  return static_cast<uint64_t>(2 * std::log2(static_cast<double>(tokens) / 20 + 1));
}

uint64_t CountClass(uint64_t blocks) { return static_cast<uint64_t>(std::bit_width(blocks)); }

uint64_t TurnsClass(uint32_t turns) {
  constexpr std::array<uint32_t, 8> kSteps = {1, 2, 3, 4, 6, 9, 17, 33};
  const auto step = std::upper_bound(kSteps.begin(), kSteps.end(), turns);
  return static_cast<uint64_t>(step - kSteps.begin());
}

uint64_t EndingClass(cache::Ending ending, bool last_turn) {
  return static_cast<uint64_t>(ending) + (last_turn ? 4 : 0);
}

uint64_t ExpectedClass(std::optional<absl::Duration> expected_idle) {
  if (!expected_idle.has_value()) return 0;
  return 1 + DoublingsOf(*expected_idle, absl::Seconds(1));
}

uint64_t LeftBehindClass(uint32_t taken, uint32_t length) {
  if (taken <= 1) return 0;
  if (uint64_t{taken} * 4 <= length) return 1;
  return length - std::min(taken, length) <= 2 ? 2 : 3;
}

}  // namespace palimpsest::reuse
