#include "worker/compute/cuda/stepping_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>

namespace palimpsest::cuda {
namespace {

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

}  // namespace

std::vector<int64_t> SteppingCheck::Generate(GpuRunner& runner, int sequences, int steps,
                                             bool pipelined, bool sampled) {
  CloseAll();
  std::vector<std::vector<BlockId>> blocks;
  std::vector<SamplingRequest> requests(static_cast<size_t>(sequences), Greedy());
  std::vector<std::vector<TokenId>> histories(static_cast<size_t>(sequences));
  StepPlan plan;
  for (int s = 0; s < sequences; ++s) {
    const size_t prompt =
        5 + static_cast<size_t>(s * 13) % std::min<size_t>(90, tokens_.size() - 5);
    blocks.push_back(Open(static_cast<int32_t>(prompt) + steps + 1));
    histories[s].assign(tokens_.begin(), tokens_.begin() + static_cast<int64_t>(prompt));
    SamplingParams& params = requests[s].params;
    params.logprobs = 2;
    if (sampled) {
      params.temperature = 0.5f + 0.1f * static_cast<float>(s % 8);
      params.top_p = s % 3 == 0 ? 0.9f : 1.0f;
      params.top_k = s % 2 == 0 ? 40 : 0;
      params.repetition_penalty = s % 4 == 1 ? 1.3f : 1.0f;
      params.seed = static_cast<uint64_t>(s);
    }
    requests[s].history = histories[s];
  }
  for (int s = 0; s < sequences; ++s) {
    plan.chunks.push_back({histories[s], 0, blocks[s], &requests[s]});
  }
  std::vector<int64_t> bits;
  const auto take = [&](const StepResult& result) {
    for (int s = 0; s < sequences; ++s) {
      const SampledToken& token = *result.sampled[s];
      histories[s].push_back(token.token);
      bits.push_back(token.token);
      int32_t float_bits;
      for (const float value : {token.logprob, token.top[0].second, token.top[1].second}) {
        std::memcpy(&float_bits, &value, 4);
        bits.push_back(float_bits);
      }
    }
  };
  OkOrDie(runner.Submit(plan));
  for (int step = 0; step < steps; ++step) {
    if (!pipelined) take(ValueOrDie(runner.Wait()));
    plan.chunks.clear();
    std::vector<TokenId> last(static_cast<size_t>(sequences));
    for (int s = 0; s < sequences; ++s) {
      requests[s].output_index = step + 1;
      requests[s].history = histories[s];
      const auto position = static_cast<int32_t>(histories[s].size()) - (pipelined ? 0 : 1);
      last[s] = pipelined ? 0 : histories[s].back();
      plan.chunks.push_back({absl::MakeConstSpan(last).subspan(s, 1), position, blocks[s],
                             &requests[s], pipelined ? s : -1});
    }
    OkOrDie(runner.Submit(plan));
    if (pipelined) take(ValueOrDie(runner.Wait()));
  }
  take(ValueOrDie(runner.Wait()));
  return bits;
}

Json SteppingCheck::Replay() {
  const auto first = ValueOrDie(model_.NewRunner());
  const auto second = ValueOrDie(model_.NewRunner());
  int64_t differ = 0, count = 0;
  Json by_sequences;
  for (const int sequences : {1, 3, 8, 17, 33}) {
    const auto expected = Generate(*first, sequences, generated_, false, true);
    int64_t here = 0;
    for (int repeat = 0; repeat < repeats_; ++repeat) {
      GpuRunner& runner = repeat % 2 == 0 ? *second : *first;
      const auto got = Generate(runner, sequences, generated_, false, true);
      for (size_t i = 0; i < got.size(); ++i) here += got[i] != expected[i];
      count += static_cast<int64_t>(got.size());
    }
    if (here > 0) by_sequences[std::to_string(sequences)] = here;
    differ += here;
  }
  return {{"ok", differ == 0}, {"values", count}, {"differ", differ}, {"where", by_sequences}};
}

Json SteppingCheck::Pipelined() {
  const auto runner = ValueOrDie(model_.NewRunner());
  int64_t differ = 0, count = 0;
  for (const bool sampled : {false, true}) {
    for (const int sequences : {1, 7, 20}) {
      const auto a = Generate(*runner, sequences, generated_, false, sampled);
      const auto b = Generate(*runner, sequences, generated_, true, sampled);
      for (size_t i = 0; i < a.size(); ++i) differ += a[i] != b[i];
      count += static_cast<int64_t>(a.size());
    }
  }
  return {{"ok", differ == 0}, {"values", count}, {"differ", differ}};
}

Json SteppingCheck::Padding() {
  const auto runner = ValueOrDie(model_.NewRunner());
  const auto expected = Generate(*runner, 5, generated_, false, true);
  const int64_t padded = runner->stats().padding_rows;
  OkOrDie(model_.FillNullBlock(0xff));
  const auto poisoned = Generate(*runner, 5, generated_, false, true);
  return {{"ok", expected == poisoned && padded > 0}, {"padding_rows", padded}};
}

Json SteppingCheck::Refusals() {
  RefusingGate gate;
  const auto runner = ValueOrDie(model_.NewRunner(&gate));
  const SamplingRequest greedy = Greedy();
  int64_t refused = 0, expected_refusals = 0;
  const auto generate = [&](int question) {
    CloseAll();
    const auto blocks = Open(32);
    std::vector<TokenId> tokens(tokens_.begin(), tokens_.begin() + 24);
    for (size_t first = 0; tokens.size() < 28; first = tokens.size() - 1) {
      StepPlan plan;
      plan.chunks.push_back({absl::MakeConstSpan(tokens).subspan(first),
                             static_cast<int32_t>(first), blocks, &greedy});
      if (question > 0) {
        gate.RefuseAt(question);
        OkOrDie(runner->Submit(plan));
        refused += absl::IsUnavailable(runner->Wait().status());
        ++expected_refusals;
      }
      gate.RefuseAt(0);
      tokens.push_back(Step(*runner, plan)[0].token);
    }
    return tokens;
  };
  const auto expected = generate(0);
  const int stages = model_.config().num_layers + 2;
  int64_t differ = 0;
  for (const int question : {1, 2, stages / 2, stages}) differ += generate(question) != expected;
  return {{"ok", differ == 0 && refused == expected_refusals},
          {"refused", refused},
          {"differ", differ}};
}

Json SteppingCheck::Sampling() {
  CloseAll();
  const auto runner = ValueOrDie(model_.NewRunner());
  const int32_t sequences = 32;
  std::vector<std::vector<BlockId>> blocks;
  for (int32_t s = 0; s < sequences; ++s) blocks.push_back(Open(64));
  std::mt19937 random(9);
  SamplingScratch scratch;
  int64_t differ = 0, count = 0, top_differ = 0;
  double logprob_error = 0;
  const std::vector<TokenId> history(tokens_.begin(), tokens_.begin() + 48);
  for (int step = 0; step < 48; ++step) {
    StepPlan plan;
    std::vector<SamplingRequest> requests(sequences);
    for (int32_t s = 0; s < sequences; ++s) {
      SamplingParams& params = requests[s].params;
      params.temperature = random() % 8 == 0 ? 0 : 0.3f + 0.1f * static_cast<float>(random() % 20);
      params.top_k = random() % 2 == 0 ? 0 : static_cast<int32_t>(1 + random() % 300);
      params.top_p = random() % 2 == 0 ? 1 : 0.05f + 0.05f * static_cast<float>(random() % 19);
      params.min_p = random() % 3 != 0 ? 0 : 0.02f * static_cast<float>(1 + random() % 20);
      params.repetition_penalty =
          random() % 3 != 0 ? 1 : 0.8f + 0.1f * static_cast<float>(random() % 8);
      params.logprobs = random() % 3 != 0 ? -1 : static_cast<int32_t>(random() % 21);
      params.seed = random();
      requests[s].output_index = step;
      requests[s].history = history;
      plan.chunks.push_back(
          {absl::MakeConstSpan(tokens_).subspan(step, 1), step, blocks[s], &requests[s]});
    }
    const std::vector<SampledToken> got = Step(*runner, plan);
    for (int32_t s = 0; s < sequences; ++s) {
      const std::vector<float> logits = ValueOrDie(runner->Logits(s));
      const SampledToken expected = Sample(logits, requests[s], scratch);
      ++count;
      if (got[s].token != expected.token) {
        ++differ;
        continue;
      }
      if (requests[s].params.logprobs < 0) continue;
      logprob_error = std::max(logprob_error, std::abs(double{got[s].logprob} - expected.logprob));
      top_differ += got[s].top.size() != expected.top.size();
      for (size_t i = 0; i < std::min(got[s].top.size(), expected.top.size()); ++i) {
        top_differ += got[s].top[i].first != expected.top[i].first;
      }
    }
  }
  return {{"ok", differ * 200 <= count && top_differ == 0 && logprob_error < 1e-4},
          {"samples", count},
          {"tokens_differ", differ},
          {"alternatives_differ", top_differ},
          {"max_logprob_error", logprob_error}};
}

}  // namespace palimpsest::cuda
