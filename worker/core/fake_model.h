// A model for tests whose every token depends on the exact content of the KV memory it was told to
// read: the KV entry of a token is a hash of the token, its position and all entries it sees, and
// the next token is a hash of the last entry, and of the history if there is a repetition penalty.
// A wrong block, stale or garbled KV, a lost or repeated token or a changed seed changes the
// output.
#ifndef PALIMPSEST_WORKER_CORE_FAKE_MODEL_H_
#define PALIMPSEST_WORKER_CORE_FAKE_MODEL_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"
#include "worker/core/kv_geometry.h"
#include "worker/core/model_runner.h"
#include "worker/core/plan_copy.h"
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
                                        int32_t output_offset, const SamplingParams& params,
                                        int32_t count);

 private:
  uint64_t* EntryAt(absl::Span<const BlockId> table, int32_t position) const;

  const Config config_;
  std::byte* const kv_;
};

// Runs a FakeModel's steps, in order, behind a gate of three stages. With a depth of 1 a step is
// executed when it is waited for. With more, that is anybody's guess, as with a GPU: at once, when
// the next one is submitted, or as late as that.
class FakeRunner : public ModelRunner {
 public:
  struct Options {
    int depth = 1;
    uint64_t seed = 0;  // of when steps are executed
    // Called before a step is executed; may be null.
    std::function<void(const StepPlan&)> before_execution;
  };

  // Both must outlive the runner; `gate` may be null.
  FakeRunner(FakeModel* model, ParameterGate* gate, Options options)
      : model_(model), gate_(gate), options_(std::move(options)), random_(options_.seed) {}
  FakeRunner(FakeModel* model, ParameterGate* gate) : FakeRunner(model, gate, Options()) {}

  int pipeline_depth() const override { return options_.depth; }
  absl::Status Submit(const StepPlan& plan) override;
  absl::StatusOr<StepResult> Wait() override;
  absl::Status SetRotation(const Rotation& rotation) override;

  // The step submitted next will fail, or Submit will.
  void FailNext() { fail_next_ = true; }
  void RefuseNext() { refuse_next_ = true; }

  int steps_in_flight() const { return static_cast<int>(flights_.size()); }
  int64_t steps() const { return steps_; }
  // The last one that it was told.
  const Rotation& rotation() const { return rotation_; }
  int64_t continued_chunks() const { return continued_chunks_; }

 private:
  struct Flight {
    PlanCopy plan;
    bool fails;
    std::optional<absl::StatusOr<StepResult>> result;
  };

  // Executes the flights up to this one, as far as that has not been done.
  void ExecuteUpTo(size_t index);
  // Waits for every stage.
  absl::Status PassGate();
  absl::StatusOr<StepResult> Execute(Flight& flight);
  absl::StatusOr<StepResult> Void(const Flight& flight);

  FakeModel* const model_;
  ParameterGate* const gate_;
  const Options options_;
  std::mt19937_64 random_;
  std::deque<Flight> flights_;
  StepResult last_;      // of the step executed last
  bool failed_ = false;  // a step has failed, so those in flight behind it are void
  bool failure_seen_ = false;
  bool fail_next_ = false;
  bool refuse_next_ = false;
  Rotation rotation_;
  int64_t steps_ = 0;             // that succeeded
  int64_t continued_chunks_ = 0;  // submitted before their token was known
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_FAKE_MODEL_H_
