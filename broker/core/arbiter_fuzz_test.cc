// The model fuzzer's walks, and that it notices faults.
#include <algorithm>
#include <memory>

#include "broker/core/arbiter_fuzzer.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(ArbiterFuzz, InvariantsHoldUnderRandomEvents) {
  int grants = 0, kills = 0, refused = 0, revokes = 0, parameter_revokes = 0, workspaces = 0,
      parts = 0;
  int hangs = 0, hung_killed = 0, rotations = 0, reverted = 0, spare = 0, turns = 0;
  int rotations_ended = 0, completed = 0;
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    ArbiterFuzzer fuzzer(seed);
    fuzzer.Run(3000);
    ASSERT_TRUE(fuzzer.problems().empty())
        << "seed " << seed << ": " << fuzzer.problems().front() << "\n"
        << fuzzer.log().substr(fuzzer.log().size() - std::min<size_t>(fuzzer.log().size(), 3000));
    grants += fuzzer.Occurrences("grant ");
    kills += fuzzer.kills();
    refused += fuzzer.Occurrences("refused ");
    revokes += fuzzer.Occurrences(" kv ");
    parts += fuzzer.Occurrences("part ");
    workspaces += fuzzer.Occurrences(" workspace ");
    parameter_revokes += fuzzer.Occurrences(" parameter 0+");
    rotations += fuzzer.Occurrences("rotate ");
    reverted += fuzzer.Occurrences(" to 0 freed ");
    spare += fuzzer.Occurrences(" slot ");
    turns += fuzzer.Occurrences("turn ");
    hangs += fuzzer.hangs();
    hung_killed += fuzzer.hung_killed();
    rotations_ended += fuzzer.rotations_ended();
    completed += fuzzer.completed();
  }
  // The walk reached what it is meant to test.
  EXPECT_GT(grants, 10000);
  EXPECT_GT(kills, 500);
  EXPECT_GT(refused, 200);
  EXPECT_GT(revokes, 5000);
  EXPECT_GT(parameter_revokes, 1000);
  EXPECT_GT(workspaces, 500);
  EXPECT_GT(parts, 500);
  EXPECT_GT(rotations, 1000);
  EXPECT_GT(reverted, 200);
  EXPECT_GT(spare, 50);
  EXPECT_GT(turns, 3000);
  EXPECT_GT(hangs, 100);
  EXPECT_GT(hung_killed, 50);
  EXPECT_GT(rotations_ended, 50);
  EXPECT_GT(completed, 50);
}

TEST(ArbiterFuzz, SameSeedGivesSameActions) {
  for (const uint32_t seed : {7u, 8u}) {
    ArbiterFuzzer first(seed), second(seed);
    first.Run(1500);
    second.Run(1500);
    EXPECT_GT(first.log().size(), 1000u);
    EXPECT_EQ(first.log(), second.log());
  }
}

// A ledger that does one thing wrong. The fuzzer has to notice.
enum class Fault {
  kForgetsQuarantine,
  kSkipsCleaning,
  kLeaksCleanSlabs,
  kGrantsUnderOldEpoch,
  kForgetsMoves,
};

class FaultyLedger : public SlabLedger {
 public:
  FaultyLedger(uint32_t pool_slabs, uint32_t generation, Fault fault)
      : SlabLedger(pool_slabs, generation), fault_(fault) {}

 protected:
  absl::Status Transition(SlabId slab, SlabState to, const SlabRecord& next) override {
    if (fault_ == Fault::kLeaksCleanSlabs && to == SlabState::kFree && slab.value() % 16 == 3) {
      return absl::OkStatus();
    }
    if (fault_ == Fault::kForgetsMoves && to == record(slab).state) return absl::OkStatus();
    SlabRecord changed = next;
    if (fault_ == Fault::kGrantsUnderOldEpoch && to == SlabState::kGranted) {
      changed.epoch = record(slab).epoch;
    }
    if (absl::Status status = SlabLedger::Transition(slab, to, changed); !status.ok()) {
      return status;
    }
    if ((fault_ == Fault::kForgetsQuarantine && to == SlabState::kQuarantined) ||
        (fault_ == Fault::kSkipsCleaning && to == SlabState::kQuiesced)) {
      SlabRecord bare;
      bare.epoch = next.epoch;
      if (to == SlabState::kQuarantined) {
        (void)SlabLedger::Transition(slab, SlabState::kQuiesced, bare);
      }
      (void)SlabLedger::Transition(slab, SlabState::kScrubbed, bare);
      return SlabLedger::Transition(slab, SlabState::kFree, bare);
    }
    return absl::OkStatus();
  }

 private:
  const Fault fault_;
};

TEST(ArbiterFuzz, FindsEveryFaultOfALedger) {
  for (const Fault fault :
       {Fault::kForgetsQuarantine, Fault::kSkipsCleaning, Fault::kLeaksCleanSlabs,
        Fault::kGrantsUnderOldEpoch, Fault::kForgetsMoves}) {
    ArbiterFuzzer fuzzer(2, [fault](uint32_t pool_slabs, uint32_t generation) {
      return std::make_unique<FaultyLedger>(pool_slabs, generation, fault);
    });
    fuzzer.Run(3000);
    EXPECT_FALSE(fuzzer.problems().empty()) << "fault " << static_cast<int>(fault);
  }
}

}  // namespace
}  // namespace palimpsest
