// What a step costs beside the model: scheduling and committing it, and sampling its tokens.
#include <benchmark/benchmark.h>

#include <deque>
#include <random>
#include <utility>
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
      .slab_bytes = MiB(2), .block_bytes = KiB(360), .region_slabs = 16384, .block_tokens = 16};
  config.max_kv_slabs = config.geometry.region_slabs;
  config.vocab_size = 49152;
  config.max_sequence_tokens = 131072;
  config.max_batch_sequences = batch;
  config.max_step_tokens = 8192;
  config.queue_capacity = 1024;
  return config;
}

std::vector<RegionIndex> AllSlabs(int32_t count) {
  std::vector<RegionIndex> slabs;
  for (int32_t i = 0; i < count; ++i) slabs.push_back(RegionIndex(i));
  return slabs;
}

// A scheduler beside a model that takes no time and samples at random.
class Bench {
 public:
  explicit Bench(const SchedulerConfig& config)
      : config_(config), scheduler_(config, &token_bytes_) {
    scheduler_.OnSlabsMapped(AllSlabs(config.geometry.region_slabs));
  }

  void Add(int32_t prompt_size, int32_t max_tokens) {
    Add(std::vector<TokenId>(prompt_size, static_cast<TokenId>(random_() % 49152)), max_tokens);
  }

  void Add(std::vector<TokenId> prompt, int32_t max_tokens) {
    SequenceRequest request;
    request.prompt = std::move(prompt);
    request.params.max_tokens = max_tokens;
    request.params.stop = {"a stop string", "another"};
    benchmark::DoNotOptimize(scheduler_.Add(std::move(request)));
  }

  // What the engine does in a turn: a step is planned, one is committed, the demand is stated.
  // Returns how many sequences have ended.
  int Turn() {
    while (scheduler_.in_flight() < config_.pipeline_depth) {
      const StepPlan& plan = scheduler_.Schedule();
      if (plan.chunks.empty()) break;
      StepResult& result = results_.emplace_back();
      result.sampled.resize(plan.chunks.size());
      for (size_t i = 0; i < plan.chunks.size(); ++i) {
        if (plan.chunks[i].sampling == nullptr) continue;
        result.sampled[i].emplace().token = static_cast<TokenId>(random_() % 49152);
      }
    }
    if (results_.empty()) return 0;
    scheduler_.Commit(std::move(results_.front()));
    results_.pop_front();
    benchmark::DoNotOptimize(scheduler_.Demand());
    int ended = 0;
    for (const SequenceOutput& output : scheduler_.TakeOutputs()) {
      ended += output.finish.has_value();
    }
    return ended;
  }

  Scheduler& scheduler() { return scheduler_; }
  int32_t Random(int32_t below) { return static_cast<int32_t>(random_() % below); }

 private:
  const SchedulerConfig config_;
  const NoBytes token_bytes_;
  Scheduler scheduler_;
  std::deque<StepResult> results_;
  std::mt19937 random_{1};
};

// Every running sequence is in its decode phase; those that end are replaced.
void DecodeStep(benchmark::State& state) {
  const auto batch = static_cast<int>(state.range(0));
  SchedulerConfig config = Config(batch);
  config.pipeline_depth = static_cast<int32_t>(state.range(1));
  Bench bench(config);
  for (int i = 0; i < batch; ++i) bench.Add(500, 1000 + bench.Random(4000));
  for (int i = 0; i < 2 * batch; ++i) bench.Turn();
  for (auto _ : state) {
    for (int ended = bench.Turn(); ended > 0; --ended) bench.Add(500, 1000 + bench.Random(4000));
  }
}
BENCHMARK(DecodeStep)
    ->ArgNames({"batch", "depth"})
    ->ArgsProduct({{1, 32, 256, 512}, {1, 2}})
    ->Unit(benchmark::kMicrosecond);

// A full step of one prompt.
void PrefillStep(benchmark::State& state) {
  Bench bench(Config(512));
  for (auto _ : state) {
    if (bench.scheduler().idle()) bench.Add(131071, 1);
    bench.Turn();
  }
}
BENCHMARK(PrefillStep)->Unit(benchmark::kMicrosecond);

// All sequences of a batch of 512 end in the same step, and as many are admitted.
void WholeBatchEnds(benchmark::State& state) {
  Bench bench(Config(512));
  for (auto _ : state) {
    for (int i = 0; i < 512; ++i) bench.Add(16, 1);
    bench.Turn();
  }
}
BENCHMARK(WholeBatchEnds)->Unit(benchmark::kMicrosecond);

// Decodes beside a queue whose first request is long, half of it cached, and finds no room.
void DecodeStepWithBlockedQueue(benchmark::State& state) {
  SchedulerConfig config = Config(32);
  config.geometry.region_slabs = config.max_kv_slabs = 2800;  // 15,928 blocks
  Bench bench(config);
  std::vector<TokenId> prompt(120000, 1);
  bench.Add(prompt, 11000);
  bench.Add(std::vector<TokenId>(120000, 2), 11000);
  while (bench.scheduler().counters().generated_tokens < 2) bench.Turn();
  prompt.resize(60000);
  prompt.resize(131000, 3);
  for (int i = 0; i < 1000; ++i) bench.Add(prompt, 10);
  for (auto _ : state) bench.Turn();
  if (bench.scheduler().waiting() != 1000) state.SkipWithError("the queue is not blocked");
}
BENCHMARK(DecodeStepWithBlockedQueue)->Iterations(2000)->Unit(benchmark::kMicrosecond);

// Moving a quarter of the mapped slabs away under 32 running sequences and taking them back.
void GiveSlabs(benchmark::State& state) {
  SchedulerConfig config = Config(32);
  config.geometry.region_slabs = config.max_kv_slabs = 512;
  Bench bench(config);
  for (int i = 0; i < 32; ++i) bench.Add(600, 1000);
  for (int i = 0; i < 64; ++i) bench.Turn();
  for (auto _ : state) {
    const Scheduler::Give give = bench.scheduler().GiveSlabs(128);
    bench.scheduler().OnSlabsMapped(give.slabs);
  }
}
BENCHMARK(GiveSlabs)->Unit(benchmark::kMicrosecond);

void SampleToken(benchmark::State& state, const SamplingParams& params) {
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
