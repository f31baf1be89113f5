// The engine, the real memory client and the CPU runner with a broker that takes slabs, brings them
// back and lets layers rotate at every step: neither a token nor a bit of a log-probability
// changes. Memory that was given back is full of NaN.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "common/metrics.h"
#include "common/monotonic_time.h"
#include "gtest/gtest.h"
#include "worker/compute/cpu/cpu_runner.h"
#include "worker/compute/cpu/host_block_copier.h"
#include "worker/compute/cpu/test_model.h"
#include "worker/core/threaded_runner.h"
#include "worker/memory/fake_memory_client.h"
#include "worker/memory/grpc_memory_client.h"
#include "worker/memory/testing/scripted_pool.h"
#include "worker/server/engine.h"
#include "worker/server/engine_cpu_fixture.h"

namespace palimpsest {
namespace {

constexpr int32_t kBlockTokens = 4;
constexpr int32_t kLongest = 120;
constexpr Bytes kSlab = KiB(16);
constexpr absl::Duration kPatience = absl::Seconds(60);

// With enough layers for any number of them to rotate.
ModelConfig DeepConfig(TestFamily family, std::mt19937& random) {
  ModelConfig config = RandomConfig(family, random);
  const std::vector<int32_t> windows = {config.layer_windows.begin(), config.layer_windows.end()};
  config.num_layers = 3 + static_cast<int32_t>(random() % 5);
  config.layer_windows.clear();
  for (int32_t i = 0; !windows.empty() && i < config.num_layers; ++i) {
    config.layer_windows.push_back(windows[static_cast<size_t>(i) % windows.size()]);
  }
  return config;
}

struct Shape {
  int32_t batch = 1;
  int32_t step_tokens = 1;
  int32_t pipeline_depth = 1;
  int32_t kv_slabs = 1;  // places of the KV region
};

// An engine and its runner, on memory that is the caller's.
class Compute {
 public:
  Compute(const TestModel& model, const ModelMemory& memory, MemoryClient* client,
          const Shape& shape)
      : copier_(memory), engine_metrics_(metrics_) {
    const ModelConfig& config = model.config();
    auto runner = CpuRunner::Create(config, model.layout(), memory, &client->gate(),
                                    {.threads = 2, .block_tokens = kBlockTokens});
    EXPECT_TRUE(runner.ok()) << runner.status();
    runner_ = *std::move(runner);
    threaded_ = std::make_unique<ThreadedRunner>(runner_.get());
    EngineOptions options;
    SchedulerConfig& scheduler = options.scheduler;
    scheduler.geometry = {.slab_bytes = kSlab,
                          .block_bytes = memory.kv_block_bytes,
                          .region_slabs = shape.kv_slabs,
                          .block_tokens = kBlockTokens};
    scheduler.max_kv_slabs = shape.kv_slabs;
    scheduler.vocab_size = config.vocab_size;
    scheduler.max_sequence_tokens = kLongest;
    scheduler.sliding_window = config.sliding_window.value_or(0);
    scheduler.max_batch_sequences = shape.batch;
    scheduler.max_step_tokens = shape.step_tokens;
    scheduler.pipeline_depth = shape.pipeline_depth;
    options.kv_target = {.low_water_slabs = 1, .high_water_slabs = 2, .max_slabs = shape.kv_slabs};
    // Turns that wait for the broker pass faster than it answers.
    options.stall_timeout = absl::Hours(1000);
    options.max_step_failures = 1 << 20;
    EXPECT_TRUE(options.Validate().ok()) << options.Validate();
    EngineParts parts;
    parts.memory = client;
    parts.runner = runner_.get();
    if (shape.pipeline_depth > 1) parts.runner = threaded_.get();
    parts.copier = &copier_;
    parts.token_bytes = &token_bytes_;
    parts.metrics = &engine_metrics_;
    parts.clock = &clock_;
    engine_ = std::make_unique<Engine>(options, parts);
  }

  Engine& engine() { return *engine_; }
  FakeClock& clock() { return clock_; }

 private:
  HostBlockCopier copier_;
  std::unique_ptr<CpuRunner> runner_;
  std::unique_ptr<ThreadedRunner> threaded_;
  Metrics metrics_{MetricProcess::kWorker};
  EngineMetrics engine_metrics_;
  NoBytes token_bytes_;
  FakeClock clock_;
  std::unique_ptr<Engine> engine_;
};

// What the requests say on memory that nobody touches.
std::vector<Output> RunUndisturbed(const TestModel& model,
                                   const std::vector<SequenceRequest>& requests) {
  constexpr int32_t kSlabs = 400;
  FakeMemoryClient memory(kSlab, kSlabs);
  Compute compute(model, {model.image(), memory.kv(), model.config().KvBytes(kBlockTokens)},
                  &memory, {.step_tokens = 16, .kv_slabs = kSlabs});
  memory.GrantKv(kSlabs);
  std::vector<Output> outputs;
  for (const SequenceRequest& request : requests) {
    outputs.push_back(RunAlone(compute.engine(), request));
  }
  return outputs;
}

// A worker in a pool that holds its image and a little more than its longest sequence.
class RotatingWorker {
 public:
  RotatingWorker(const TestModel& model, Shape shape)
      : folder_(MakeFolder()), model_(BrokerModel(model)), broker_(folder_, model_) {
    broker_.Start();
    GrpcMemoryClient::Options options;
    options.connection.address = broker_.address();
    options.connection.descriptor_socket = broker_.descriptor_socket();
    options.connection.tenant = "alpha";
    options.connection.secret = "hush";
    options.connect_timeout = kPatience;
    options.min_backoff = absl::Milliseconds(1);
    options.max_backoff = absl::Milliseconds(5);
    options.restore_threads = 1;
    auto client = GrpcMemoryClient::Connect(std::move(options));
    EXPECT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    pool_ = std::make_unique<ScriptedPool>(&broker_, model_);
    shape.kv_slabs = static_cast<int32_t>(model_.pool_slabs);
    compute_ = std::make_unique<Compute>(
        model,
        ModelMemory{client_->parameters(), client_->kv(), model.config().KvBytes(kBlockTokens)},
        client_.get(), shape);
  }
  ~RotatingWorker() {
    compute_ = nullptr;
    client_ = nullptr;
    broker_.Kill();
    std::filesystem::remove_all(folder_);
  }

  Engine& engine() { return compute_->engine(); }
  FakeBroker& broker() { return broker_; }
  ScriptedPool& pool() { return *pool_; }
  GrpcMemoryClient& client() { return *client_; }

  void RunTurn() {
    pool_->Pump();
    compute_->clock().Advance(absl::Milliseconds(10));
    if (!engine().RunOnce()) std::this_thread::yield();
  }

  // Until nothing is under way.
  void Settle() {
    const absl::Time deadline = MonotonicNow() + kPatience;
    while (!pool_->idle()) {
      ASSERT_LT(MonotonicNow(), deadline);
      RunTurn();
    }
  }

  void GrantKvTarget() {
    const uint32_t target = pool_->kv_target();
    if (target > pool_->kv()) pool_->GrantKv(std::min(target - pool_->kv(), pool_->free()));
  }

 private:
  static std::string MakeFolder() {
    char name[] = "/tmp/engine_rotation_test.XXXXXX";
    return ::mkdtemp(name);
  }

  static FakeBroker::Model BrokerModel(const TestModel& model) {
    const ImageLayout& layout = model.layout();
    FakeBroker::Model out;
    out.slab = kSlab;
    for (const StagePlacement& stage : layout.stages) {
      out.stages.push_back(static_cast<uint32_t>(stage.slab_count));
    }
    out.image.assign(reinterpret_cast<const char*>(model.image()),
                     static_cast<size_t>(layout.total.count()));
    const Bytes sequence = model.config().KvBytes(kLongest + 2 * kBlockTokens);
    out.pool_slabs = static_cast<uint32_t>(layout.slabs() + CeilDiv(sequence * 3 / 2, kSlab) + 2);
    return out;
  }

  const std::string folder_;
  const FakeBroker::Model model_;
  FakeBroker broker_;
  std::unique_ptr<GrpcMemoryClient> client_;
  std::unique_ptr<ScriptedPool> pool_;
  std::unique_ptr<Compute> compute_;
};

// One way in which memory comes and goes.
class Schedule {
 public:
  Schedule(RotatingWorker* worker, uint32_t seed)
      : worker_(worker),
        random_(seed),
        rotate_(Percent({100, 100, 30, 10, 0})),
        dissolve_(Percent({0, 3, 10})),
        revoke_(Percent({0, 3, 10})),
        revoke_kv_(Percent({2, 10})),
        restart_(Percent({0, 0, 0, 1})) {}

  void Disturb() {
    ScriptedPool& pool = worker_->pool();
    if (Chance(restart_)) pool.Restart();
    if (Chance(40)) worker_->GrantKvTarget();
    if (pool.kv_revokes() == 0 && Chance(revoke_kv_)) pool.RevokeKv(1 + random_() % 10);
    if (Chance(dissolve_)) pool.Dissolve();
    if (Chance(revoke_)) pool.RevokeStage(random_() % pool.stages());
    if (Chance(rotate_)) pool.Rotate(AnyRotation());
    if (Chance(40)) pool.GrantImage();
  }

 private:
  int Percent(std::initializer_list<int> choices) {
    return std::data(choices)[random_() % choices.size()];
  }
  bool Chance(int percent) { return static_cast<int>(random_() % 100) < percent; }

  Rotation AnyRotation() {
    const int32_t layers = worker_->pool().layers();
    const int32_t slots = 1 + static_cast<int32_t>(random_() % 2);
    const auto freed = static_cast<int32_t>(random_() % static_cast<uint32_t>(layers - slots + 1));
    return EvenRotation(1, layers, freed, slots);
  }

  RotatingWorker* const worker_;
  std::mt19937 random_;
  const int rotate_, dissolve_, revoke_, revoke_kv_, restart_;  // of 100 turns
};

std::vector<Output> RunDisturbed(RotatingWorker& worker,
                                 const std::vector<SequenceRequest>& requests, Schedule schedule) {
  std::vector<std::shared_ptr<GenerationStream>> streams;
  for (const SequenceRequest& request : requests) {
    auto stream = worker.engine().Submit(request, [] {});
    EXPECT_TRUE(stream.ok()) << stream.status();
    streams.push_back(*std::move(stream));
  }
  const absl::Time deadline = MonotonicNow() + kPatience;
  while (worker.engine().AwaitDrained(absl::ZeroDuration()) > 0) {
    if (MonotonicNow() > deadline) {
      ADD_FAILURE() << "no end in sight";
      break;
    }
    schedule.Disturb();
    worker.RunTurn();
    if (::testing::Test::HasFatalFailure()) break;
  }
  std::vector<Output> outputs(streams.size());
  for (size_t i = 0; i < streams.size(); ++i) outputs[i].Take(*streams[i]);
  return outputs;
}

class EngineRotationTest : public ::testing::TestWithParam<TestFamily> {};

INSTANTIATE_TEST_SUITE_P(Families, EngineRotationTest, ::testing::ValuesIn(kTestFamilies));

TEST_P(EngineRotationTest, NeitherRotationsNorRevokesNorABrokersDeathChangeABit) {
  constexpr uint32_t kModels = 4;
  constexpr uint32_t kSchedules = 8;
  int rotations = 0;
  int64_t preemptions = 0;
  for (uint32_t number = 0; number < kModels; ++number) {
    SCOPED_TRACE(number);
    std::mt19937 random(1000 * static_cast<uint32_t>(GetParam()) + number);
    const TestModel model(DeepConfig(GetParam(), random), number, kSlab);
    const auto requests = RandomRequests(random, model.config().vocab_size, 4);
    const std::vector<Output> alone = RunUndisturbed(model, requests);
    const int32_t batch = 1 + static_cast<int32_t>(random() % 4);
    RotatingWorker worker(model, {.batch = batch,
                                  .step_tokens = batch + static_cast<int32_t>(random() % 16),
                                  .pipeline_depth = 1 + static_cast<int32_t>(number % 2)});
    for (uint32_t i = 0; i < kSchedules; ++i) {
      SCOPED_TRACE(i);
      const auto outputs = RunDisturbed(worker, requests, Schedule(&worker, random()));
      for (size_t r = 0; r < requests.size(); ++r) {
        ASSERT_NO_FATAL_FAILURE(ExpectSame(outputs[r], alone[r]));
        preemptions += outputs[r].end->usage.preemptions;
      }
      ASSERT_FALSE(HasFatalFailure());
    }
    rotations += worker.pool().rotations();
  }
  // Fewer on a busy machine, where steps end more seldom.
  EXPECT_GT(rotations, 100);
  EXPECT_GT(preemptions, 10);
}

// What the test above rests on: what was given back is full of a pattern, and a weight with that
// pattern would show.
TEST_P(EngineRotationTest, CanaryInFreedSlabsIsNeverReadAsWeights) {
  std::mt19937 random(77);
  const TestModel model(DeepConfig(GetParam(), random), 3, kSlab);
  auto requests = RandomRequests(random, model.config().vocab_size, 2);
  for (SequenceRequest& request : requests) request.params.temperature = 0;
  const std::vector<Output> alone = RunUndisturbed(model, requests);
  RotatingWorker worker(model, {.batch = 2, .step_tokens = 8});
  const auto run = [&] {
    std::vector<std::shared_ptr<GenerationStream>> streams;
    for (const SequenceRequest& request : requests) {
      streams.push_back(*worker.engine().Submit(request, [] {}));
    }
    while (worker.engine().AwaitDrained(absl::ZeroDuration()) > 0) {
      worker.GrantKvTarget();
      worker.RunTurn();
    }
    std::vector<Output> outputs(streams.size());
    for (size_t i = 0; i < streams.size(); ++i) outputs[i].Take(*streams[i]);
    return outputs;
  };
  ASSERT_TRUE(worker.pool().GrantImage());
  ASSERT_NO_FATAL_FAILURE(worker.Settle());
  const uint32_t before = worker.pool().free();
  const Rotation rotation = EvenRotation(1, worker.pool().layers(), 1, 1);
  ASSERT_TRUE(worker.pool().Rotate(rotation));
  ASSERT_NO_FATAL_FAILURE(worker.Settle());
  const auto layer = static_cast<uint32_t>(model.layout().stages[1].slab_count);
  ASSERT_EQ(worker.pool().free(), before + layer);
  std::vector<Output> outputs = run();
  for (size_t r = 0; r < requests.size(); ++r) {
    ASSERT_NO_FATAL_FAILURE(ExpectSame(outputs[r], alone[r]));
  }
  // The same pattern in a slab of a layer that does not rotate.
  size_t stage = 1;
  while (std::count(rotation.stages.begin(), rotation.stages.end(), stage) > 0) ++stage;
  const auto place = static_cast<uint32_t>(model.layout().stages[stage].first_slab);
  worker.broker().Fill(worker.pool().ParameterAt(place), ScriptedPool::kPattern);
  outputs = run();
  bool differs = false;
  for (size_t r = 0; r < requests.size(); ++r) {
    differs |= outputs[r].tokens.size() != alone[r].tokens.size();
    for (size_t t = 0; !differs && t < alone[r].tokens.size(); ++t) {
      differs = outputs[r].tokens[t].logprob != alone[r].tokens[t].logprob;
    }
  }
  EXPECT_TRUE(differs);
}

}  // namespace
}  // namespace palimpsest
