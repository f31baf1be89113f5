#include "worker/core/slot_sequence.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

void Copy(SlotSequence& sequence, int32_t layer) {
  ASSERT_EQ(sequence.NextCopy(), layer);
  sequence.BeginCopy(layer);
  sequence.EndCopy(layer);
}

void Use(SlotSequence& sequence, int32_t layer) {
  ASSERT_TRUE(sequence.Ready(layer));
  sequence.BeginUse(layer);
  sequence.EndUse(layer);
}

TEST(SlotSequence, NothingRotatesWithoutLayers) {
  EXPECT_EQ(SlotSequence(0, 0).NextCopy(), std::nullopt);
}

TEST(SlotSequence, OneSlotIsFilledBetweenTwoUses) {
  SlotSequence sequence(3, 1);
  for (int step = 0; step < 3; ++step) {
    for (int32_t layer = 0; layer < 3; ++layer) {
      Copy(sequence, layer);
      EXPECT_EQ(sequence.NextCopy(), std::nullopt);
      sequence.BeginUse(layer);
      EXPECT_EQ(sequence.NextCopy(), std::nullopt);
      sequence.EndUse(layer);
    }
  }
}

TEST(SlotSequence, OfTwoSlotsOneIsFilledWhileTheOtherIsInUse) {
  SlotSequence sequence(4, 2);
  Copy(sequence, 0);
  Copy(sequence, 1);
  EXPECT_EQ(sequence.NextCopy(), std::nullopt);
  sequence.BeginUse(0);
  sequence.EndUse(0);
  sequence.BeginUse(1);
  Copy(sequence, 2);
  sequence.EndUse(1);
  Copy(sequence, 3);
  Use(sequence, 2);
  Copy(sequence, 0);  // of the next step
  Use(sequence, 3);
  Copy(sequence, 1);
}

TEST(SlotSequence, ALayerThatStaysInItsSlotIsCopiedOnce) {
  SlotSequence sequence(3, 2);
  Copy(sequence, 0);
  Copy(sequence, 1);
  for (int step = 0; step < 3; ++step) {
    Use(sequence, 0);
    Copy(sequence, 2);
    Use(sequence, 1);
    EXPECT_EQ(sequence.NextCopy(), std::nullopt);
    Use(sequence, 2);
    Copy(sequence, 0);
  }
}

TEST(SlotSequence, AbandonedStepsStartAgainWithTheFirstLayer) {
  SlotSequence sequence(4, 1);
  Copy(sequence, 0);
  sequence.BeginUse(0);
  sequence.Restart();
  Use(sequence, 0);  // it is still there
  sequence.BeginCopy(1);
  sequence.Restart();
  EXPECT_EQ(sequence.NextCopy(), std::nullopt);  // while the slot is written
  sequence.EndCopy(1);
  EXPECT_FALSE(sequence.Ready(1));
  Copy(sequence, 0);
  Use(sequence, 0);
  sequence.BeginCopy(1);
  sequence.AbandonCopy(1);
  Copy(sequence, 1);
}

TEST(SlotSequenceDeathTest, IllegalTransitionsAbort) {
  SlotSequence sequence(3, 1);
  EXPECT_DEATH(sequence.BeginUse(0), "");
  EXPECT_DEATH(sequence.BeginCopy(1), "");
  EXPECT_DEATH(sequence.EndCopy(0), "");
  EXPECT_DEATH(sequence.EndUse(0), "");
  Copy(sequence, 0);
  EXPECT_DEATH(sequence.BeginCopy(0), "");
  EXPECT_DEATH(sequence.BeginUse(1), "");
  sequence.BeginUse(0);
  EXPECT_DEATH(sequence.BeginCopy(1), "");
}

// Memory of slots, written and read as the sequence says.
class Model {
 public:
  explicit Model(uint32_t seed)
      : random_(seed),
        slots_(1 + static_cast<int32_t>(random_() % 3)),
        layers_(slots_ + static_cast<int32_t>(random_() % 7)),
        sequence_(layers_, slots_),
        memory_(slots_, -1),
        writer_(slots_, -1),
        readers_(slots_, 0) {}

  void Act() {
    switch (random_() % 8) {
      case 0:
      case 1:
        return StartCopy();
      case 2:
      case 3:
        return FinishCopy();
      case 4:
      case 5:
        return StartUse();
      case 6:
        return FinishUse();
      default:
        if (random_() % 8 == 0) Abandon();
    }
  }

  // Whatever happened, a step gets through if copies do.
  void RunStep() {
    Abandon();
    for (int32_t layer = 0; layer < layers_; ++layer) {
      for (int tries = 0; !sequence_.Ready(layer); ++tries) {
        ASSERT_LT(tries, 4 * slots_);
        StartCopy();
        FinishCopy();
      }
      StartUse();
      FinishUse();
    }
  }

  int64_t uses() const { return uses_; }

 private:
  int32_t SlotOf(int32_t layer) const { return layer % slots_; }

  void StartCopy() {
    const std::optional<int32_t> layer = sequence_.NextCopy();
    if (!layer.has_value()) return;
    const int32_t slot = SlotOf(*layer);
    ASSERT_EQ(writer_[slot], -1);
    ASSERT_EQ(readers_[slot], 0);
    ASSERT_NE(memory_[slot], *layer) << "copied twice";
    sequence_.BeginCopy(*layer);
    memory_[slot] = -1;
    writer_[slot] = *layer;
    copies_.push_back(*layer);
  }

  void FinishCopy() {
    if (copies_.empty()) return;
    std::swap(copies_.back(), copies_[random_() % copies_.size()]);
    const int32_t layer = copies_.back();
    copies_.pop_back();
    writer_[SlotOf(layer)] = -1;
    if (random_() % 16 == 0) return sequence_.AbandonCopy(layer);
    sequence_.EndCopy(layer);
    memory_[SlotOf(layer)] = layer;
  }

  void StartUse() {
    const int32_t layer = next_;
    ASSERT_EQ(sequence_.next_use(), layer);
    if (!sequence_.Ready(layer)) return;
    ASSERT_EQ(memory_[SlotOf(layer)], layer);
    ASSERT_EQ(writer_[SlotOf(layer)], -1);
    ++readers_[SlotOf(layer)];
    sequence_.BeginUse(layer);
    used_.push_back(layer);
    next_ = (layer + 1) % layers_;
    ++uses_;
  }

  void FinishUse() {
    if (used_.empty()) return;
    const int32_t layer = used_.front();
    used_.erase(used_.begin());
    ASSERT_EQ(memory_[SlotOf(layer)], layer) << "overwritten while in use";
    --readers_[SlotOf(layer)];
    sequence_.EndUse(layer);
  }

  void Abandon() {
    sequence_.Restart();
    used_.clear();
    std::fill(readers_.begin(), readers_.end(), 0);
    next_ = 0;
  }

  std::mt19937 random_;
  const int32_t slots_;
  const int32_t layers_;
  SlotSequence sequence_;
  std::vector<int32_t> memory_;  // what each slot holds; -1: garbage
  std::vector<int32_t> writer_;
  std::vector<int32_t> readers_;
  std::vector<int32_t> copies_, used_;
  int32_t next_ = 0;
  int64_t uses_ = 0;
};

TEST(SlotSequenceFuzz, WhateverHappensSlotsHoldWhatIsReadAndStepsGetThrough) {
  int64_t uses = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    Model model(seed);
    for (int i = 0; i < 500; ++i) {
      model.Act();
      if (::testing::Test::HasFatalFailure()) return;
    }
    model.RunStep();
    if (::testing::Test::HasFatalFailure()) return;
    uses += model.uses();
  }
  EXPECT_GT(uses, 10'000);
}

}  // namespace
}  // namespace palimpsest
