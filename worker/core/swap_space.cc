#include "worker/core/swap_space.h"

#include <algorithm>

#include "worker/core/check.h"

namespace palimpsest {

SwapSpace::SwapSpace(int32_t slots) : references_(static_cast<size_t>(slots), 0), free_(slots) {}

std::optional<std::vector<SwapSlot>> SwapSpace::Allocate(int32_t count) {
  if (count > free_) return std::nullopt;
  std::vector<SwapSlot> slots;
  for (; static_cast<int32_t>(slots.size()) < count; ++first_free_) {
    if (references_[first_free_] > 0) continue;
    references_[first_free_] = 1;
    slots.push_back(SwapSlot(static_cast<uint32_t>(first_free_)));
  }
  free_ -= count;
  return slots;
}

void SwapSpace::AddReference(SwapSlot slot) {
  PALIMPSEST_CHECK(references_[slot.value()] > 0);
  ++references_[slot.value()];
}

void SwapSpace::Release(SwapSlot slot) {
  PALIMPSEST_CHECK(references_[slot.value()] > 0);
  if (--references_[slot.value()] > 0) return;
  ++free_;
  first_free_ = std::min<size_t>(first_free_, slot.value());
}

void SwapSpace::CheckInvariants() const {
  PALIMPSEST_CHECK(std::count(references_.begin(), references_.end(), 0) == free_);
  const auto first = std::find(references_.begin(), references_.end(), 0);
  PALIMPSEST_CHECK(first - references_.begin() >= static_cast<ptrdiff_t>(first_free_));
}

}  // namespace palimpsest
