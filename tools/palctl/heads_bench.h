// What dropping KV heads costs: perplexity of a model on text, computed in this process by the CPU
// runner, with all KV and without the far keys (worker/core/far_keys.h) of some heads.
//
// Each text is a sequence of `context` tokens. All but its last `scored` tokens are computed in
// chunks, as a prompt is; these then follow one by one, as decoding would compute them, and count:
// perplexity is e to the mean of -log p(token | tokens before it) over all scored tokens.
//
// Threads: one; blocks as long as it computes.
#ifndef PALIMPSEST_TOOLS_PALCTL_HEADS_BENCH_H_
#define PALIMPSEST_TOOLS_PALCTL_HEADS_BENCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/ids.h"
#include "common/mapping.h"
#include "worker/compute/cpu/cpu_runner.h"
#include "worker/core/head_mass.h"
#include "worker/core/head_profile.h"
#include "worker/core/sampling.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest::palctl {

struct HeadsBenchOptions {
  int32_t context = 1536;
  int32_t scored = 512;
  int32_t recent_tokens = 256;
  int32_t batch = 8;  // sequences that decode together
  int threads = 0;    // 0: one per CPU
};

class HeadsBench {
 public:
  static constexpr int32_t kBlockTokens = 16;

  // Builds the model's image in memory. Errors of its files; InvalidArgument: its KV has no heads,
  // or the options don't fit.
  static absl::StatusOr<std::unique_ptr<HeadsBench>> Create(const std::string& model_folder,
                                                            const HeadsBenchOptions& options);

  const ModelConfig& config() const { return config_; }
  // Of one head in a block.
  Bytes HeadBytes() const;

  using Tokens = std::vector<TokenId>;  // `context` of them

  struct Perplexity {
    double value = 0;
    int64_t tokens = 0;
    absl::Duration took;
  };
  absl::StatusOr<Perplexity> Measure(absl::Span<const Tokens> texts, const LossyHeads& lossy);

  struct Samples {
    HeadProfile profile;
    // Medians of decode steps with a sample and without one.
    absl::Duration sampled_step;
    absl::Duration plain_step;
  };
  // Samples the heads in every other decode step.
  absl::StatusOr<Samples> Sample(absl::Span<const Tokens> texts);

 private:
  HeadsBench(ModelConfig config, ImageLayout layout, Mapping image, Mapping kv,
             const HeadsBenchOptions& options);

  // Makes the runner for what follows.
  absl::Status Prepare(const HeadSampling& sampling, const LossyHeads& lossy);
  absl::Status Prefill(const Tokens& text, size_t place);
  // Computes the scored tokens of up to `batch` texts, which are in places 0, 1, ...; `each` is
  // called after each step with the position of its tokens.
  template <typename Each>
  absl::Status Decode(absl::Span<const Tokens> texts, const Each& each);
  template <typename Each>
  absl::Status Run(absl::Span<const Tokens> texts, const Each& each);
  absl::StatusOr<StepResult> Step(const StepPlan& plan);

  const ModelConfig config_;
  const ImageLayout layout_;
  const Mapping image_;
  const Mapping kv_;
  const HeadsBenchOptions options_;
  std::vector<std::vector<BlockId>> blocks_;  // of each place
  SamplingRequest greedy_;
  std::unique_ptr<CpuRunner> runner_;
};

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_HEADS_BENCH_H_
