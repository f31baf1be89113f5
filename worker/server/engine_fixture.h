// An engine on a fake model, with memory that the test plays the broker of.
#ifndef PALIMPSEST_WORKER_SERVER_ENGINE_FIXTURE_H_
#define PALIMPSEST_WORKER_SERVER_ENGINE_FIXTURE_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/metrics.h"
#include "gtest/gtest.h"
#include "worker/compute/cpu/host_block_copier.h"
#include "worker/core/fake_model.h"
#include "worker/memory/fake_memory_client.h"
#include "worker/server/engine.h"

namespace palimpsest {

class LetterTokens : public TokenBytes {
 public:
  LetterTokens() {
    for (char c = 'A'; c < 'A' + 50; ++c) texts_.push_back(std::string(1, c));
  }
  absl::string_view BytesOf(TokenId token) const override { return texts_.at(token); }

 private:
  std::vector<std::string> texts_;
};

inline EngineOptions TestOptions(int32_t pipeline_depth) {
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
  scheduler.pipeline_depth = pipeline_depth;
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

// The parameter is the depth of the pipeline.
class EngineTest : public ::testing::TestWithParam<int> {
 protected:
  explicit EngineTest(const EngineOptions& options = TestOptions(GetParam()))
      : options_(options),
        memory_(options.scheduler.geometry.slab_bytes, options.scheduler.geometry.region_slabs),
        model_(ModelConfig(), memory_.kv()),
        runner_(&model_, &memory_.gate(),
                {.depth = GetParam(),
                 .seed = 5,
                 .before_execution = [this](const StepPlan&) { clock_.Advance(step_takes_); }}),
        copier_({nullptr, memory_.kv(), options.scheduler.geometry.block_bytes}),
        metrics_(MetricProcess::kWorker),
        engine_metrics_(metrics_) {
    memory_.SetBeforeGive([this] { EXPECT_EQ(runner_.steps_in_flight(), 0); });
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
    return FakeModel::Reference(ModelConfig(), request.prompt, 0, request.params,
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
  absl::Duration step_takes_;
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

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_ENGINE_FIXTURE_H_
