#include "worker/compute/cpu/cpu_runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/monotonic_time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/compute/cpu/test_model.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kBlocks = 400;

std::vector<TokenId> RandomTokens(const ModelConfig& config, int count, std::mt19937& random) {
  std::vector<TokenId> tokens(count);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % config.vocab_size);
  return tokens;
}

// Tokens of one sequence and where its KV goes.
struct Sequence {
  std::vector<TokenId> tokens;
  std::vector<BlockId> blocks;
  int32_t done = 0;
  std::map<int32_t, std::vector<float>> logits;  // by position of the token they follow
};

// A runner over KV memory of its own.
class Bench {
 public:
  Bench(const TestModel& model, int threads, int32_t block_tokens, uint32_t seed,
        const Kernels* kernels = nullptr, ParameterGate* gate = nullptr)
      : model_(model), block_tokens_(block_tokens), kv_(model.config(), block_tokens, kBlocks) {
    runner_ = CpuRunner::Create(
                  model.config(), model.layout(), {model.image(), kv_.data(), kv_.block_bytes()},
                  gate, {.threads = threads, .block_tokens = block_tokens, .kernels = kernels})
                  .value();
    free_.resize(kBlocks - 1);
    std::iota(free_.begin(), free_.end(), 1);
    std::shuffle(free_.begin(), free_.end(), std::mt19937(seed));
    request_.params.temperature = 0;
  }

  CpuRunner& runner() { return *runner_; }

  Sequence Open(std::vector<TokenId> tokens) {
    Sequence s;
    s.tokens = std::move(tokens);
    for (size_t t = 0; t < s.tokens.size(); t += block_tokens_) {
      s.blocks.push_back(BlockId(free_.back()));
      free_.pop_back();
    }
    return s;
  }

  // Computes the next counts[i] tokens of sequences[i] (none if 0) in one step.
  void Step(const std::vector<Sequence*>& sequences, const std::vector<int>& counts) {
    StepPlan plan;
    std::vector<Sequence*> owners;
    for (size_t i = 0; i < sequences.size(); ++i) {
      if (counts[i] == 0) continue;
      Sequence& s = *sequences[i];
      HideBlocksBeforeWindow(s);
      plan.chunks.push_back(
          {absl::MakeConstSpan(s.tokens).subspan(s.done, counts[i]), s.done, s.blocks, &request_});
      owners.push_back(&s);
    }
    if (plan.chunks.empty()) return;
    ASSERT_TRUE(runner_->Submit(plan).ok());
    const absl::StatusOr<StepResult> result = runner_->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    for (size_t c = 0; c < owners.size(); ++c) {
      owners[c]->done += static_cast<int32_t>(plan.chunks[c].tokens.size());
      const auto logits = runner_->logits(c);
      owners[c]->logits[owners[c]->done - 1].assign(logits.begin(), logits.end());
      const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
      ASSERT_TRUE(result->sampled[c].has_value());
      EXPECT_EQ(result->sampled[c]->token, best);
    }
  }

  // Keys and values of all positions whose blocks are still in the table.
  std::map<int32_t, std::string> Kv(const Sequence& s) const {
    std::map<int32_t, std::string> out;
    const ModelConfig& config = model_.config();
    const int planes = config.latent ? 1 : 2;
    const int64_t token_bytes = config.KvTokenBytes().count() / planes;
    for (int32_t p = 0; p < s.done; ++p) {
      const BlockId block = s.blocks[p / block_tokens_];
      if (block == BlockId(0)) continue;
      for (int plane = 0; plane < planes * config.num_layers; ++plane) {
        const std::byte* at =
            kv_.block(block) + (int64_t{plane} * block_tokens_ + p % block_tokens_) * token_bytes;
        out[p].append(reinterpret_cast<const char*>(at), token_bytes);
      }
    }
    return out;
  }

 private:
  void HideBlocksBeforeWindow(Sequence& s) const {
    if (!model_.config().sliding_window.has_value()) return;
    const int32_t oldest = s.done - *model_.config().sliding_window + 1;
    for (int32_t b = 0; (b + 1) * block_tokens_ <= oldest; ++b) s.blocks[b] = BlockId(0);
  }

  const TestModel& model_;
  const int32_t block_tokens_;
  TestKv kv_;
  std::unique_ptr<CpuRunner> runner_;
  std::vector<uint32_t> free_;
  SamplingRequest request_;
};

// Runs sequences to their ends in random chunks and batches.
void RunInRandomSteps(Bench& bench, std::vector<Sequence>& sequences, std::mt19937& random) {
  std::vector<Sequence*> all;
  for (Sequence& s : sequences) all.push_back(&s);
  const auto unfinished = [&] {
    return std::any_of(sequences.begin(), sequences.end(),
                       [](const Sequence& s) { return s.done < std::ssize(s.tokens); });
  };
  while (unfinished()) {
    std::vector<int> counts;
    std::shuffle(all.begin(), all.end(), random);
    for (Sequence* s : all) {
      const int left = static_cast<int>(s->tokens.size()) - s->done;
      // Decode steps, small chunks, anything, or not in this step.
      const int most[] = {0, 1, std::min(left, 5), left};
      counts.push_back(left == 0 ? 0 : static_cast<int>(random() % (most[random() % 4] + 1)));
    }
    bench.Step(all, counts);
  }
}

class CpuRunnerOf : public ::testing::TestWithParam<TestFamily> {
 protected:
  // The other families share most of their paths with Llama.
  static int Trials(int llama) { return GetParam() == TestFamily::kLlama ? llama : llama / 2; }
};

std::string FamilyName(const ::testing::TestParamInfo<TestFamily>& info) {
  constexpr const char* kNames[] = {"Llama", "Qwen3", "Gemma2", "Opt", "Latent", "EightBitKv"};
  return kNames[static_cast<int>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Families, CpuRunnerOf, ::testing::ValuesIn(kTestFamilies), FamilyName);

TEST_P(CpuRunnerOf, LogitsMatchFloat64Reference) {
  std::mt19937 random(1);
  for (int trial = 0; trial < Trials(4); ++trial) {
    const ModelConfig config = RandomConfig(GetParam(), random);
    const TestModel model(config, random());
    const std::vector<TokenId> tokens = RandomTokens(config, 1 + random() % 110, random);
    const auto expected = model.ReferenceLogits(tokens);
    for (const Kernels* kernels : SupportedKernels()) {
      Bench bench(model, 2, 16, random(), kernels);
      Sequence s = bench.Open(tokens);
      std::vector<Sequence*> all = {&s};
      while (s.done < std::ssize(s.tokens)) {
        const int left = static_cast<int>(s.tokens.size()) - s.done;
        bench.Step(all, {1 + static_cast<int>(random() % left)});
      }
      for (const auto& [position, logits] : s.logits) {
        double scale = 0, error = 0;
        for (size_t i = 0; i < logits.size(); ++i) {
          scale = std::max(scale, std::abs(expected[position][i]));
          error = std::max(error, std::abs(expected[position][i] - logits[i]));
        }
        // A key that falls on the other side of a rounding costs more than the arithmetic.
        const double bound = config.kv_dtype == KvDtype::kBf16 ? 1e-2 : 5e-2;
        EXPECT_LT(error, bound * scale) << kernels->name << ", trial " << trial << ", position "
                                        << position << " of " << s.tokens.size();
      }
    }
  }
}

TEST_P(CpuRunnerOf, BitsDoNotDependOnChunkingBatchThreadsOrInstructionSet) {
  std::mt19937 random(2);
  for (int trial = 0; trial < Trials(8); ++trial) {
    const ModelConfig config = RandomConfig(GetParam(), random);
    const TestModel model(config, random());
    const int32_t block_tokens = 1 << random() % 6;
    std::vector<std::vector<TokenId>> prompts(1 + random() % 3);
    for (auto& prompt : prompts) prompt = RandomTokens(config, 1 + random() % 160, random);

    // The yardstick: one thread, token by token, sequence by sequence.
    std::vector<std::map<int32_t, std::vector<float>>> logits;
    std::vector<std::map<int32_t, std::string>> kv;
    for (const auto& prompt : prompts) {
      Bench bench(model, 1, block_tokens, random());
      Sequence s = bench.Open(prompt);
      while (s.done < std::ssize(s.tokens)) bench.Step({&s}, {1});
      logits.push_back(s.logits);
      kv.push_back(bench.Kv(s));
    }

    for (int run = 0; run < 3; ++run) {
      const auto& all_kernels = SupportedKernels();
      const Kernels* kernels = all_kernels[run == 0 ? 0 : random() % all_kernels.size()];
      Bench bench(model, 1 + static_cast<int>(random() % 4), block_tokens, random(), kernels);
      std::vector<Sequence> sequences;
      for (const auto& prompt : prompts) sequences.push_back(bench.Open(prompt));
      RunInRandomSteps(bench, sequences, random);
      for (size_t i = 0; i < sequences.size(); ++i) {
        for (const auto& [position, got] : sequences[i].logits) {
          const std::vector<float>& want = logits[i][position];
          ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0)
              << "trial " << trial << " with " << kernels->name << ": logits of sequence " << i
              << " at position " << position;
        }
        for (const auto& [position, bytes] : bench.Kv(sequences[i])) {
          if (!kv[i].contains(position)) continue;
          ASSERT_TRUE(kv[i][position] == bytes)
              << "trial " << trial << " with " << kernels->name << ": KV of sequence " << i
              << " at position " << position;
        }
      }
    }
  }
}

// There is no second copy of a weight, whatever was computed before: what is mapped is what counts.
TEST_P(CpuRunnerOf, WeightsAreThoseThatLieInTheParameterRegionDuringTheStep) {
  std::mt19937 random(9);
  const ModelConfig config = RandomConfig(GetParam(), random);
  TestModel model(config, 1);
  const TestModel other(config, 2);
  const std::vector<TokenId> tokens = RandomTokens(config, 40, random);
  const auto logits = [&](Bench& bench, const Sequence& opened) {
    Sequence s = opened;
    bench.Step({&s}, {39});
    bench.Step({&s}, {1});
    return s.logits;
  };
  Bench bench(model, 2, 16, 1);
  const Sequence s = bench.Open(tokens);
  const std::vector<std::byte> image(model.image(), model.image() + model.layout().total.count());
  const auto first = logits(bench, s);
  for (const StagePlacement& stage : model.layout().stages) {
    const int64_t slab = model.layout().slab_bytes.count();
    const int64_t begin = stage.first_slab * slab;
    std::copy_n(other.image() + begin, stage.slab_count * slab, model.image() + begin);
    EXPECT_NE(logits(bench, s), first) << stage.name;
    // What has never seen other weights.
    Bench fresh(model, 2, 16, 1);
    EXPECT_EQ(logits(bench, s), logits(fresh, fresh.Open(tokens))) << stage.name;
    std::copy_n(image.data() + begin, stage.slab_count * slab, model.image() + begin);
    EXPECT_EQ(logits(bench, s), first) << stage.name;
  }
}

// Opens stage after stage, notes the order, and can refuse one.
class RecordingGate : public ParameterGate {
 public:
  absl::Status AwaitStage(int stage) override {
    stages.push_back(stage);
    if (stage == refused) return absl::UnavailableError("no slabs for this stage");
    return absl::OkStatus();
  }
  void ReleaseStage(int stage) override {
    EXPECT_NE(std::find(stages.begin(), stages.end(), stage), stages.end());
    stages.push_back(-1 - stage);
  }

  std::vector<int> stages;  // -1 - stage: released
  int refused = -1;
};

TEST(CpuRunner, AwaitsEachStageInOrder) {
  std::mt19937 random(3);
  ModelConfig config = RandomConfig(random);
  config.num_layers = 3;
  const TestModel model(config, 1);
  RecordingGate gate;
  Bench bench(model, 2, 16, 1, nullptr, &gate);
  Sequence s = bench.Open({1, 2, 3});
  bench.Step({&s}, {3});
  EXPECT_THAT(gate.stages, ElementsAre(0, 1, -2, 2, -3, 3, -4, 4, -1, -5));
}

// Lets a millisecond pass before each stage.
class SlowGate : public ParameterGate {
 public:
  absl::Status AwaitStage(int) override {
    const absl::Time start = MonotonicNow();
    while (MonotonicNow() < start + absl::Milliseconds(1)) {
    }
    return absl::OkStatus();
  }
};

TEST(CpuRunner, WaitsForRotatingStagesAreCounted) {
  std::mt19937 random(3);
  ModelConfig config = RandomConfig(random);
  config.num_layers = 3;
  const TestModel model(config, 1);
  SlowGate gate;
  Bench bench(model, 2, 16, 1, nullptr, &gate);
  const Sequence s = bench.Open({1, 2, 3});
  StepPlan plan;
  plan.chunks.push_back({s.tokens, 0, s.blocks, nullptr});
  const auto stall = [&] {
    EXPECT_TRUE(bench.runner().Submit(plan).ok());
    return bench.runner().Wait()->times.rotation_stall;
  };
  EXPECT_EQ(stall(), absl::ZeroDuration());
  ASSERT_TRUE(bench.runner().SetRotation({{1, 3}, 1}).ok());
  EXPECT_GE(stall(), absl::Milliseconds(2));
  ASSERT_TRUE(bench.runner().SetRotation({}).ok());
  EXPECT_EQ(stall(), absl::ZeroDuration());
}

TEST(CpuRunner, RefusedStageAbandonsStepAndNextStepWorks) {
  std::mt19937 random(4);
  ModelConfig config = RandomConfig(random);
  config.num_layers = 2;
  const TestModel model(config, 1);
  const std::vector<TokenId> tokens = RandomTokens(config, 40, random);
  Bench undisturbed(model, 2, 16, 1);
  Sequence want = undisturbed.Open(tokens);
  undisturbed.Step({&want}, {40});

  RecordingGate gate;
  Bench bench(model, 2, 16, 1, nullptr, &gate);
  Sequence s = bench.Open(tokens);
  SamplingRequest request;
  StepPlan plan;
  plan.chunks.push_back({s.tokens, 0, s.blocks, &request});
  for (int refused = 0; refused < 4; ++refused) {
    gate.refused = refused;
    gate.stages.clear();
    ASSERT_TRUE(bench.runner().Submit(plan).ok());
    EXPECT_EQ(bench.runner().Wait().status(), absl::UnavailableError("no slabs for this stage"));
    EXPECT_EQ(gate.stages.back(), refused);
  }
  gate.refused = -1;
  bench.Step({&s}, {40});
  EXPECT_EQ(s.logits, want.logits);
}

TEST(CpuRunner, OnlySampledChunksHaveResults) {
  std::mt19937 random(5);
  const ModelConfig config = RandomConfig(random);
  const TestModel model(config, 1);
  Bench bench(model, 2, 16, 1);
  Sequence a = bench.Open(RandomTokens(config, 20, random));
  Sequence b = bench.Open(RandomTokens(config, 20, random));
  SamplingRequest request;
  StepPlan plan;
  plan.chunks.push_back({a.tokens, 0, a.blocks, nullptr});
  plan.chunks.push_back({b.tokens, 0, b.blocks, &request});
  ASSERT_TRUE(bench.runner().Submit(plan).ok());
  const auto result = bench.runner().Wait();
  ASSERT_TRUE(result.ok());
  EXPECT_FALSE(result->sampled[0].has_value());
  EXPECT_TRUE(result->sampled[1].has_value());
  EXPECT_TRUE(bench.runner().logits(0).empty());
  EXPECT_EQ(bench.runner().logits(1).size(), config.vocab_size);

  plan.chunks.pop_back();
  ASSERT_TRUE(bench.runner().Submit(plan).ok());
  EXPECT_TRUE(bench.runner().Wait().ok());
}

TEST(CpuRunner, PlanIsReadDuringSubmitOnly) {
  std::mt19937 random(8);
  const ModelConfig config = RandomConfig(random);
  const TestModel model(config, 1);
  Bench bench(model, 2, 16, 2);
  const Sequence s = bench.Open(RandomTokens(config, 20, random));
  SamplingRequest request;
  request.params.repetition_penalty = 3;
  request.params.stop = {"text"};
  std::vector<TokenId> sampled;
  for (const bool spoil : {false, true}) {
    std::vector<TokenId> tokens = s.tokens, history = s.tokens;
    std::vector<BlockId> blocks = s.blocks;
    auto own = std::make_unique<SamplingRequest>(request);
    own->history = history;
    StepPlan plan;
    plan.chunks.push_back({tokens, 0, blocks, own.get()});
    ASSERT_TRUE(bench.runner().Submit(plan).ok());
    if (spoil) {
      plan.chunks.clear();
      own.reset();
      std::fill(blocks.begin(), blocks.end(), BlockId(0));
      std::fill(tokens.begin(), tokens.end(), 0);
      std::fill(history.begin(), history.end(), 0);
    }
    const auto result = bench.runner().Wait();
    ASSERT_TRUE(result.ok());
    sampled.push_back(result->sampled[0]->token);
  }
  EXPECT_EQ(sampled[0], sampled[1]);
}

class PlanContract : public ::testing::Test {
 protected:
  PlanContract() : model_(Config(), 1), bench_(model_, 1, 16, 1) {}

  static ModelConfig Config() {
    std::mt19937 random(6);
    ModelConfig config = RandomConfig(random);
    config.vocab_size = 100;
    config.max_position = 64;
    config.sliding_window = 20;
    return config;
  }

  absl::Status Submit(const std::vector<TokenId>& tokens, int32_t first,
                      const std::vector<BlockId>& blocks) {
    StepPlan plan;
    plan.chunks.push_back({tokens, first, blocks, nullptr});
    const absl::Status status = bench_.runner().Submit(plan);
    return status.ok() ? bench_.runner().Wait().status() : status;
  }

  static constexpr BlockId kNull{0};
  TestModel model_;
  Bench bench_;
};

TEST_F(PlanContract, BrokenPlansAreRefused) {
  const BlockId a(1), b(2), c(3), d(4), e(5);
  EXPECT_THAT(Submit({}, 0, {a}).message(), HasSubstr("no tokens"));
  EXPECT_THAT(Submit({100}, 0, {a}).message(), HasSubstr("token 100"));
  EXPECT_THAT(Submit({-1}, 0, {a}).message(), HasSubstr("token -1"));
  EXPECT_THAT(Submit({1}, -1, {a}).message(), HasSubstr("positions -1"));
  EXPECT_THAT(Submit({1, 2}, 63, {a, b, c, d, e}).message(), HasSubstr("positions 63 to 64"));
  EXPECT_THAT(Submit({1, 2}, 15, {a}).message(), HasSubstr("2 blocks"));
  EXPECT_THAT(Submit({1}, 0, {kNull}).message(), HasSubstr("null block"));
  // Position 47 sees 28 .. 47: block 1 is needed, block 0 is not.
  EXPECT_THAT(Submit({1}, 47, {kNull, kNull, c}).message(), HasSubstr("block 1"));
  EXPECT_TRUE(Submit({1}, 47, {kNull, b, c}).ok());
  EXPECT_FALSE(bench_.runner().Submit(StepPlan{}).ok());
  const std::vector<TokenId> token = {1};
  const std::vector<BlockId> table = {a};
  StepPlan early;
  early.chunks.push_back(
      {.tokens = token, .first_position = 1, .block_table = table, .token_from = 0});
  EXPECT_THAT(bench_.runner().Submit(early).message(), HasSubstr("in flight"));
  EXPECT_EQ(bench_.runner().Wait().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(CpuRunner, ShapesTheKernelsDoNotTakeAreRefused) {
  std::mt19937 random(7);
  const ModelConfig good = RandomConfig(random);
  const ImageLayout layout = LayOutImage(good, Bytes(4096)).value();
  const auto create = [&](const ModelConfig& config, Bytes block_bytes) {
    return CpuRunner::Create(config, layout, {nullptr, nullptr, block_bytes}, nullptr, {}).status();
  };
  EXPECT_TRUE(create(good, good.KvBytes(16)).ok());
  EXPECT_THAT(create(good, good.KvBytes(16) - Bytes(1)).message(), HasSubstr("KV block"));
  ModelConfig bad = good;
  bad.hidden_size = 40;
  EXPECT_THAT(create(bad, good.KvBytes(16)).message(), HasSubstr("hidden_size"));
  bad = good;
  bad.intermediate_size = 48;
  EXPECT_THAT(create(bad, good.KvBytes(16)).message(), HasSubstr("intermediate_size"));
  bad = good;
  bad.head_dim = 1024;
  EXPECT_THAT(create(bad, good.KvBytes(16)).message(), HasSubstr("head_dim"));
  bad = RandomConfig(TestFamily::kLatent, random);
  bad.kv_dtype = KvDtype::kFp8E4m3;
  EXPECT_THAT(create(bad, good.KvBytes(16)).message(), HasSubstr("kv_dtype"));
  bad.kv_dtype = KvDtype::kBf16;
  bad.latent->kv_lora_rank = 48;
  EXPECT_THAT(create(bad, good.KvBytes(16)).message(), HasSubstr("kv_lora_rank"));
  bad.latent->kv_lora_rank = 1024;
  EXPECT_THAT(create(bad, good.KvBytes(16)).message(), HasSubstr("has 10"));
}

}  // namespace
}  // namespace palimpsest
