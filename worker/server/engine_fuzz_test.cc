// Random histories of an engine, in one thread and in many.
#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "common/mutex.h"
#include "gtest/gtest.h"
#include "worker/compute/cpu/host_swap_copier.h"
#include "worker/core/swap_gate.h"
#include "worker/core/threaded_runner.h"
#include "worker/server/engine_fixture.h"

namespace palimpsest {
namespace {

class EngineFuzz : public EngineTest {
 protected:
  void Storm(int32_t swap_blocks);
};

// Everything at once, in one thread: what comes out is always what an undisturbed model says.
TEST_P(EngineFuzz, DisturbedRequestsSayTheSame) {
  std::mt19937 random(7);
  const auto chance = [&](int percent) { return static_cast<int>(random() % 100) < percent; };
  struct Tracked {
    SequenceRequest request;
    std::shared_ptr<GenerationStream> stream;
    Outcome outcome;
    bool cancelled = false;
  };
  std::vector<Tracked> all;
  bool parameters = true;
  const auto restore = [&] {
    if (!parameters) memory_.RestoreParameters();
    parameters = true;
    memory_.FailStage(-1);
    memory_.HoldRotations(false);
  };
  for (int turn = 0; turn < 6000; ++turn) {
    if (chance(12)) {
      std::vector<TokenId> prompt(1 + random() % 30);
      for (TokenId& token : prompt) token = static_cast<TokenId>(random() % 3);
      auto request = Request(prompt, 1 + static_cast<int>(random() % 30), random() % 2);
      auto stream = engine_->Submit(request, [] {});
      if (stream.ok()) all.push_back({request, *stream, {}, false});
    }
    if (chance(4) && !all.empty()) {
      Tracked& victim = all[all.size() - 1 - random() % std::min<size_t>(all.size(), 6)];
      if (victim.stream != nullptr) engine_->Cancel(*victim.stream);
      victim.cancelled = true;
    }
    if (chance(30)) memory_.GrantKvTarget();
    if (chance(10)) memory_.RevokeKv(1 + random() % 12);
    if (chance(3) && parameters) {
      memory_.RevokeParameters();
      parameters = false;
    }
    if (chance(3)) memory_.SetRotation(EvenRotation(1, 8, static_cast<int>(random() % 6), 2));
    if (chance(10)) memory_.HoldRotations(chance(50));
    if (chance(1)) memory_.VoidRotations();
    if (chance(5)) memory_.FailStage(random() % 3);
    if (chance(5) && !parameters) memory_.RefuseActivation("full", absl::Milliseconds(50));
    if (chance(2)) runner_.FailNext();
    if (chance(1)) runner_.RefuseNext();
    if (chance(15)) restore();
    if (chance(2)) memory_.Lose();
    if (chance(3)) memory_.Connect(true);
    clock_.Advance(absl::Milliseconds(random() % 100));
    engine_->RunOnce();
    for (Tracked& tracked : all) {
      if (tracked.stream != nullptr) tracked.outcome.Take(*tracked.stream);
      if (tracked.outcome.end.has_value()) tracked.stream = nullptr;
    }
  }
  restore();
  for (int i = 0; engine_->AwaitDrained(absl::ZeroDuration()) > 0; ++i) {
    ASSERT_LT(i, 10000);
    memory_.GrantKvTarget();
    clock_.Advance(absl::Milliseconds(20));
    engine_->RunOnce();
  }
  int complete = 0;
  for (Tracked& tracked : all) {
    if (tracked.stream != nullptr) tracked.outcome.Take(*tracked.stream);
    ASSERT_TRUE(tracked.outcome.end.has_value());
    const auto expected = Expected(tracked.request);
    if (tracked.outcome.end->status.ok() &&
        tracked.outcome.end->reason != FinishReason::kCancelled) {
      ASSERT_EQ(tracked.outcome.tokens, expected);
      ++complete;
    } else {
      // A refused activation fails only what has streamed nothing.
      EXPECT_TRUE(tracked.cancelled || (absl::IsUnavailable(tracked.outcome.end->status) &&
                                        tracked.outcome.tokens.empty()))
          << tracked.outcome.end->status;
      ASSERT_TRUE(std::equal(tracked.outcome.tokens.begin(), tracked.outcome.tokens.end(),
                             expected.begin()));
    }
  }
  EXPECT_GT(complete, 100);
  EXPECT_EQ(runner_.continued_chunks() > 1000, GetParam() > 1);
}

// The engine's thread, clients that read and cancel, and a broker that gives and takes, in
// parallel.
void EngineFuzz::Storm(int32_t swap_blocks) {
  EngineOptions options = TestOptions(GetParam());
  options.scheduler.queue_capacity = 64;
  options.scheduler.swap_blocks = swap_blocks;
  std::unique_ptr<HostSwapCopier> swap;
  if (swap_blocks > 0) {
    swap = std::make_unique<HostSwapCopier>(
        ModelMemory{nullptr, memory_.kv(), options.scheduler.geometry.block_bytes}, swap_blocks, 1);
  }
  SwapGate swap_gate(&memory_.gate(), swap.get(), /*first_layer=*/1, swap_blocks > 0 ? 1 : 0);
  FakeRunner stepwise(&model_, &swap_gate);
  ThreadedRunner threaded(&stepwise);
  ModelRunner* const runner = GetParam() == 1 ? static_cast<ModelRunner*>(&stepwise) : &threaded;
  EngineParts parts{&memory_, runner, &copier_, &token_bytes_, &engine_metrics_, &Clock::Real()};
  parts.swap = swap.get();
  engine_ = std::make_unique<Engine>(options, parts);
  engine_->Start();
  std::atomic<bool> done = false;
  std::thread broker([&] {
    std::mt19937 random(3);
    while (!done) {
      const RevokeId id =
          random() % 8 == 0 ? memory_.RevokeParameters() : memory_.RevokeKv(1 + random() % 8);
      while (!done && !memory_.finished_revokes().contains(id)) std::this_thread::yield();
      memory_.RestoreParameters();
      memory_.GrantKvTarget();
    }
  });
  std::atomic<int> complete = 0;
  std::vector<std::thread> clients;
  for (int client = 0; client < 4; ++client) {
    clients.emplace_back([&, client] {
      std::mt19937 random(100 + client);
      for (int i = 0; i < 40; ++i) {
        std::vector<TokenId> prompt(1 + random() % 20, static_cast<TokenId>(random() % 4));
        const auto request = Request(prompt, 1 + static_cast<int>(random() % 20), i);
        struct Reader {
          Mutex mutex;
          CondVar changed;
          int ready = 0;
        };
        auto reader = std::make_shared<Reader>();
        auto stream = engine_->Submit(request, [reader] {
          MutexLock lock(&reader->mutex);
          ++reader->ready;
          reader->changed.Signal();
        });
        ASSERT_TRUE(stream.ok()) << stream.status();
        const bool cancel = random() % 4 == 0;
        if (cancel) engine_->Cancel(**stream);
        Outcome outcome;
        while (!outcome.end.has_value()) {
          {
            MutexLock lock(&reader->mutex);
            while (reader->ready == 0) reader->changed.Wait(&reader->mutex);
            reader->ready = 0;
          }
          outcome.Take(**stream);
        }
        ASSERT_TRUE(outcome.end->status.ok()) << outcome.end->status;
        if (outcome.end->reason == FinishReason::kCancelled) continue;
        ASSERT_EQ(outcome.tokens, Expected(request));
        ++complete;
      }
    });
  }
  for (std::thread& client : clients) client.join();
  done = true;
  broker.join();
  EXPECT_GT(complete, 40);
  EXPECT_EQ(engine_->AwaitDrained(absl::Seconds(10)), 0);
  engine_.reset();  // before the runner
}

TEST_P(EngineFuzz, StormOfClientsCancelsAndRevokes) { Storm(0); }

TEST_P(EngineFuzz, StormWithKvThatGoesToHostMemoryAndBack) { Storm(60); }

INSTANTIATE_TEST_SUITE_P(Depth, EngineFuzz, ::testing::Values(1, 2));

}  // namespace
}  // namespace palimpsest
