// What a step costs beside the model: scheduling and committing it, and sampling its tokens.
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "worker/core/sampling.h"
#include "worker/core/scheduler.h"

namespace palimpsest {
namespace {

class NoBytes : public TokenBytes {
 public:
  absl::string_view BytesOf(TokenId) const override { return "x"; }
};

// The shape of SmolLM2-135M: blocks of 16 tokens and 360 KiB in slabs of 2 MiB.
SchedulerConfig Config(int batch) {
  SchedulerConfig config;
  config.geometry = {
      .slab_bytes = MiB(2), .block_bytes = KiB(360), .region_slabs = 4096, .block_tokens = 16};
  config.max_kv_slabs = 4096;
  config.vocab_size = 49152;
  config.max_sequence_tokens = 8192;
  config.max_batch_sequences = batch;
  config.max_step_tokens = 512;
  return config;
}

std::vector<RegionIndex> AllSlabs(int32_t count) {
  std::vector<RegionIndex> slabs;
  for (int32_t i = 0; i < count; ++i) slabs.push_back(RegionIndex(i));
  return slabs;
}

// Every running sequence is in its decode phase; those that end are replaced.
void DecodeStep(benchmark::State& state) {
  const auto batch = static_cast<int>(state.range(0));
  const SchedulerConfig config = Config(batch);
  const NoBytes token_bytes;
  Scheduler scheduler(config, &token_bytes);
  scheduler.OnSlabsMapped(AllSlabs(config.geometry.region_slabs));
  std::mt19937 random(1);
  const auto add = [&] {
    SequenceRequest request;
    request.prompt.assign(500, static_cast<TokenId>(random() % 49152));
    request.params.max_tokens = 1000 + static_cast<int32_t>(random() % 4000);
    request.params.stop = {"a stop string", "another"};
    benchmark::DoNotOptimize(scheduler.Add(std::move(request)));
  };
  const auto step = [&] {
    const StepPlan& plan = scheduler.Schedule();
    StepResult result;
    for (const SequenceChunk& chunk : plan.chunks) {
      result.sampled.emplace_back();
      if (chunk.sampling == nullptr) continue;
      result.sampled.back().emplace().token = static_cast<TokenId>(random() % 49152);
    }
    scheduler.Commit(std::move(result));
    benchmark::DoNotOptimize(scheduler.Demand());
    for (const SequenceOutput& output : scheduler.TakeOutputs()) {
      if (output.finish.has_value()) add();
    }
  };
  for (int i = 0; i < batch; ++i) add();
  for (int i = 0; i < 2 * batch; ++i) step();
  for (auto _ : state) step();
}
BENCHMARK(DecodeStep)->Arg(1)->Arg(8)->Arg(32)->Arg(256)->Unit(benchmark::kMicrosecond);

// Moving a quarter of the mapped slabs away under 32 running sequences and taking them back.
void GiveSlabs(benchmark::State& state) {
  SchedulerConfig config = Config(32);
  config.geometry.region_slabs = config.max_kv_slabs = 512;
  const NoBytes token_bytes;
  Scheduler scheduler(config, &token_bytes);
  scheduler.OnSlabsMapped(AllSlabs(512));
  for (int i = 0; i < 32; ++i) {
    SequenceRequest request;
    request.prompt.assign(600, i);
    benchmark::DoNotOptimize(scheduler.Add(std::move(request)));
  }
  for (int i = 0; i < 64; ++i) {
    StepResult result;
    for (const SequenceChunk& chunk : scheduler.Schedule().chunks) {
      result.sampled.emplace_back();
      if (chunk.sampling != nullptr) result.sampled.back().emplace();
    }
    scheduler.Commit(std::move(result));
  }
  for (auto _ : state) {
    const Scheduler::Give give = scheduler.GiveSlabs(128);
    scheduler.OnSlabsMapped(give.slabs);
  }
}
BENCHMARK(GiveSlabs)->Unit(benchmark::kMicrosecond);

void SampleToken(benchmark::State& state, SamplingParams params) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(49152);
  for (float& logit : logits) logit = normal(random);
  SamplingScratch scratch;
  int64_t index = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(Sample(logits, {params, {}, index++}, scratch));
  }
}
BENCHMARK_CAPTURE(SampleToken, greedy, {.temperature = 0})->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(SampleToken, plain, {})->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(SampleToken, top_k_40, {.top_k = 40})->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(SampleToken, top_p_95, {.top_p = 0.95f})->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(SampleToken, logprobs_5, {.temperature = 0, .logprobs = 5})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace palimpsest

BENCHMARK_MAIN();
