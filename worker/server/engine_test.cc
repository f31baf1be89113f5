#include "worker/server/engine.h"

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/compute/cpu/host_block_copier.h"
#include "worker/core/fake_model.h"
#include "worker/memory/fake_memory_client.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

class LetterTokens : public TokenBytes {
 public:
  LetterTokens() {
    for (char c = 'A'; c < 'A' + 50; ++c) texts_.push_back(std::string(1, c));
  }
  absl::string_view BytesOf(TokenId token) const override { return texts_.at(token); }

 private:
  std::vector<std::string> texts_;
};

EngineOptions TestOptions() {
  EngineOptions options;
  SchedulerConfig& scheduler = options.scheduler;
  scheduler.geometry.block_tokens = 4;
  scheduler.geometry.block_bytes = Bytes(4 * FakeModel::kEntryBytes + 8);
  scheduler.geometry.slab_bytes = Bytes(128);
  scheduler.geometry.region_slabs = 40;
  scheduler.max_kv_slabs = 40;
  scheduler.vocab_size = 50;
  scheduler.max_sequence_tokens = 80;
  scheduler.max_batch_sequences = 4;
  scheduler.max_step_tokens = 16;
  scheduler.queue_capacity = 4;
  options.kv_target = {.low_water_slabs = 1, .high_water_slabs = 4, .max_slabs = 40};
  return options;
}

// What came out of a request's stream.
struct Outcome {
  std::vector<TokenId> tokens;
  std::optional<GenerationStream::End> end;

  void Take(GenerationStream& stream) {
    GenerationStream::Batch batch = stream.Take();
    for (const SampledToken& token : batch.tokens) tokens.push_back(token.token);
    if (batch.end.has_value()) {
      EXPECT_FALSE(end.has_value()) << "two ends";
      end = std::move(batch.end);
    }
  }
};

class EngineTest : public ::testing::Test {
 protected:
  explicit EngineTest(EngineOptions options = TestOptions())
      : options_(options),
        memory_(options.scheduler.geometry.slab_bytes, options.scheduler.geometry.region_slabs),
        model_(ModelConfig(), memory_.kv()),
        runner_(&model_, &memory_.gate()),
        copier_({nullptr, memory_.kv(), options.scheduler.geometry.block_bytes}),
        metrics_(MetricProcess::kWorker),
        engine_metrics_(metrics_) {
    Restart(options);
    memory_.Connect();
  }

  void Restart(const EngineOptions& options) {
    EXPECT_TRUE(options.Validate().ok()) << options.Validate();
    engine_.reset();
    engine_ = std::make_unique<Engine>(
        options,
        EngineParts{&memory_, &runner_, &copier_, &token_bytes_, &engine_metrics_, &clock_});
  }

  FakeModel::Config ModelConfig() const {
    return {options_.scheduler.geometry, options_.scheduler.vocab_size,
            options_.scheduler.sliding_window};
  }

  static SequenceRequest Request(std::vector<TokenId> prompt, int32_t max_tokens = 10,
                                 uint64_t seed = 1) {
    SequenceRequest request;
    request.prompt = std::move(prompt);
    request.params.max_tokens = max_tokens;
    request.params.seed = seed;
    return request;
  }

  std::shared_ptr<GenerationStream> Submit(SequenceRequest request) {
    auto stream = engine_->Submit(std::move(request), [] {});
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? *stream : nullptr;
  }

  std::vector<TokenId> Expected(const SequenceRequest& request) const {
    return FakeModel::Reference(ModelConfig(), request.prompt, 0, request.params.seed,
                                request.params.max_tokens);
  }

  void RunUntilIdle() {
    for (int i = 0; engine_->RunOnce(); ++i) ASSERT_LT(i, 10000);
  }

  // Runs until the stream has ended, with KV memory as asked for.
  Outcome RunToEnd(GenerationStream& stream) {
    Outcome outcome;
    for (int i = 0; i < 10000 && !outcome.end.has_value(); ++i) {
      memory_.GrantKvTarget();
      engine_->RunOnce();
      outcome.Take(stream);
    }
    EXPECT_TRUE(outcome.end.has_value()) << "no end";
    return outcome;
  }

  const EngineOptions options_;
  FakeMemoryClient memory_;
  FakeModel model_;
  FakeRunner runner_;
  HostBlockCopier copier_;
  Metrics metrics_;
  EngineMetrics engine_metrics_;
  LetterTokens token_bytes_;
  FakeClock clock_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineTest, StreamsTheModelsTokens) {
  const auto request = Request({1, 2, 3, 4, 5, 6, 7}, 12);
  const auto stream = Submit(request);
  const Outcome outcome = RunToEnd(*stream);
  EXPECT_EQ(outcome.tokens, Expected(request));
  ASSERT_TRUE(outcome.end->status.ok());
  EXPECT_EQ(outcome.end->reason, FinishReason::kLength);
  EXPECT_EQ(outcome.end->usage.prompt_tokens, 7);
  EXPECT_EQ(outcome.end->usage.output_tokens, 12);
  EXPECT_EQ(engine_->Stats().running, 0);
  EXPECT_EQ(engine_->Stats().counters.generated_tokens, 12);
  EXPECT_TRUE(engine_->Stats().broker_connected);
}

TEST_F(EngineTest, ReusesThePrefixOfAnEarlierRequest) {
  const auto request = Request({1, 2, 3, 4, 5, 6, 7, 8, 9}, 4);
  RunToEnd(*Submit(request));
  const Outcome second = RunToEnd(*Submit(request));
  EXPECT_EQ(second.tokens, Expected(request));
  EXPECT_EQ(second.end->usage.cached_tokens, 8);
}

TEST_F(EngineTest, RefusesBadPromptsAtOnce) {
  const auto refuse = [&](SequenceRequest request) {
    return engine_->Submit(std::move(request), [] {}).status();
  };
  EXPECT_EQ(refuse(Request({})).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refuse(Request({50})).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refuse(Request({-1})).code(), absl::StatusCode::kInvalidArgument);
  const absl::Status too_long = refuse(Request(std::vector<TokenId>(80, 1)));
  EXPECT_EQ(too_long.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(too_long.message()), HasSubstr("80 tokens"));
}

TEST_F(EngineTest, RefusesMoreThanTheQueueHolds) {
  std::vector<std::shared_ptr<GenerationStream>> streams;
  for (int i = 0; i < options_.scheduler.max_sequences(); ++i)
    streams.push_back(Submit(Request({1})));
  EXPECT_EQ(engine_->Submit(Request({1}), [] {}).status().code(),
            absl::StatusCode::kResourceExhausted);
  for (const auto& stream : streams) EXPECT_TRUE(RunToEnd(*stream).end->status.ok());
  EXPECT_TRUE(RunToEnd(*Submit(Request({1}))).end->status.ok());
}

TEST_F(EngineTest, UnreadOutputsAreBounded) {
  std::vector<std::shared_ptr<GenerationStream>> unread;
  absl::Status status;
  while (status.ok() && unread.size() < 1000) {
    auto stream = engine_->Submit(Request({1}, 1), [] {});
    status = stream.status();
    if (stream.ok()) unread.push_back(*stream);
    memory_.GrantKvTarget();
    RunUntilIdle();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(static_cast<int>(unread.size()), 2 * options_.scheduler.max_sequences());
  unread.clear();
  EXPECT_TRUE(RunToEnd(*Submit(Request({1}))).end->status.ok());
}

TEST_F(EngineTest, CancelEndsTheSequenceAndFreesItsBlocks) {
  memory_.GrantKv(40);
  const auto stream = Submit(Request({1, 2, 3}, 60));
  for (int i = 0; i < 10; ++i) engine_->RunOnce();
  EXPECT_GT(engine_->Stats().blocks_used, 0);
  engine_->Cancel(*stream);
  engine_->Cancel(*stream);
  RunUntilIdle();
  Outcome outcome;
  outcome.Take(*stream);
  EXPECT_EQ(outcome.end->reason, FinishReason::kCancelled);
  EXPECT_EQ(engine_->Stats().blocks_used, 0);
  engine_->Cancel(*stream);
  RunUntilIdle();
}

TEST_F(EngineTest, CancelBeforeTheFirstTurnStillEndsTheStream) {
  const auto stream = Submit(Request({1}));
  engine_->Cancel(*stream);
  RunUntilIdle();
  Outcome outcome;
  outcome.Take(*stream);
  EXPECT_EQ(outcome.end->reason, FinishReason::kCancelled);
}

TEST_F(EngineTest, SlowReaderLosesItsOwnRequestOnly) {
  EngineOptions options = TestOptions();
  options.stream_tokens = 5;
  Restart(options);
  memory_.GrantKv(40);
  const auto slow = Submit(Request({1, 2, 3}, 30));
  const auto request = Request({4, 5, 6}, 30);
  const auto fast = Submit(request);
  EXPECT_EQ(RunToEnd(*fast).tokens, Expected(request));
  Outcome outcome;
  outcome.Take(*slow);
  EXPECT_EQ(outcome.tokens.size(), 5);
  EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->Stats().running, 0);
}

TEST_F(EngineTest, ReadyIsCalledForTokensAndTheEnd) {
  memory_.GrantKv(40);
  int calls = 0;
  auto stream = engine_->Submit(Request({1}, 5), [&] { ++calls; });
  RunToEnd(**stream);
  EXPECT_EQ(calls, 5);
}

TEST_F(EngineTest, KvRevokedInTheMiddleChangesNoToken) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, 50);
  const auto stream = Submit(request);
  for (int i = 0; i < 20; ++i) engine_->RunOnce();
  const RevokeId some = memory_.RevokeKv(35);
  engine_->RunOnce();
  EXPECT_EQ(memory_.finished_revokes().at(some).size(), 35);
  const RevokeId all = memory_.RevokeKv(100);
  engine_->RunOnce();
  EXPECT_EQ(memory_.finished_revokes().at(all).size(), 5);
  EXPECT_EQ(memory_.Mapped().kv, 0);
  const Outcome outcome = RunToEnd(*stream);
  EXPECT_EQ(outcome.tokens, Expected(request));
  EXPECT_EQ(outcome.end->usage.preemptions, 1);
}

TEST_F(EngineTest, ParametersTakenAreAskedForAgain) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3}, 20);
  const auto stream = Submit(request);
  for (int i = 0; i < 5; ++i) engine_->RunOnce();
  const RevokeId id = memory_.RevokeParameters();
  engine_->RunOnce();
  EXPECT_TRUE(memory_.finished_revokes().contains(id));
  EXPECT_THAT(memory_.activations(), ::testing::Contains(ActivationReason::kRequest));
  const int64_t steps = runner_.steps();
  RunUntilIdle();
  EXPECT_EQ(runner_.steps(), steps);
  memory_.RestoreParameters();
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
}

TEST_F(EngineTest, ParametersAreAskedForEagerlyWhenNobodyWaits) {
  RunUntilIdle();
  memory_.RevokeParameters();
  RunUntilIdle();
  EXPECT_TRUE(memory_.activations().empty());
  memory_.Connect(true);
  RunUntilIdle();
  EXPECT_THAT(memory_.activations(), ::testing::ElementsAre(ActivationReason::kEager));
}

TEST_F(EngineTest, RefusedActivationFailsRequestsWithTheHint) {
  memory_.RevokeParameters();
  const auto stream = Submit(Request({1}));
  engine_->RunOnce();
  memory_.RefuseActivation("the pool is full", absl::Seconds(3));
  const Outcome outcome = RunToEnd(*stream);
  EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(outcome.end->status.message()), HasSubstr("the pool is full"));
  EXPECT_EQ(outcome.end->retry_after, absl::Seconds(3));
  memory_.RestoreParameters();
  EXPECT_TRUE(RunToEnd(*Submit(Request({1}))).end->status.ok());
}

TEST_F(EngineTest, StepThatFailsAtTheGateIsRepeated) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3, 4, 5, 6}, 20);
  const auto stream = Submit(request);
  for (int i = 0; i < 5; ++i) engine_->RunOnce();
  memory_.FailStage(1);
  for (int i = 0; i < 5; ++i) {
    engine_->RunOnce();
    clock_.Advance(absl::Seconds(1));
  }
  memory_.FailStage(-1);
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
}

TEST_F(EngineTest, StepsThatKeepFailingFailTheRequests) {
  memory_.GrantKv(40);
  memory_.FailStage(2);
  const auto stream = Submit(Request({1, 2, 3}));
  Outcome outcome;
  for (int i = 0; i < 1000 && !outcome.end.has_value(); ++i) {
    engine_->RunOnce();
    clock_.Advance(absl::Seconds(1));
    outcome.Take(*stream);
  }
  ASSERT_TRUE(outcome.end.has_value());
  EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(EngineTest, RequestsThatCannotRunFailAfterTheStallTimeout) {
  const auto no_kv = Submit(Request({1, 2, 3}));
  RunUntilIdle();
  clock_.Advance(options_.stall_timeout - absl::Seconds(1));
  RunUntilIdle();
  Outcome outcome;
  outcome.Take(*no_kv);
  EXPECT_FALSE(outcome.end.has_value());
  clock_.Advance(absl::Seconds(1));
  RunUntilIdle();
  outcome.Take(*no_kv);
  ASSERT_TRUE(outcome.end.has_value());
  EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(outcome.end->status.message()), HasSubstr("KV slabs"));
  // A quiet hour before it does not count against the next request.
  clock_.Advance(absl::Hours(1));
  EXPECT_TRUE(RunToEnd(*Submit(Request({1}))).end->status.ok());
}

TEST_F(EngineTest, HolesBetweenSlabsDoNotStarveARequest) {
  // Five slabs hold 15 blocks in a row, but only 2 each when none has a neighbour.
  memory_.GrantKvAt({1, 3, 5, 7, 9});
  const auto request = Request(std::vector<TokenId>(50, 3), 5);
  const auto stream = Submit(request);
  RunUntilIdle();
  EXPECT_EQ(runner_.steps(), 0);
  EXPECT_EQ(memory_.Mapped().kv, 5);
  clock_.Advance(absl::Seconds(1));
  RunUntilIdle();
  EXPECT_EQ(memory_.Mapped().kv, 2);
  EXPECT_EQ(memory_.GrantKv(3), 3);
  Outcome outcome;
  for (int i = 0; i < 100 && !outcome.end.has_value(); ++i) {
    engine_->RunOnce();
    outcome.Take(*stream);
  }
  EXPECT_EQ(outcome.tokens, Expected(request));
}

TEST_F(EngineTest, RunsOnWithoutTheBroker) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3}, 20);
  const auto stream = Submit(request);
  for (int i = 0; i < 5; ++i) engine_->RunOnce();
  memory_.Lose();
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
  EXPECT_FALSE(engine_->Stats().broker_connected);
  memory_.Connect(true);
  RunUntilIdle();
  EXPECT_TRUE(engine_->Stats().broker_connected);
}

TEST_F(EngineTest, ReportsLoadAndAsksForKvAheadOfNeed) {
  RunUntilIdle();
  EXPECT_FALSE(memory_.load().active);
  EXPECT_EQ(memory_.needed(), 0);
  const int32_t idle_target = memory_.target();
  EXPECT_GE(idle_target, 1);
  const auto stream = Submit(Request(std::vector<TokenId>(60, 3), 10));
  engine_->RunOnce();
  EXPECT_TRUE(memory_.load().active);
  EXPECT_GT(memory_.needed(), 0);
  EXPECT_GT(memory_.target(), idle_target);
  memory_.GrantKvTarget();
  engine_->RunOnce();
  engine_->RunOnce();
  EXPECT_GT(memory_.load().kv_slabs_used, 0);
  EXPECT_EQ(memory_.load().running_sequences, 1);
}

TEST_F(EngineTest, DrainRefusesNewRequestsAndWaitsForOldOnes) {
  memory_.GrantKv(40);
  const auto stream = Submit(Request({1, 2, 3}, 5));
  engine_->StartDrain();
  EXPECT_EQ(engine_->Submit(Request({1}), [] {}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->AwaitDrained(absl::ZeroDuration()), 1);
  EXPECT_TRUE(RunToEnd(*stream).end->status.ok());
  EXPECT_EQ(engine_->AwaitDrained(absl::InfiniteDuration()), 0);
}

TEST_F(EngineTest, StopEndsEveryStream) {
  memory_.GrantKv(40);
  const auto running = Submit(Request({1, 2, 3}, 50));
  for (int i = 0; i < 3; ++i) engine_->RunOnce();
  const auto fresh = Submit(Request({4}));
  engine_->Stop();
  for (const auto& stream : {running, fresh}) {
    Outcome outcome;
    outcome.Take(*stream);
    ASSERT_TRUE(outcome.end.has_value());
    EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(engine_->Submit(Request({1}), [] {}).status().code(), absl::StatusCode::kUnavailable);
}

// Everything at once, in one thread: what comes out is always what an undisturbed model says.
TEST_F(EngineTest, DisturbedRequestsSayTheSame) {
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
    if (chance(5)) memory_.FailStage(random() % 3);
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
      EXPECT_TRUE(tracked.cancelled) << tracked.outcome.end->status;
      ASSERT_TRUE(std::equal(tracked.outcome.tokens.begin(), tracked.outcome.tokens.end(),
                             expected.begin()));
    }
  }
  EXPECT_GT(complete, 100);
}

class EngineThreadTest : public EngineTest {};

// The engine's thread, clients that read and cancel, and a broker that gives and takes, in
// parallel.
TEST_F(EngineThreadTest, StormOfClientsCancelsAndRevokes) {
  EngineOptions options = TestOptions();
  options.scheduler.queue_capacity = 64;
  EngineParts parts{&memory_, &runner_, &copier_, &token_bytes_, &engine_metrics_, &Clock::Real()};
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
  engine_->Stop();
}

}  // namespace
}  // namespace palimpsest
