// Samples of heads, and lossy heads: in the kernels and in the runner.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/compute/cpu/attention_case.h"
#include "worker/compute/cpu/cpu_runner.h"
#include "worker/compute/cpu/test_model.h"
#include "worker/core/far_keys.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kBlockTokens = 16;
constexpr int32_t kContext = 640;
constexpr uint16_t kNan = 0x7fff;

class EachBuild : public ::testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels() const { return *GetParam(); }
  std::mt19937 random_{21};
};

INSTANTIATE_TEST_SUITE_P(Kernels, EachBuild, ::testing::ValuesIn(SupportedKernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(EachBuild, FarSharesAreThoseOfAPlainSoftmax) {
  const Kernels& reference = *SupportedKernels().back();
  for (int trial = 0; trial < 8; ++trial) {
    AttentionCase c(random_, 300, false);
    if (trial % 4 == 1) c.SetWindow(static_cast<int32_t>(100 + random_() % 250));
    if (trial % 4 == 2) {
      c.RoundToE4m3();
      c.StoreAsE4m3();
    }
    const auto position = static_cast<int32_t>(random_() % 300);
    const auto recent = static_cast<int32_t>(1 + random_() % 200);
    const std::vector<float> shares = c.FarShares(kernels(), position, recent);
    for (int32_t h = 0; h < c.kv_heads(); ++h) {
      double all = 0, far = 0;
      for (int32_t g = 0; g < c.group(); ++g) {
        const std::vector<double> weights = c.Weights(position, h * c.group() + g);
        for (int32_t j = 0; j <= position; ++j) {
          all += weights[j];
          if (j >= kFarKeyTile && j < FarKeysEnd(position, recent)) far += weights[j];
        }
      }
      ASSERT_NEAR(all, c.group(), 1e-9);
      ASSERT_NEAR(shares[h], far / c.group(), 1e-5) << "position " << position << " of " << recent;
    }
    ASSERT_EQ(shares, c.FarShares(reference, position, recent)) << "bits of the builds differ";
  }
}

TEST_P(EachBuild, KeptFirstTileIsSeenAndWhatLiesBehindItIsNot) {
  const Kernels& reference = *SupportedKernels().back();
  for (int trial = 0; trial < 4; ++trial) {
    AttentionCase c(random_, 300, false);
    c.SetWindow(static_cast<int32_t>(1 + random_() % 200));
    c.KeepFirstTile();
    const auto first = static_cast<int32_t>(random_() % 300);
    const auto count = static_cast<int32_t>(1 + random_() % std::min(300 - first, 40));
    const std::vector<float> out = c.Run(kernels(), first, count, true);
    const int64_t width = c.Width();
    for (int32_t t = 0; t < count; ++t) {
      const std::vector<double> want = c.Reference(first + t);
      for (int64_t i = 0; i < width; ++i) ASSERT_NEAR(out[t * width + i], want[i], 1e-4);
      const std::vector<float> alone = c.Run(reference, first + t, 1, false);
      ASSERT_EQ(std::memcmp(alone.data(), out.data() + t * width, width * sizeof(float)), 0);
    }
  }
}

ModelConfig LlamaLike(std::mt19937& random) {
  ModelConfig config = RandomConfig(TestFamily::kLlama, random);
  config.sliding_window.reset();
  config.max_position = kContext;
  return config;
}

// One sequence of random tokens on a runner of its own.
class OneSequence {
 public:
  OneSequence(const TestModel& model, CpuRunnerOptions options)
      : config_(model.config()), kv_(config_, kBlockTokens, kContext / kBlockTokens + 1) {
    options.block_tokens = kBlockTokens;
    runner_ = CpuRunner::Create(config_, model.layout(),
                                {model.image(), kv_.data(), kv_.block_bytes()}, nullptr, options)
                  .value();
    for (uint32_t b = 1; b <= kContext / kBlockTokens; ++b) blocks_.push_back(BlockId(b));
    std::mt19937 random(5);
    for (int32_t t = 0; t < kContext; ++t) {
      tokens_.push_back(static_cast<TokenId>(random() % static_cast<uint32_t>(config_.vocab_size)));
    }
    request_.params.temperature = 0;
  }

  // The logits after the next `count` tokens.
  std::vector<float> Step(int32_t count) {
    StepPlan plan;
    plan.chunks.push_back(
        {absl::MakeConstSpan(tokens_).subspan(done_, count), done_, blocks_, &request_});
    done_ += count;
    EXPECT_TRUE(runner_->Submit(plan).ok());
    result_ = runner_->Wait().value();
    const auto logits = runner_->logits(0);
    return {logits.begin(), logits.end()};
  }

  const StepResult& result() const { return result_; }
  int32_t done() const { return done_; }

  // Overwrites the KV of one head with NaN, of tokens first .. last - 1.
  void Spoil(int32_t layer, int32_t head, int32_t first, int32_t last) {
    const int64_t token = int64_t{config_.num_kv_heads} * config_.head_dim;
    for (int32_t p = first; p < last; ++p) {
      std::byte* block = kv_.data() + blocks_[p / kBlockTokens].value() * kv_.block_bytes().count();
      for (int64_t plane = int64_t{2} * layer; plane < 2 * layer + 2; ++plane) {
        auto* at = reinterpret_cast<uint16_t*>(block) +
                   (plane * kBlockTokens + p % kBlockTokens) * token + head * config_.head_dim;
        std::fill_n(at, config_.head_dim, kNan);
      }
    }
  }

 private:
  const ModelConfig config_;
  TestKv kv_;
  std::unique_ptr<CpuRunner> runner_;
  std::vector<BlockId> blocks_;
  std::vector<TokenId> tokens_;
  SamplingRequest request_;
  StepResult result_;
  int32_t done_ = 0;
};

class HeadsOf : public ::testing::TestWithParam<TestFamily> {};

INSTANTIATE_TEST_SUITE_P(Families, HeadsOf,
                         ::testing::Values(TestFamily::kLlama, TestFamily::kQwen3,
                                           TestFamily::kGemma2, TestFamily::kOpt,
                                           TestFamily::kEightBitKv));

TEST_P(HeadsOf, SamplesChangeNoBitAndDoNotDependOnTheCut) {
  std::mt19937 random(22);
  ModelConfig config = RandomConfig(GetParam(), random);
  config.max_position = kContext;
  if (config.sliding_window.has_value()) config.sliding_window = 300;
  const TestModel model(config, 3);
  const HeadSampling sampling = {.every = 2, .recent_tokens = 100};
  OneSequence plain(model, {.threads = 2}),
      sampled(model, {.threads = 2, .head_sampling = sampling}),
      whole(model, {.threads = 1, .head_sampling = {.every = 1, .recent_tokens = 100}});
  const std::vector<int32_t> counts = {1, 399, 1, 1, 1, 90, 1};
  HeadSample last;
  for (size_t i = 0; i < counts.size(); ++i) {
    ASSERT_EQ(plain.Step(counts[i]), sampled.Step(counts[i])) << "step " << i;
    EXPECT_TRUE(plain.result().head_sample.empty());
    const std::vector<float>& shares = sampled.result().head_sample.shares;
    ASSERT_EQ(shares.empty(), i % 2 == 0) << "step " << i;
    if (shares.empty()) continue;
    ASSERT_EQ(std::ssize(shares), config.num_layers * config.num_kv_heads);
    for (const float share : shares) ASSERT_TRUE(share >= 0 && share <= 1) << share;
    EXPECT_GT(*std::max_element(shares.begin(), shares.end()), 0);
    for (size_t h = 0; h < shares.size(); ++h) {
      const float effect = sampled.result().head_sample.effects[h];
      ASSERT_TRUE(effect >= 0 && effect <= 1) << effect;
      ASSERT_EQ(effect > 0, shares[h] > 0);
    }
    last = sampled.result().head_sample;
  }
  whole.Step(sampled.done() - 1);
  EXPECT_EQ(whole.result().head_sample.shares, last.shares) << "of the same token, in one chunk";
  EXPECT_EQ(whole.result().head_sample.effects, last.effects);
}

TEST(LossyRunner, ReadsNoFarKeyOfDroppedHeadsWhateverTheCut) {
  std::mt19937 random(23);
  for (int trial = 0; trial < 2; ++trial) {
    const ModelConfig config = LlamaLike(random);
    const TestModel model(config, 4);
    LossyHeads heads = {.recent_tokens = 100, .dropped = {}};
    for (int32_t h = 0; h < config.num_layers * config.num_kv_heads; ++h) {
      heads.dropped.push_back(static_cast<uint8_t>(h == 0 || random() % 2 == 0));
    }
    OneSequence lossless(model, {.threads = 1});
    OneSequence by_chunks(model, {.threads = 2, .lossy_heads = heads});
    OneSequence spoiled(model, {.threads = 1, .lossy_heads = heads});
    bool differs = false;
    while (spoiled.done() < 600) {
      const int32_t count = std::min<int32_t>(600 - spoiled.done(), 1 + random() % 60);
      for (int32_t t = 1; t < count; ++t) spoiled.Step(1);
      const std::vector<float> want = spoiled.Step(1);
      ASSERT_EQ(by_chunks.Step(count), want) << "position " << spoiled.done();
      differs |= lossless.Step(count) != want;
      for (int32_t h = 0; h < std::ssize(heads.dropped); ++h) {
        if (heads.dropped[h] == 0) continue;
        spoiled.Spoil(h / config.num_kv_heads, h % config.num_kv_heads, kFarKeyTile,
                      FarKeysEnd(spoiled.done() - 1, heads.recent_tokens));
      }
    }
    EXPECT_TRUE(differs) << "dropping is lossy";
  }
}

TEST(LossyRunner, RefusesModelsWithoutHeadsToDrop) {
  std::mt19937 random(24);
  const auto refusal = [](const ModelConfig& config, const CpuRunnerOptions& options) {
    const ImageLayout layout = LayOutImage(config, Bytes(4096)).value();
    return std::string(
        CpuRunner::Create(config, layout, {nullptr, nullptr, config.KvBytes(16)}, nullptr, options)
            .status()
            .message());
  };
  const LossyHeads one = {.recent_tokens = 100, .dropped = {1}};
  const ModelConfig latent = RandomConfig(TestFamily::kLatent, random);
  EXPECT_THAT(refusal(latent, {.head_sampling = {.every = 1}}), HasSubstr("latent attention"));
  EXPECT_THAT(refusal(latent, {.lossy_heads = one}), HasSubstr("latent attention"));
  ModelConfig config = LlamaLike(random);
  EXPECT_THAT(refusal(config, {.lossy_heads = one}), HasSubstr("lossy heads: expected"));
  config.sliding_window = 100;
  EXPECT_THAT(refusal(config, {.lossy_heads = one}), HasSubstr("sliding window"));
  EXPECT_THAT(refusal(config, {.head_sampling = {.every = -1}}), HasSubstr("samples of heads"));
}

}  // namespace
}  // namespace palimpsest
