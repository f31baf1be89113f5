// The engine with KV that goes to host memory and back, whenever the test lets it.
#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "worker/core/fake_swap_copier.h"
#include "worker/core/swap_gate.h"
#include "worker/server/engine_fixture.h"

namespace palimpsest {
namespace {

class EngineSwapTest : public EngineTest {
 protected:
  // An engine with so many slots; KV joins steps behind the copies if it is to.
  void Swap(int32_t slots, bool joins) {
    EngineOptions options = options_;
    options.scheduler.swap_blocks = slots;
    options.swap_overlap_blocks = joins ? 1000 : 0;
    engine_.reset();
    swap_ = std::make_unique<FakeSwapCopier>(
        FakeSwapCopier::Options{.kv = memory_.kv(),
                                .block_bytes = options.scheduler.geometry.block_bytes,
                                .slots = slots,
                                .seed = 7});
    gate_ = std::make_unique<SwapGate>(&memory_.gate(), swap_.get(), /*first_layer=*/1,
                                       /*layers=*/1);
    swap_runner_ = std::make_unique<FakeRunner>(
        &model_, gate_.get(), FakeRunner::Options{.depth = GetParam(), .seed = 5});
    EngineParts parts{&memory_,      swap_runner_.get(), &copier_,
                      &token_bytes_, &engine_metrics_,   &clock_};
    parts.swap = swap_.get();
    engine_ = std::make_unique<Engine>(options, parts);
    memory_.SetBeforeGive([this] { EXPECT_EQ(swap_->pending(), 0u); });
  }

  ~EngineSwapTest() override { engine_.reset(); }

  // Two long requests and slabs for one and a half.
  void StartTwo() {
    memory_.GrantKv(6);
    requests_ = {Request({1, 2, 3, 4, 5, 6, 7, 8, 9}, 40, 1), Request({9, 8, 7, 6, 5}, 40, 2)};
    for (const SequenceRequest& request : requests_) streams_.push_back(Submit(request));
    outcomes_.resize(streams_.size());
  }

  void Turn() {
    clock_.Advance(absl::Milliseconds(10));
    engine_->RunOnce();
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (!outcomes_[i].end.has_value()) outcomes_[i].Take(*streams_[i]);
    }
  }

  bool TurnUntil(const std::function<bool()>& done) {
    for (int i = 0; i < 1000; ++i) {
      if (done()) return true;
      Turn();
    }
    return done();
  }

  bool Ended() const {
    return std::all_of(outcomes_.begin(), outcomes_.end(),
                       [](const Outcome& outcome) { return outcome.end.has_value(); });
  }

  void ExpectAll() {
    for (size_t i = 0; i < outcomes_.size(); ++i) {
      ASSERT_TRUE(outcomes_[i].end.has_value());
      EXPECT_TRUE(outcomes_[i].end->status.ok()) << outcomes_[i].end->status;
      EXPECT_EQ(outcomes_[i].tokens, Expected(requests_[i]));
    }
  }

  SchedulerCounters counters() const { return engine_->Stats().counters; }

  std::unique_ptr<FakeSwapCopier> swap_;
  std::unique_ptr<SwapGate> gate_;
  std::unique_ptr<FakeRunner> swap_runner_;
  std::vector<SequenceRequest> requests_;
  std::vector<std::shared_ptr<GenerationStream>> streams_;
  std::vector<Outcome> outcomes_;
};

TEST_P(EngineSwapTest, YoungerOneLeavesAndReturns) {
  for (const bool joins : {false, true}) {
    Swap(40, joins);
    StartTwo();
    EXPECT_TRUE(TurnUntil([&] {
      swap_->EndOne();
      return Ended();
    }));
    ExpectAll();
    EXPECT_GT(counters().swapped_preemptions, 0);
    EXPECT_EQ(counters().swapped_preemptions, counters().preemptions);
    EXPECT_GT(counters().blocks_swapped_in, 0);
    EXPECT_EQ(outcomes_[0].end->usage.preemptions, 0) << "the older one made room";
    memory_.RevokeKv(40);
    engine_->RunOnce();
    streams_.clear();
    outcomes_.clear();
  }
}

TEST_P(EngineSwapTest, OlderOneGoesOnWhileTheYoungerLeaves) {
  Swap(40, false);
  StartTwo();
  // Copies never end; what was free when the younger one began to leave still serves the older.
  EXPECT_TRUE(TurnUntil([&] { return swap_->pending() > 0; }));
  const size_t before = outcomes_[0].tokens.size();
  for (int i = 0; i < 4; ++i) Turn();
  EXPECT_GT(outcomes_[0].tokens.size(), before);
  EXPECT_TRUE(TurnUntil([&] {
    swap_->EndOne();
    return Ended();
  }));
  ExpectAll();
}

TEST_P(EngineSwapTest, CopiesThatFailAreMadeUpForByComputing) {
  for (const bool joins : {false, true}) {
    Swap(40, joins);
    swap_->FailFromNowOn();
    StartTwo();
    EXPECT_TRUE(TurnUntil([&] {
      swap_->EndOne();
      return Ended();
    }));
    ExpectAll();
    EXPECT_GT(counters().failed_transfers, 0);
    memory_.RevokeKv(40);
    engine_->RunOnce();
    streams_.clear();
    outcomes_.clear();
  }
}

TEST_P(EngineSwapTest, ReturnThatFailsVoidsTheStepsThatFollowedIt) {
  Swap(40, /*joins=*/true);
  StartTwo();
  EXPECT_TRUE(TurnUntil([&] {
    swap_->EndOne();
    return counters().blocks_swapped_out > 0 && swap_->pending() == 0;
  }));
  swap_->FailFromNowOn();
  EXPECT_TRUE(TurnUntil([&] { return Ended(); }));
  ExpectAll();
  EXPECT_GT(swap_->failures(), 0);
}

TEST_P(EngineSwapTest, ArenaThatIsTooSmallLeavesTheRestToBeComputed) {
  Swap(1, false);
  StartTwo();
  EXPECT_TRUE(TurnUntil([&] {
    swap_->EndOne();
    return Ended();
  }));
  ExpectAll();
  EXPECT_GT(counters().preemptions, 0);
  EXPECT_EQ(counters().swapped_preemptions, 0);
}

TEST_P(EngineSwapTest, CancelledWhileLeavingAndWhileReturning) {
  for (const bool returning : {false, true}) {
    Swap(40, false);
    StartTwo();
    EXPECT_TRUE(TurnUntil([&] {
      if (returning && counters().blocks_swapped_out == 0) swap_->EndOne();
      return swap_->pending() > 0 && (!returning || counters().blocks_swapped_out > 0);
    }));
    engine_->Cancel(*streams_[1]);
    EXPECT_TRUE(TurnUntil([&] { return outcomes_[1].end.has_value(); }));
    EXPECT_EQ(outcomes_[1].end->reason, FinishReason::kCancelled);
    EXPECT_TRUE(TurnUntil([&] {
      swap_->EndOne();
      return outcomes_[0].end.has_value();
    }));
    EXPECT_EQ(outcomes_[0].tokens, Expected(requests_[0]));
    swap_->EndOne();
    Turn();
    EXPECT_EQ(swap_->pending(), 0u);
    EXPECT_EQ(engine_->Stats().blocks_used, 0);
    memory_.RevokeKv(40);
    engine_->RunOnce();
    streams_.clear();
    outcomes_.clear();
  }
}

TEST_P(EngineSwapTest, RevokeDrivesKvOutInsteadOfDroppingIt) {
  Swap(40, false);
  memory_.GrantKv(30);
  requests_ = {Request({1, 2, 3, 4, 5, 6, 7, 8, 9}, 40, 1), Request({9, 8, 7, 6, 5}, 40, 2)};
  for (const SequenceRequest& request : requests_) streams_.push_back(Submit(request));
  outcomes_.resize(streams_.size());
  for (int i = 0; i < 20; ++i) Turn();
  memory_.RevokeKv(26);
  Turn();
  EXPECT_GT(counters().blocks_swapped_out, 0);
  EXPECT_TRUE(TurnUntil([&] {
    memory_.GrantKvTarget();
    swap_->EndOne();
    return Ended();
  }));
  ExpectAll();
  EXPECT_EQ(counters().swapped_preemptions, counters().preemptions);
}

INSTANTIATE_TEST_SUITE_P(Depth, EngineSwapTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace palimpsest
