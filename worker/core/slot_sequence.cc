#include "worker/core/slot_sequence.h"

#include "worker/core/check.h"

namespace palimpsest {

SlotSequence::SlotSequence(int32_t layers, int32_t slots)
    : layers_(layers), slots_(static_cast<size_t>(slots)) {
  PALIMPSEST_CHECK(0 <= slots && slots <= layers && (slots > 0 || layers == 0));
  Restart();
}

std::optional<int32_t> SlotSequence::NextCopy() const {
  std::optional<int32_t> next;
  for (const Slot& slot : slots_) {
    const bool free = slot.state == State::kEmpty || slot.state == State::kFull;
    if (!free || slot.holds == slot.is_for) continue;
    if (!next.has_value() || Distance(slot.is_for) < Distance(*next)) next = slot.is_for;
  }
  return next;
}

void SlotSequence::BeginCopy(int32_t layer) {
  Slot& slot = SlotOf(layer);
  PALIMPSEST_CHECK(slot.state == State::kEmpty || slot.state == State::kFull);
  PALIMPSEST_CHECK(slot.is_for == layer && slot.holds != layer);
  slot.state = State::kFilling;
  slot.holds = layer;
}

void SlotSequence::EndCopy(int32_t layer) {
  Slot& slot = SlotOf(layer);
  PALIMPSEST_CHECK(slot.state == State::kFilling && slot.holds == layer);
  slot.state = State::kFull;
}

void SlotSequence::AbandonCopy(int32_t layer) {
  Slot& slot = SlotOf(layer);
  PALIMPSEST_CHECK(slot.state == State::kFilling && slot.holds == layer);
  slot.state = State::kEmpty;
  slot.holds = -1;
}

bool SlotSequence::Ready(int32_t layer) const {
  const Slot& slot = SlotOf(layer);
  return slot.state == State::kFull && slot.holds == layer && slot.is_for == layer;
}

void SlotSequence::BeginUse(int32_t layer) {
  PALIMPSEST_CHECK(layer == next_use_ && Ready(layer));
  SlotOf(layer).state = State::kInUse;
  next_use_ = (layer + 1) % layers_;
}

void SlotSequence::EndUse(int32_t layer) {
  Slot& slot = SlotOf(layer);
  PALIMPSEST_CHECK(slot.state == State::kInUse && slot.holds == layer);
  slot.state = State::kFull;
  const auto slots = static_cast<int32_t>(slots_.size());
  slot.is_for = layer + slots < layers_ ? layer + slots : layer % slots;
}

void SlotSequence::Restart() {
  next_use_ = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].state == State::kInUse) slots_[i].state = State::kFull;
    slots_[i].is_for = static_cast<int32_t>(i);
  }
}

}  // namespace palimpsest
