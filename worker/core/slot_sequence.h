// Which rotating layer each slot holds, is being filled with, and is for next: pure bookkeeping of
// whoever copies layers into slots ahead of their use.
//
// Uses are strictly cyclic: every step runs rotating layers 0 .. layers-1 in order, layer i in slot
// i % slots. So a slot's users follow each other as i, i + slots, ... and then its first one again,
// in the next step; as soon as one is done, the slot is for the next. A step that was abandoned, at
// whatever layer, is followed by one that starts with layer 0.
//
//   slot:  empty -> filling   BeginCopy, of the layer that it is for
//          filling -> full    EndCopy
//          full -> in use     BeginUse, in the order of layers
//          in use -> full     EndUse: still holds that layer, and is for the next
//          full -> filling    BeginCopy, if it is for another layer than it holds
//          filling -> empty   AbandonCopy
//
// Illegal transitions abort.
#ifndef PALIMPSEST_WORKER_CORE_SLOT_SEQUENCE_H_
#define PALIMPSEST_WORKER_CORE_SLOT_SEQUENCE_H_

#include <cstdint>
#include <optional>
#include <vector>

namespace palimpsest {

class SlotSequence {
 public:
  // No layers and slots: nothing rotates. Otherwise at least as many layers as slots, and a slot.
  SlotSequence(int32_t layers, int32_t slots);

  int32_t layers() const { return layers_; }
  // The layer that the step in progress, or the next one, uses next.
  int32_t next_use() const { return next_use_; }

  // The layer to be copied first: of those that slots are for and do not hold, the one that is used
  // next. None if all that can be copied is, or is being copied.
  std::optional<int32_t> NextCopy() const;
  void BeginCopy(int32_t layer);
  void EndCopy(int32_t layer);
  void AbandonCopy(int32_t layer);

  // Whether the layer's slot holds it, and is for it.
  bool Ready(int32_t layer) const;
  // Requires next_use() and that it is ready.
  void BeginUse(int32_t layer);
  void EndUse(int32_t layer);

  // The step in progress is abandoned, and none of its layers is in use any more. Copies that are
  // under way go on.
  void Restart();

 private:
  enum class State : uint8_t { kEmpty, kFilling, kFull, kInUse };

  struct Slot {
    State state = State::kEmpty;
    int32_t holds = -1;   // or is being filled with
    int32_t is_for = -1;  // its next user, or the one that uses it
  };

  Slot& SlotOf(int32_t layer) { return slots_[static_cast<size_t>(layer) % slots_.size()]; }
  const Slot& SlotOf(int32_t layer) const {
    return slots_[static_cast<size_t>(layer) % slots_.size()];
  }
  // Uses until that of `layer`.
  int32_t Distance(int32_t layer) const { return (layer - next_use_ + layers_) % layers_; }

  int32_t layers_;
  int32_t next_use_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SLOT_SEQUENCE_H_
