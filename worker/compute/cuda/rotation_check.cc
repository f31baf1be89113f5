#include "worker/compute/cuda/rotation_check.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/monotonic_time.h"

namespace palimpsest::cuda {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kRounds = 12;
// Some schedules have many sequences, and steps of more rows than fused products take.
constexpr size_t kMaxSequences = 12;
constexpr size_t kManySequences = 40;
constexpr int32_t kMaxPrompt = 60;
constexpr int32_t kMaxTokens = 256;
constexpr absl::Duration kGraphPatience = absl::Seconds(20);

// Refuses one question.
class RefusingGate : public ParameterGate {
 public:
  absl::Status AwaitStage(int) override {
    return --until_refusal_ == 0 ? absl::UnavailableError("refused") : absl::OkStatus();
  }
  // The `question`-th from now, from 1; 0: none.
  void RefuseAt(int question) { until_refusal_ = question; }

 private:
  int until_refusal_ = 0;
};

struct Counts {
  int64_t rotations = 0;
  int64_t refused = 0;
  int64_t graph_steps = 0;  // while layers rotated
  int64_t eager_steps = 0;
  int64_t copied_bytes = 0;
  absl::Duration stall;
};

struct Sequence {
  std::vector<BlockId> blocks;
  std::vector<TokenId> tokens;
  size_t prompt = 0;
  int32_t done = 0;  // tokens whose KV was written
  SamplingRequest request;

  bool decodes() const { return done + 1 == static_cast<int32_t>(tokens.size()); }
};

// One schedule. What the steps are depends on its number alone, and on the tokens.
class Schedule {
 public:
  // `disturbed`: what rotates changes, and steps are refused.
  Schedule(GpuModel& model, GpuRunner& runner, RefusingGate& gate, int32_t block_tokens,
           uint32_t number, Counts* disturbed)
      : model_(model),
        runner_(runner),
        gate_(gate),
        steps_(number),
        disturbances_(number + 1),
        counts_(disturbed) {
    uint32_t next_block = 1;
    sequences_.resize(number % 8 == 1 ? kManySequences : 1 + steps_() % kMaxSequences);
    for (Sequence& sequence : sequences_) {
      sequence.blocks = TakeBlocks(kMaxTokens, block_tokens, &next_block);
      sequence.prompt = 1 + steps_() % kMaxPrompt;
      for (size_t i = 0; i < sequence.prompt; ++i) {
        sequence.tokens.push_back(static_cast<TokenId>(steps_() % model.config().vocab_size));
      }
      SamplingParams& params = sequence.request.params;
      params.temperature = steps_() % 3 == 0 ? 0 : 0.8f;
      params.logprobs = 1;
      params.seed = steps_();
    }
  }

  // The bits of every token and log-probability, in order.
  absl::StatusOr<std::vector<int64_t>> Run() {
    for (int round = 0; round < kRounds; ++round) {
      if (counts_ != nullptr && disturbances_() % 3 != 0) {
        if (absl::Status status = Rotate(); !status.ok()) return status;
      }
      std::vector<Sequence*> decodes;
      for (Sequence& sequence : sequences_) {
        if (sequence.decodes() && steps_() % 4 != 0) decodes.push_back(&sequence);
      }
      absl::Status status =
          decodes.empty() || steps_() % 3 == 0 ? MixedStep() : Decode(decodes, 1 + steps_() % 6);
      if (!status.ok()) return status;
    }
    if (counts_ == nullptr) return std::move(bits_);
    if (absl::Status status = model_.SetRotation(runner_, Rotation()); !status.ok()) return status;
    return std::move(bits_);
  }

 private:
  absl::Status Rotate() {
    const int32_t layers = model_.config().num_layers;
    const auto slots = static_cast<int32_t>(1 + disturbances_() % 2);
    const auto freed = static_cast<int32_t>(disturbances_() % (layers - slots + 1));
    rotation_ = EvenRotation(1, layers, freed, slots);
    ++counts_->rotations;
    absl::Status status = model_.SetRotation(runner_, rotation_);
    if (!status.ok() || rotation_.none() || disturbances_() % 2 == 0) return status;
    return AwaitGraphs();
  }

  // Ranks build a graph when they need it.
  absl::Status AwaitGraphs() const {
    const absl::Time deadline = MonotonicNow() + kGraphPatience;
    while (model_.ranks() == 1) {
      const CudaRunnerStats stats = runner_.stats();
      if (stats.rotation_graphs.graphs == stats.graphs.graphs) break;
      if (MonotonicNow() > deadline) {
        return absl::DeadlineExceededError(absl::StrCat(
            "the graphs of a rotation are not there after ", absl::FormatDuration(kGraphPatience)));
      }
      std::this_thread::yield();
    }
    return absl::OkStatus();
  }

  absl::Status MixedStep() {
    StepPlan plan;
    std::vector<Sequence*> chunks;
    for (Sequence& sequence : sequences_) {
      if (steps_() % 4 == 0) continue;
      const auto left = static_cast<int32_t>(sequence.tokens.size()) - sequence.done;
      const int32_t count = std::min<int32_t>(left, 1 + static_cast<int32_t>(steps_() % 30));
      sequence.request.history = sequence.tokens;
      plan.chunks.push_back(
          {absl::MakeConstSpan(sequence.tokens)
               .subspan(static_cast<size_t>(sequence.done), static_cast<size_t>(count)),
           sequence.done, sequence.blocks, count == left ? &sequence.request : nullptr});
      sequence.done += count;
      chunks.push_back(&sequence);
    }
    if (plan.chunks.empty()) return absl::OkStatus();
    absl::Status status = Refuse(plan);
    if (status.ok()) status = runner_.Submit(plan);
    return status.ok() ? Take(chunks) : status;
  }

  // So many steps, two of them in flight.
  absl::Status Decode(const std::vector<Sequence*>& decodes, uint32_t steps) {
    for (uint32_t step = 0; step < steps; ++step) {
      StepPlan plan;
      for (size_t i = 0; i < decodes.size(); ++i) {
        Sequence& sequence = *decodes[i];
        sequence.request.history = sequence.tokens;
        sequence.request.output_index =
            static_cast<int32_t>(sequence.tokens.size() - sequence.prompt) + (step > 0 ? 1 : 0);
        plan.chunks.push_back({absl::MakeConstSpan(sequence.tokens).last(1), sequence.done,
                               sequence.blocks, &sequence.request,
                               step > 0 ? static_cast<int32_t>(i) : -1});
        ++sequence.done;
      }
      absl::Status status = step == 0 ? Refuse(plan) : absl::OkStatus();
      if (status.ok()) status = runner_.Submit(plan);
      if (status.ok() && step > 0) status = Take(decodes);
      if (!status.ok()) return status;
    }
    return Take(decodes);
  }

  // Has the step abandoned somewhere before it is submitted for good, now and then.
  absl::Status Refuse(const StepPlan& plan) {
    if (counts_ == nullptr || disturbances_() % 4 != 0) return absl::OkStatus();
    gate_.RefuseAt(static_cast<int>(1 + disturbances_() % (model_.config().num_layers + 2)));
    absl::Status status = runner_.Submit(plan);
    if (!status.ok()) return status;
    status = runner_.Wait().status();
    gate_.RefuseAt(0);
    if (absl::IsUnavailable(status)) {
      ++counts_->refused;
      return absl::OkStatus();
    }
    // There were fewer questions: the step has run, and may run again.
    return status;
  }

  absl::Status Take(const std::vector<Sequence*>& chunks) {
    const absl::StatusOr<StepResult> result = runner_.Wait();
    if (!result.ok()) return result.status();
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (!result->sampled[i].has_value()) continue;
      const SampledToken& token = *result->sampled[i];
      Sequence& sequence = *chunks[i];
      sequence.tokens.push_back(token.token);
      sequence.request.output_index =
          static_cast<int32_t>(sequence.tokens.size() - sequence.prompt);
      bits_.push_back(token.token);
      for (const float value : {token.logprob, token.top[0].second}) {
        int32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        bits_.push_back(bits);
      }
    }
    if (counts_ != nullptr && !rotation_.none()) {
      ++(result->graph ? counts_->graph_steps : counts_->eager_steps);
      counts_->copied_bytes += result->rotation_bytes.count();
      counts_->stall += result->times.rotation_stall;
    }
    return absl::OkStatus();
  }

  GpuModel& model_;
  GpuRunner& runner_;
  RefusingGate& gate_;
  std::mt19937 steps_;
  std::mt19937 disturbances_;
  Counts* const counts_;
  std::vector<Sequence> sequences_;
  Rotation rotation_;
  std::vector<int64_t> bits_;
};

}  // namespace

absl::StatusOr<Json> RunRotationCheck(GpuModel& model, ImagePlace place, int32_t block_tokens,
                                      int schedules) {
  if (absl::Status status = model.MakeImage(place); !status.ok()) return status;
  RefusingGate gate;
  auto plain = model.NewRunner(&gate);
  if (!plain.ok()) return plain.status();
  auto rotating = model.NewRunner(&gate);
  if (!rotating.ok()) return rotating.status();
  Counts counts;
  int64_t values = 0, differ = 0;
  Json where = Json::array();
  for (int number = 0; number < schedules; ++number) {
    const auto seed = static_cast<uint32_t>(number * 2 + 1);
    auto expected = Schedule(model, **plain, gate, block_tokens, seed, nullptr).Run();
    if (!expected.ok()) return expected.status();
    auto got = Schedule(model, **rotating, gate, block_tokens, seed, &counts).Run();
    if (!got.ok()) return got.status();
    values += static_cast<int64_t>(expected->size());
    if (*got == *expected) continue;
    ++differ;
    where.push_back(number);
  }
  return Json{
      {"ok", differ == 0 && counts.graph_steps > 0 && counts.eager_steps > 0 && counts.refused > 0},
      {"schedules", schedules},
      {"differ", differ},
      {"where", where},
      {"values", values},
      {"rotations", counts.rotations},
      {"graph_steps", counts.graph_steps},
      {"eager_steps", counts.eager_steps},
      {"refused", counts.refused},
      {"copied_bytes", counts.copied_bytes},
      {"stall_ms", absl::ToDoubleMilliseconds(counts.stall)}};
}

}  // namespace palimpsest::cuda
