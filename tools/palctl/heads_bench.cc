#include "tools/palctl/heads_bench.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/fd.h"
#include "common/monotonic_time.h"
#include "worker/model/image_builder.h"
#include "worker/model/safetensors.h"

namespace palimpsest::palctl {
namespace {

constexpr int32_t kPrefillChunk = 256;
// An average over hundreds of samples.
constexpr double kSampleWeight = 0.005;

absl::StatusOr<Mapping> NewMemory(Bytes size) {
  const UniqueFd fd(memfd_create("palctl-bench", MFD_CLOEXEC));
  if (!fd.valid() || ftruncate(fd.get(), size.count()) != 0) {
    return ErrnoStatus(absl::StrCat("cannot make a memfd of ", size.count(), " bytes"));
  }
  return Mapping::Map(fd.get(), size, MapAccess::kReadWrite);
}

absl::Status CheckOptions(const ModelConfig& config, const HeadsBenchOptions& options) {
  if (config.latent.has_value()) {
    return absl::InvalidArgumentError(
        "the model has latent attention: one vector for all heads, so there are none to drop");
  }
  if (config.sliding_window.has_value()) {
    return absl::InvalidArgumentError("the model has a sliding window: far keys are dropped as is");
  }
  if (options.scored < 1 || options.scored >= options.context ||
      options.context > config.max_position) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected 1 <= scored < context <= ", config.max_position,
        ", the model's longest sequence, got ", options.scored, " and ", options.context));
  }
  if (options.batch < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a batch of 1 or more sequences, got ", options.batch));
  }
  return absl::OkStatus();
}

// -log p(token).
double Surprise(absl::Span<const float> logits, TokenId token) {
  const float most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - most);
  return std::log(sum) + most - logits[static_cast<size_t>(token)];
}

absl::Duration Median(std::vector<absl::Duration> values) {
  if (values.empty()) return absl::ZeroDuration();
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HeadsBench>> HeadsBench::Create(const std::string& model_folder,
                                                               const HeadsBenchOptions& options) {
  auto config = ReadModelConfig(model_folder);
  if (!config.ok()) return config.status();
  if (absl::Status status = CheckOptions(*config, options); !status.ok()) return status;
  auto layout = LayOutImage(*config, MiB(2));
  if (!layout.ok()) return layout.status();
  auto checkpoint = Checkpoint::Open(model_folder);
  if (!checkpoint.ok()) return checkpoint.status();
  absl::Status status = CheckTensors(*checkpoint, *config, *layout);
  if (!status.ok()) return status;
  auto image = NewMemory(layout->total);
  if (!image.ok()) return image.status();
  status = BuildImage(*checkpoint, *config, *layout, {image->data(), image->size()});
  if (!status.ok()) return status;
  const int64_t blocks =
      int64_t{(options.context + kBlockTokens - 1) / kBlockTokens} * options.batch + 1;
  auto kv = NewMemory(config->KvBytes(kBlockTokens) * blocks);
  if (!kv.ok()) return kv.status();
  return std::unique_ptr<HeadsBench>(new HeadsBench(*std::move(config), *std::move(layout),
                                                    *std::move(image), *std::move(kv), options));
}

HeadsBench::HeadsBench(ModelConfig config, ImageLayout layout, Mapping image, Mapping kv,
                       const HeadsBenchOptions& options)
    : config_(std::move(config)),
      layout_(std::move(layout)),
      image_(std::move(image)),
      kv_(std::move(kv)),
      options_(options),
      blocks_(static_cast<size_t>(options.batch)) {
  greedy_.params.temperature = 0;
  uint32_t next = 1;  // behind the null block
  for (std::vector<BlockId>& table : blocks_) {
    for (int32_t t = 0; t < options.context; t += kBlockTokens) table.push_back(BlockId(next++));
  }
}

Bytes HeadsBench::HeadBytes() const {
  return config_.KvBytes(kBlockTokens) / (int64_t{config_.num_layers} * config_.num_kv_heads);
}

absl::Status HeadsBench::Prepare(const HeadSampling& sampling, const LossyHeads& lossy) {
  ModelMemory memory;
  memory.parameters = image_.data();
  memory.kv = kv_.data();
  memory.kv_block_bytes = config_.KvBytes(kBlockTokens);
  CpuRunnerOptions options;
  options.threads = options_.threads;
  options.block_tokens = kBlockTokens;
  options.head_sampling = sampling;
  options.lossy_heads = lossy;
  auto runner = CpuRunner::Create(config_, layout_, memory, nullptr, options);
  if (!runner.ok()) return runner.status();
  runner_ = *std::move(runner);
  return absl::OkStatus();
}

absl::StatusOr<StepResult> HeadsBench::Step(const StepPlan& plan) {
  if (absl::Status status = runner_->Submit(plan); !status.ok()) return status;
  return runner_->Wait();
}

absl::Status HeadsBench::Prefill(const Tokens& text, size_t place) {
  const int32_t end = options_.context - options_.scored;
  for (int32_t first = 0; first < end; first += kPrefillChunk) {
    StepPlan plan;
    SequenceChunk chunk;
    chunk.tokens = absl::MakeConstSpan(text).subspan(
        static_cast<size_t>(first), static_cast<size_t>(std::min(kPrefillChunk, end - first)));
    chunk.first_position = first;
    chunk.block_table = blocks_[place];
    plan.chunks.push_back(chunk);
    if (const auto result = Step(plan); !result.ok()) return result.status();
  }
  return absl::OkStatus();
}

template <typename Each>
absl::Status HeadsBench::Decode(absl::Span<const Tokens> texts, const Each& each) {
  // The last token predicts nothing that is known.
  for (int32_t p = options_.context - options_.scored; p + 1 < options_.context; ++p) {
    StepPlan plan;
    for (size_t i = 0; i < texts.size(); ++i) {
      SequenceChunk chunk;
      chunk.tokens = absl::MakeConstSpan(texts[i]).subspan(static_cast<size_t>(p), 1);
      chunk.first_position = p;
      chunk.block_table = blocks_[i];
      chunk.sampling = &greedy_;
      plan.chunks.push_back(chunk);
    }
    const absl::Time start = MonotonicNow();
    auto result = Step(plan);
    if (!result.ok()) return result.status();
    each(p, *result, MonotonicNow() - start);
  }
  return absl::OkStatus();
}

template <typename Each>
absl::Status HeadsBench::Run(absl::Span<const Tokens> texts, const Each& each) {
  const auto batch = static_cast<size_t>(options_.batch);
  for (size_t first = 0; first < texts.size(); first += batch) {
    const absl::Span<const Tokens> group = texts.subspan(first, batch);
    for (size_t i = 0; i < group.size(); ++i) {
      if (absl::Status status = Prefill(group[i], i); !status.ok()) return status;
    }
    absl::Status status =
        Decode(group, [&](int32_t position, const StepResult& result, absl::Duration took) {
          each(group, position, result, took);
        });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<HeadsBench::Perplexity> HeadsBench::Measure(absl::Span<const Tokens> texts,
                                                           const LossyHeads& lossy) {
  const absl::Time start = MonotonicNow();
  if (absl::Status status = Prepare({}, lossy); !status.ok()) return status;
  Perplexity perplexity;
  double sum = 0;
  absl::Status status = Run(texts, [&](absl::Span<const Tokens> group, int32_t position,
                                       const StepResult&, absl::Duration) {
    for (size_t i = 0; i < group.size(); ++i) {
      sum += Surprise(runner_->logits(i), group[i][static_cast<size_t>(position) + 1]);
      ++perplexity.tokens;
    }
  });
  if (!status.ok()) return status;
  if (perplexity.tokens == 0) return absl::InvalidArgumentError("no tokens to score");
  perplexity.value = std::exp(sum / static_cast<double>(perplexity.tokens));
  perplexity.took = MonotonicNow() - start;
  return perplexity;
}

absl::StatusOr<HeadsBench::Samples> HeadsBench::Sample(absl::Span<const Tokens> texts) {
  const HeadSampling sampling = {.every = 2, .recent_tokens = options_.recent_tokens};
  if (absl::Status status = Prepare(sampling, {}); !status.ok()) return status;
  HeadMassOptions options;
  options.layers = config_.num_layers;
  options.kv_heads = config_.num_kv_heads;
  options.sample_weight = kSampleWeight;
  auto mass = HeadMass::Create(options);
  if (!mass.ok()) return mass.status();
  HeadMass effect = *mass;
  std::vector<absl::Duration> sampled, plain;
  absl::Status wrong;
  absl::Status status = Run(
      texts, [&](absl::Span<const Tokens>, int32_t, const StepResult& result, absl::Duration took) {
        (result.head_sample.empty() ? plain : sampled).push_back(took);
        if (result.head_sample.empty()) return;
        wrong.Update(mass->Sample(result.head_sample.shares));
        wrong.Update(effect.Sample(result.head_sample.effects));
      });
  status.Update(wrong);
  if (!status.ok()) return status;
  if (mass->samples() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("no heads were sampled: the context of ", options_.context,
                     " tokens leaves none behind the recent ", options_.recent_tokens));
  }
  return Samples{HeadProfile::Of(*mass, effect, config_.num_layers, options_.recent_tokens),
                 Median(std::move(sampled)), Median(std::move(plain))};
}

}  // namespace palimpsest::palctl
