// The engine on the real CPU runner: memory that comes and goes changes neither a token nor a bit
// of a log-probability.
#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "common/clock.h"
#include "gtest/gtest.h"
#include "worker/compute/cpu/cpu_runner.h"
#include "worker/compute/cpu/host_block_copier.h"
#include "worker/compute/cpu/host_swap_copier.h"
#include "worker/compute/cpu/test_model.h"
#include "worker/core/swap_gate.h"
#include "worker/core/threaded_runner.h"
#include "worker/memory/fake_memory_client.h"
#include "worker/server/engine.h"
#include "worker/server/engine_cpu_fixture.h"

namespace palimpsest {
namespace {

constexpr int32_t kBlockTokens = 4;
constexpr int32_t kRegionSlabs = 96;

struct WorkerShape {
  int32_t batch = 1;
  int32_t step_tokens = 1;
  int32_t pipeline_depth = 1;
  int32_t swap_blocks = 0;
  int32_t swap_overlap_blocks = 0;
  int32_t sequence_tokens = 120;
  int32_t sample_heads_every = 0;
};

// One worker: a model, its memory and an engine.
class Worker {
 public:
  Worker(const TestModel& model, const WorkerShape& shape)
      : config_(model.config()),
        block_bytes_(config_.KvBytes(kBlockTokens)),
        // Not a multiple of the block, so that blocks straddle slabs.
        slab_bytes_(RoundUp(block_bytes_ * 2, Bytes(64)) + Bytes(128)),
        memory_(slab_bytes_, kRegionSlabs),
        engine_metrics_(metrics_) {
    const ModelMemory memory{model.image(), memory_.kv(), block_bytes_};
    copier_ = std::make_unique<HostBlockCopier>(memory);
    if (shape.swap_blocks > 0) {
      swap_ = std::make_unique<HostSwapCopier>(memory, shape.swap_blocks, config_.num_layers);
      gate_ = std::make_unique<SwapGate>(&memory_.gate(), swap_.get(), 1, config_.num_layers);
    }
    ParameterGate* const gate = gate_ != nullptr ? gate_.get() : &memory_.gate();
    CpuRunnerOptions runner_options = {.threads = 2, .block_tokens = kBlockTokens};
    runner_options.head_sampling = {.every = shape.sample_heads_every, .recent_tokens = 40};
    auto runner = CpuRunner::Create(config_, model.layout(), memory, gate, runner_options);
    EXPECT_TRUE(runner.ok()) << runner.status();
    runner_ = *std::move(runner);
    threaded_ = std::make_unique<ThreadedRunner>(runner_.get());
    EngineOptions options;
    SchedulerConfig& scheduler = options.scheduler;
    scheduler.geometry = {.slab_bytes = slab_bytes_,
                          .block_bytes = block_bytes_,
                          .region_slabs = kRegionSlabs,
                          .block_tokens = kBlockTokens};
    scheduler.max_kv_slabs = kRegionSlabs;
    scheduler.vocab_size = config_.vocab_size;
    scheduler.max_sequence_tokens = shape.sequence_tokens;
    scheduler.sliding_window = config_.sliding_window.value_or(0);
    scheduler.max_batch_sequences = shape.batch;
    scheduler.max_step_tokens = shape.step_tokens;
    scheduler.pipeline_depth = shape.pipeline_depth;
    scheduler.swap_blocks = shape.swap_blocks;
    options.swap_overlap_blocks = shape.swap_overlap_blocks;
    if (shape.sample_heads_every > 0) {
      options.heads.emplace();
      options.heads->layers = config_.num_layers;
      options.heads->kv_heads = config_.num_kv_heads;
    }
    options.kv_target = {.low_water_slabs = 1, .high_water_slabs = 2, .max_slabs = kRegionSlabs};
    EXPECT_TRUE(options.Validate().ok()) << options.Validate();
    EngineParts parts;
    parts.memory = &memory_;
    parts.runner = runner_.get();
    if (shape.pipeline_depth > 1) parts.runner = threaded_.get();
    parts.copier = copier_.get();
    parts.token_bytes = &token_bytes_;
    parts.metrics = &engine_metrics_;
    parts.clock = &clock_;
    parts.swap = swap_.get();
    engine_ = std::make_unique<Engine>(options, parts);
  }

  Engine& engine() { return *engine_; }
  SwapCopier* swap() { return swap_.get(); }
  FakeMemoryClient& memory() { return memory_; }
  FakeClock& clock() { return clock_; }

 private:
  const ModelConfig config_;
  const Bytes block_bytes_;
  const Bytes slab_bytes_;
  FakeMemoryClient memory_;
  std::unique_ptr<BlockCopier> copier_;
  std::unique_ptr<SwapCopier> swap_;
  std::unique_ptr<SwapGate> gate_;
  std::unique_ptr<CpuRunner> runner_;
  std::unique_ptr<ThreadedRunner> threaded_;
  Metrics metrics_{MetricProcess::kWorker};
  EngineMetrics engine_metrics_;
  NoBytes token_bytes_;
  FakeClock clock_;
  std::unique_ptr<Engine> engine_;
};

// All at once, while slabs and parameters are taken and given back at random.
std::vector<Output> RunUnderPressure(Worker& worker, const std::vector<SequenceRequest>& requests,
                                     std::mt19937& random) {
  std::vector<std::shared_ptr<GenerationStream>> streams;
  for (const SequenceRequest& request : requests) {
    auto stream = worker.engine().Submit(request, [] {});
    EXPECT_TRUE(stream.ok()) << stream.status();
    streams.push_back(*std::move(stream));
  }
  const auto chance = [&](int percent) { return static_cast<int>(random() % 100) < percent; };
  bool parameters = true;
  for (int turn = 0; worker.engine().AwaitDrained(absl::ZeroDuration()) > 0; ++turn) {
    if (turn > 20000) {
      ADD_FAILURE() << "no end in sight";
      break;
    }
    FakeMemoryClient& memory = worker.memory();
    if (chance(40)) memory.GrantKvTarget();
    if (chance(12)) memory.RevokeKv(1 + random() % 10);
    if (chance(3) && parameters) {
      memory.RevokeParameters();
      parameters = false;
    } else if (chance(30) && !parameters) {
      memory.RestoreParameters();
      parameters = true;
    }
    memory.FailStage(chance(6) ? random() % 3 : -1);
    worker.clock().Advance(absl::Milliseconds(100));
    const bool busy = worker.engine().RunOnce();
    if (!busy && worker.swap() != nullptr) worker.swap()->AwaitAll();
  }
  std::vector<Output> outputs(streams.size());
  for (size_t i = 0; i < streams.size(); ++i) outputs[i].Take(*streams[i]);
  return outputs;
}

TEST(EngineOnCpuRunner, NeitherPressureNorStepsInFlightChangeABit) {
  int64_t preemptions = 0;
  for (uint32_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const TestModel model(RandomConfig(random), seed);
    Worker calm(model, {.batch = 1, .step_tokens = 1 + static_cast<int32_t>(random() % 40)});
    calm.memory().GrantKv(kRegionSlabs);
    const int32_t batch = 2 + random() % 6;
    const int32_t step_tokens = batch + random() % 24;
    const auto requests = RandomRequests(random, model.config().vocab_size, 14);
    std::vector<Output> alone;
    for (const SequenceRequest& request : requests)
      alone.push_back(RunAlone(calm.engine(), request));
    for (int32_t depth = 1; depth <= kMaxPipelineDepth; ++depth) {
      SCOPED_TRACE(depth);
      Worker pressed(model, {batch, step_tokens, depth});
      const std::vector<Output> outputs = RunUnderPressure(pressed, requests, random);
      for (size_t i = 0; i < requests.size(); ++i) {
        ASSERT_NO_FATAL_FAILURE(ExpectSame(outputs[i], alone[i]));
        preemptions += outputs[i].end->usage.preemptions;
      }
    }
  }
  EXPECT_GT(preemptions, 40);
}

TEST(EngineOnCpuRunner, KvThatWentToHostMemoryAndBackChangesNoBit) {
  SchedulerCounters sum;
  for (uint32_t seed = 100; seed < 112; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const TestModel model(RandomConfig(random), seed);
    Worker calm(model, {.batch = 1, .step_tokens = 1 + static_cast<int32_t>(random() % 40)});
    calm.memory().GrantKv(kRegionSlabs);
    WorkerShape shape{.batch = 2 + static_cast<int32_t>(random() % 6)};
    shape.step_tokens = shape.batch + static_cast<int32_t>(random() % 24);
    shape.swap_blocks = 8 + static_cast<int32_t>(random() % 100);
    shape.swap_overlap_blocks = random() % 3 == 0 ? 0 : 1000;
    const auto requests = RandomRequests(random, model.config().vocab_size, 14);
    std::vector<Output> alone;
    for (const SequenceRequest& request : requests)
      alone.push_back(RunAlone(calm.engine(), request));
    for (int32_t depth = 1; depth <= kMaxPipelineDepth; ++depth) {
      SCOPED_TRACE(depth);
      shape.pipeline_depth = depth;
      Worker pressed(model, shape);
      const std::vector<Output> outputs = RunUnderPressure(pressed, requests, random);
      for (size_t i = 0; i < requests.size(); ++i) {
        ASSERT_NO_FATAL_FAILURE(ExpectSame(outputs[i], alone[i]));
      }
      const SchedulerCounters counters = pressed.engine().Stats().counters;
      sum.swapped_preemptions += counters.swapped_preemptions;
      sum.blocks_swapped_in += counters.blocks_swapped_in;
    }
  }
  EXPECT_GT(sum.swapped_preemptions, 40);
  EXPECT_GT(sum.blocks_swapped_in, 100);
}

TEST(EngineOnCpuRunner, SampledHeadsAreKeptAndChangeNoToken) {
  std::mt19937 random(31);
  ModelConfig config = RandomConfig(TestFamily::kLlama, random);
  config.sliding_window.reset();
  config.max_position = 240;
  const TestModel model(config, 5);
  SequenceRequest request;
  for (int t = 0; t < 180; ++t) {
    request.prompt.push_back(
        static_cast<TokenId>(random() % static_cast<uint32_t>(config.vocab_size)));
  }
  request.params.max_tokens = 40;
  request.params.logprobs = 2;
  request.params.ignore_eos = true;
  WorkerShape shape = {.batch = 1, .step_tokens = 64, .sequence_tokens = 240};
  Worker plain(model, shape);
  shape.sample_heads_every = 4;
  Worker sampled(model, shape);
  plain.memory().GrantKv(kRegionSlabs);
  sampled.memory().GrantKv(kRegionSlabs);
  ExpectSame(RunAlone(sampled.engine(), request), RunAlone(plain.engine(), request));
  EXPECT_EQ(plain.engine().heads(), nullptr);
  const Engine::Heads* heads = sampled.engine().heads();
  ASSERT_NE(heads, nullptr);
  // 3 steps of the prompt, 39 of decoding.
  EXPECT_EQ(heads->mass.samples(), 10);
  EXPECT_EQ(heads->effect.samples(), 10);
  EXPECT_GT(heads->mass.mass(heads->mass.Ranking().back()), 0);
  EXPECT_GT(heads->effect.mass(heads->effect.Ranking().back()), 0);
}

}  // namespace
}  // namespace palimpsest
