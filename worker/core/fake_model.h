// A model for tests whose every token depends on the exact content of the KV memory it was told to
// read: the KV entry of a token is a hash of the token, its position and all entries it sees, and
// the next token is a hash of the last entry. A wrong block, stale or garbled KV, a lost or
// repeated token or a changed seed changes the output.
#ifndef PALIMPSEST_WORKER_CORE_FAKE_MODEL_H_
#define PALIMPSEST_WORKER_CORE_FAKE_MODEL_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"
#include "worker/core/kv_geometry.h"
#include "worker/core/model_runner.h"
#include "worker/core/step_plan.h"

namespace palimpsest {

class FakeModel {
 public:
  struct Config {
    KvGeometry geometry;
    int32_t vocab_size = 50;
    int32_t sliding_window = 0;  // 0: none
  };

  // The entry of one position costs this much of a block; block_bytes must hold block_tokens of it.
  static constexpr int64_t kEntryBytes = sizeof(uint64_t);

  // `kv` is the KV region; only blocks of plans are touched. Block b starts at kv + b *
  // block_bytes.
  FakeModel(const Config& config, std::byte* kv) : config_(config), kv_(kv) {}

  // Computes the chunks in order. `stop_after` chunks, as if the step failed there: then the rest
  // is written with garbage and nothing is sampled.
  StepResult Execute(const StepPlan& plan, size_t stop_after = SIZE_MAX);

  // The first `count` output tokens behind `prompt`, of which the last `output_offset` are output.
  static std::vector<TokenId> Reference(const Config& config, std::vector<TokenId> prompt,
                                        int32_t output_offset, uint64_t seed, int32_t count);

 private:
  uint64_t* EntryAt(absl::Span<const BlockId> table, int32_t position) const;

  const Config config_;
  std::byte* const kv_;
};

// Runs a FakeModel's steps behind a gate of three stages.
class FakeRunner : public ModelRunner {
 public:
  // Both must outlive the runner; `gate` may be null.
  FakeRunner(FakeModel* model, ParameterGate* gate) : model_(model), gate_(gate) {}

  absl::Status Submit(const StepPlan& plan) override;
  absl::StatusOr<StepResult> Wait() override;

  int64_t steps() const { return steps_; }

 private:
  FakeModel* const model_;
  ParameterGate* const gate_;
  const StepPlan* plan_ = nullptr;
  int64_t steps_ = 0;  // that succeeded
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_FAKE_MODEL_H_
