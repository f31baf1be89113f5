// Checks the GPU runner on the GPU machine: logits against a reference, equal results when plans
// are replayed or pipelined, harmless padding rows, sampling against worker/core/sampling.h.
//
//   gpu_check --reference FILE [--gemm-cache FILE] [--tp GPUS] [--out FILE] [--short] [--rotation]
//
// FILE is what tests/reference/make_reference.py wrote: a small model whose weights both sides
// generate, a prompt, logits at some of its positions in float32, and how far transformers in
// bfloat16 is from them. The runner may be twice as far. A reference with KV in eight bits is for a
// runner with such a cache. Last, layers rotate in a deeper model of the same shape, with random
// weights (rotation_check.h). Prints one JSON object; exits with 1 if a check failed.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "nlohmann/json.hpp"
#include "worker/compute/cuda/gpu_model.h"
#include "worker/compute/cuda/rotation_check.h"
#include "worker/core/sampling.h"

namespace palimpsest::cuda {
namespace {

using Json = nlohmann::ordered_json;

constexpr int32_t kBlockTokens = 16;
constexpr int32_t kMaxSequences = 40;

[[noreturn]] void Die(const absl::Status& status) {
  std::cerr << "gpu_check: " << status << "\n";
  std::exit(EXIT_FAILURE);
}

template <typename T>
T ValueOrDie(absl::StatusOr<T> value) {
  if (!value.ok()) Die(value.status());
  return *std::move(value);
}

void OkOrDie(const absl::Status& status) {
  if (!status.ok()) Die(status);
}

Json ReadJson(const std::string& path) {
  std::ifstream file(path);
  if (!file) Die(absl::NotFoundError(path));
  return Json::parse(file);
}

SamplingRequest Greedy() {
  SamplingRequest request;
  request.params.temperature = 0;
  return request;
}

// Largest and mean difference to a reference.
struct Difference {
  double largest = 0, sum = 0;
  int64_t count = 0;

  void Add(const std::vector<float>& got, const std::vector<float>& expected) {
    for (size_t i = 0; i < expected.size(); ++i) {
      const double d = std::abs(double{got[i]} - expected[i]);
      largest = std::isnan(d) ? INFINITY : std::max(largest, d);
      sum += d;
    }
    count += static_cast<int64_t>(expected.size());
  }
  double mean() const { return sum / static_cast<double>(std::max<int64_t>(count, 1)); }
};

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

class Check {
 public:
  Check(GpuModel& model, const Json& reference)
      : model_(model),
        tokens_(reference["tokens"].get<std::vector<TokenId>>()),
        own_max_(reference["bf16_error"]["max"]),
        own_mean_(reference["bf16_error"]["mean"]) {
    for (size_t i = 0; i < reference["positions"].size(); ++i) {
      const size_t position = reference["positions"][i];
      expected_[position] = reference["logits"][i].get<std::vector<float>>();
      if (!reference.contains("kv_error")) continue;
      exact_[position] = reference["exact_logits"][i].get<std::vector<float>>();
      kv_max_ = reference["kv_error"]["max"];
      kv_mean_ = reference["kv_error"]["mean"];
    }
  }

  // Enough of everything for a run under compute-sanitizer.
  void Shorten() {
    generated_ = 3;
    repeats_ = 2;
  }

  // To compare with: `one`, the same model on one GPU, and `wide`, the same with KV in bf16; null:
  // none.
  Json RunAll(GpuModel* one, GpuModel* wide, bool& passed) {
    Json out;
    const auto add = [&](const char* name, Json result) {
      passed = passed && result.at("ok").get<bool>();
      out[name] = std::move(result);
      std::cerr << name << ": " << out[name] << std::endl;
    };
    add("decode_logits", DecodeLogits(1));
    add("batch_logits", DecodeLogits(20));
    add("prefill_logits", PrefillLogits());
    add("mixed_logits", MixedLogits());
    add("replay", Replay());
    add("pipelined", Pipelined());
    add("padding", Padding());
    add("refusals", Refusals());
    add("sampling", Sampling());
    if (one != nullptr) add("one_gpu", AgainstOneGpu(*one));
    if (wide != nullptr) add("kv_rounding", AgainstWideKv(*wide));
    return out;
  }

 private:
  // Submits and waits; returns the chunks' tokens.
  std::vector<SampledToken> Step(GpuRunner& runner, const StepPlan& plan) {
    OkOrDie(runner.Submit(plan));
    const StepResult result = ValueOrDie(runner.Wait());
    std::vector<SampledToken> tokens;
    for (const auto& sampled : result.sampled) tokens.push_back(sampled.value_or(SampledToken()));
    return tokens;
  }

  std::vector<BlockId> Open(int32_t tokens) { return TakeBlocks(tokens, kBlockTokens, &next_); }
  void CloseAll() { next_ = 1; }

  Json Judge(const Difference& got) const {
    const auto vocabulary = static_cast<int64_t>(model_.config().vocab_size);
    return {{"ok", got.count > 0 && got.largest <= 2 * own_max_ && got.mean() <= 2 * own_mean_},
            {"max_error", got.largest},
            {"mean_error", got.mean()},
            {"max_error_of_bf16", own_max_},
            {"mean_error_of_bf16", own_mean_},
            {"positions", got.count / vocabulary}};
  }

  // Logits of a chunk that ends with token `last`, if the reference has them.
  void Compare(GpuRunner& runner, size_t chunk, size_t last, Difference& got) {
    const auto expected = expected_.find(last);
    if (expected == expected_.end()) return;
    got.Add(ValueOrDie(runner.Logits(chunk)), expected->second);
  }

  // One token after another, through the graphs; `sequences` times the same.
  Json DecodeLogits(size_t sequences) {
    CloseAll();
    const auto runner = ValueOrDie(model_.NewRunner());
    const SamplingRequest greedy = Greedy();
    std::vector<std::vector<BlockId>> blocks;
    for (size_t s = 0; s < sequences; ++s) {
      blocks.push_back(Open(static_cast<int32_t>(tokens_.size())));
    }
    Difference got;
    for (size_t t = 0; t < tokens_.size(); ++t) {
      StepPlan plan;
      for (size_t s = 0; s < sequences; ++s) {
        plan.chunks.push_back({absl::MakeConstSpan(tokens_).subspan(t, 1), static_cast<int32_t>(t),
                               blocks[s], &greedy});
      }
      Step(*runner, plan);
      for (size_t s = 0; s < sequences; ++s) Compare(*runner, s, t, got);
    }
    Json json = Judge(got);
    json["graph_steps"] = runner->stats().graph_steps;
    json["ok"] = json["ok"].get<bool>() && runner->stats().eager_steps == 0;
    return json;
  }

  // The prompt up to a position, in chunks of one length of which the first is what remains.
  void Prefill(GpuRunner& runner, size_t past, size_t length, Difference& got) {
    CloseAll();
    const SamplingRequest greedy = Greedy();
    const auto blocks = Open(static_cast<int32_t>(past));
    size_t end = (past - 1) % length + 1;
    for (size_t t = 0; t < past; t = end, end += length) {
      StepPlan plan;
      plan.chunks.push_back({absl::MakeConstSpan(tokens_).subspan(t, end - t),
                             static_cast<int32_t>(t), blocks, &greedy});
      Step(runner, plan);
    }
    Compare(runner, 0, past - 1, got);
  }

  Json PrefillLogits() {
    const auto runner = ValueOrDie(model_.NewRunner());
    Difference got;
    size_t turn = 0;
    for (const size_t length : {2, 3, 15, 16, 17, 31, 64, 100, 128, 129, 200, 300}) {
      for (const auto& [position, logits] : expected_) {
        // Of many positions a part with each length.
        if (position + 1 >= length / 2 && turn++ % (1 + expected_.size() / 8) == 0) {
          Prefill(*runner, position + 1, length, got);
        }
      }
    }
    return Judge(got);
  }

  // Decodes and prompt chunks of several sequences in one step.
  Json MixedLogits() {
    CloseAll();
    const auto runner = ValueOrDie(model_.NewRunner());
    const SamplingRequest greedy = Greedy();
    std::mt19937 random(5);
    Difference got;
    struct Cursor {
      size_t at = 0;
      std::vector<BlockId> blocks;
    };
    std::vector<Cursor> cursors(12);
    for (Cursor& cursor : cursors) cursor.blocks = Open(static_cast<int32_t>(tokens_.size()));
    while (true) {
      StepPlan plan;
      std::vector<size_t> last;
      for (Cursor& cursor : cursors) {
        if (cursor.at == tokens_.size() || random() % 4 == 0) continue;
        size_t wanted = random() % 2 == 0 ? 1 : 1 + random() % 40;
        const auto next = expected_.lower_bound(cursor.at);
        if (wanted > 1 && random() % 2 == 0 && next != expected_.end()) {
          wanted = next->first - cursor.at + 1;
        }
        const size_t count = std::min(wanted, tokens_.size() - cursor.at);
        plan.chunks.push_back({absl::MakeConstSpan(tokens_).subspan(cursor.at, count),
                               static_cast<int32_t>(cursor.at), cursor.blocks,
                               random() % 5 == 0 ? nullptr : &greedy});
        cursor.at += count;
        last.push_back(cursor.at - 1);
      }
      if (plan.chunks.empty()) {
        if (std::all_of(cursors.begin(), cursors.end(),
                        [&](const Cursor& c) { return c.at == tokens_.size(); })) {
          break;
        }
        continue;
      }
      Step(*runner, plan);
      for (size_t c = 0; c < plan.chunks.size(); ++c) {
        if (plan.chunks[c].sampling != nullptr) Compare(*runner, c, last[c], got);
      }
    }
    Json json = Judge(got);
    json["eager_steps"] = runner->stats().eager_steps;
    json["graph_steps"] = runner->stats().graph_steps;
    return json;
  }

  // Generates with `sequences` sequences; every token's bits, in order.
  std::vector<int64_t> Generate(GpuRunner& runner, int sequences, int steps, bool pipelined,
                                bool sampled) {
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

  // The same plans again and again, by two runners.
  Json Replay() {
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

  Json Pipelined() {
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

  // Whatever the null block holds, the real rows have the same bits.
  Json Padding() {
    const auto runner = ValueOrDie(model_.NewRunner());
    const auto expected = Generate(*runner, 5, generated_, false, true);
    const int64_t padded = runner->stats().padding_rows;
    OkOrDie(model_.FillNullBlock(0xff));
    const auto poisoned = Generate(*runner, 5, generated_, false, true);
    return {{"ok", expected == poisoned && padded > 0}, {"padding_rows", padded}};
  }

  // Steps whose parameters do not come, at whichever stage, can be submitted again: prompts and
  // decodes then give the same tokens.
  Json Refusals() {
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

  // The tokens and log-probabilities that worker/core/sampling.h gives for the same logits.
  Json Sampling() {
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
        params.temperature =
            random() % 8 == 0 ? 0 : 0.3f + 0.1f * static_cast<float>(random() % 20);
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
        logprob_error =
            std::max(logprob_error, std::abs(double{got[s].logprob} - expected.logprob));
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

  // Logits and greedy tokens beside those of the same model on one GPU.
  Json AgainstOneGpu(GpuModel& one) {
    CloseAll();
    const auto here = ValueOrDie(model_.NewRunner());
    const auto there = ValueOrDie(one.NewRunner());
    const SamplingRequest greedy = Greedy();
    const auto blocks = Open(static_cast<int32_t>(tokens_.size()));
    Difference got;
    int64_t differ = 0;
    double largest_lead = 0;
    for (size_t t = 0; t < tokens_.size(); ++t) {
      StepPlan plan;
      plan.chunks.push_back(
          {absl::MakeConstSpan(tokens_).subspan(t, 1), static_cast<int32_t>(t), blocks, &greedy});
      const TokenId token = Step(*here, plan)[0].token;
      const TokenId expected = Step(*there, plan)[0].token;
      const std::vector<float> logits = ValueOrDie(there->Logits(0));
      got.Add(ValueOrDie(here->Logits(0)), logits);
      differ += token != expected;
      largest_lead = std::max(largest_lead, double{logits[expected]} - logits[token]);
    }
    Json json = Judge(got);
    // A token may differ where the two best logits were closer than twice the error of one.
    json["ok"] = json["ok"].get<bool>() && largest_lead <= 2 * got.largest;
    json["tokens_differ"] = differ;
    json["largest_lead"] = largest_lead;
    return json;
  }

  // What KV in eight bits costs: logits beside exact ones and beside those with KV in bf16, and how
  // far rounding KV alone takes the reference from exact ones.
  Json AgainstWideKv(GpuModel& wide) {
    CloseAll();
    const auto here = ValueOrDie(model_.NewRunner());
    const auto there = ValueOrDie(wide.NewRunner());
    const SamplingRequest greedy = Greedy();
    const auto blocks = Open(static_cast<int32_t>(tokens_.size()));
    Difference exact, other;
    for (size_t t = 0; t < tokens_.size(); ++t) {
      StepPlan plan;
      plan.chunks.push_back(
          {absl::MakeConstSpan(tokens_).subspan(t, 1), static_cast<int32_t>(t), blocks, &greedy});
      Step(*here, plan);
      Step(*there, plan);
      if (!exact_.contains(t)) continue;
      const std::vector<float> logits = ValueOrDie(here->Logits(0));
      exact.Add(logits, exact_[t]);
      other.Add(logits, ValueOrDie(there->Logits(0)));
    }
    const double limit_max = 2 * (kv_max_ + own_max_), limit_mean = 2 * (kv_mean_ + own_mean_);
    return {{"ok", exact.count > 0 && exact.largest <= limit_max && exact.mean() <= limit_mean &&
                       other.largest <= limit_max && other.mean() <= limit_mean},
            {"max_error_to_float32", exact.largest},
            {"mean_error_to_float32", exact.mean()},
            {"max_difference_to_bf16_kv", other.largest},
            {"mean_difference_to_bf16_kv", other.mean()},
            {"max_error_of_rounding", kv_max_},
            {"mean_error_of_rounding", kv_mean_}};
  }

  GpuModel& model_;
  const std::vector<TokenId> tokens_;
  // Of the reference, by position.
  std::map<size_t, std::vector<float>> expected_;
  // Without rounding, if `expected_` rounds KV to eight bits.
  std::map<size_t, std::vector<float>> exact_;
  double kv_max_ = 0;
  double kv_mean_ = 0;
  const double own_max_;
  const double own_mean_;
  int generated_ = 20;
  int repeats_ = 8;
  uint32_t next_ = 1;
};

// Layers rotate in a model of several slabs a layer, if they are large enough.
Json Rotation(const ModelConfig& shape, CudaRunnerOptions options, int32_t ranks,
              const GpuCollectivesOptions& collectives, ImagePlace place, int schedules) {
  constexpr int32_t kLayers = 9;
  ModelConfig config = shape;
  config.num_layers = kLayers;
  for (size_t i = 0; !shape.layer_windows.empty() && i < kLayers; ++i) {
    config.layer_windows.resize(kLayers);
    config.layer_windows[i] = shape.layer_windows[i % shape.layer_windows.size()];
  }
  const auto model = ValueOrDie(GpuModel::Create(config, 16384, options, ranks, MiB(2)));
  model->SetCollectives(collectives);
  OkOrDie(model->FillRandom(1));
  return ValueOrDie(RunRotationCheck(*model, place, options.block_tokens, schedules));
}

int Main(int argc, char** argv) {
  std::string path, out, cache;
  bool brief = false, overlap = true, direct = true, only_rotation = false;
  int32_t ranks = 1, schedules = 0;
  ImagePlace place = ImagePlace::kHost;
  // Low enough for both kernels to run.
  int32_t tensor_core_tokens = 200;
  CLI::App app("Checks the GPU runner against a reference");
  app.add_option("--reference", path, "file of tests/reference/make_reference.py")->required();
  app.add_option("--out", out, "file for the JSON");
  app.add_option("--gemm-cache", cache, "file of GEMM algorithms");
  app.add_option("--tensor-core-tokens", tensor_core_tokens, "see CudaRunnerOptions");
  app.add_flag("--overlap,!--no-overlap", overlap, "see CudaRunnerOptions");
  app.add_flag("--short", brief, "less of what only repeats");
  app.add_option("--tp", ranks, "GPUs that the model is shared among");
  app.add_flag("--direct,!--no-direct", direct, "exchange small messages without NCCL");
  app.add_flag("--rotation", only_rotation, "only the check of rotating layers");
  app.add_option("--schedules", schedules, "schedules with rotating layers; 0: 40, short: 3");
  app.add_option("--image", place, "where rotating layers are copied from")
      ->transform(CLI::CheckedTransformer(kImagePlaces));
  CLI11_PARSE(app, argc, argv);
  if (schedules == 0) schedules = brief ? 3 : 40;

  const Json reference = ReadJson(path);
  ModelConfig config = ValueOrDie(ParseModelConfig(reference["config"].dump(), ""));
  config.kv_dtype = ValueOrDie(ParseKvDtype(reference.value("kv_dtype", "bf16")));
  CudaRunnerOptions options;
  options.block_tokens = kBlockTokens;
  options.max_sequences = kMaxSequences;
  options.max_step_tokens = 4096;
  // Runners that measured for themselves might choose other algorithms, and differ in low bits.
  const std::string own_cache =
      std::filesystem::temp_directory_path() / ("gpu_check." + std::to_string(getpid()) + ".gemm");
  options.gemm_cache_file = cache.empty() ? own_cache : cache;
  options.overlap_launches = overlap;
  options.tensor_core_tokens = tensor_core_tokens;
  const auto model = ValueOrDie(GpuModel::Create(config, 32768, options, ranks));
  OkOrDie(model->LoadDummy(reference["seed"]));
  GpuCollectivesOptions collectives;
  if (!direct) collectives.max_direct_sum_bytes = collectives.max_direct_gather_bytes = 0;
  model->SetCollectives(collectives);
  std::unique_ptr<GpuModel> one;
  if (ranks > 1) {
    one = ValueOrDie(GpuModel::Create(config, 32768, options));
    OkOrDie(one->LoadDummy(reference["seed"]));
  }
  std::unique_ptr<GpuModel> wide;
  if (config.kv_dtype != KvDtype::kBf16) {
    ModelConfig plain = config;
    plain.kv_dtype = KvDtype::kBf16;
    wide = ValueOrDie(GpuModel::Create(plain, 32768, options, ranks));
    OkOrDie(wide->LoadDummy(reference["seed"]));
  }
  Check check(*model, reference);
  if (brief) check.Shorten();
  bool passed = true;
  Json checks;
  if (!only_rotation) checks = check.RunAll(one.get(), wide.get(), passed);
  checks["rotation"] = Rotation(config, options, ranks, collectives, place, schedules);
  std::cerr << "rotation: " << checks["rotation"] << std::endl;
  passed = passed && checks["rotation"]["ok"].get<bool>();
  const Json json = {{"model", reference["name"]},
                     {"ranks", ranks},
                     {"kv_dtype", std::string(KvDtypeName(config.kv_dtype))},
                     {"checks", checks},
                     {"passed", passed}};
  std::filesystem::remove(own_cache);
  std::cout << json.dump(1) << "\n";
  if (!out.empty()) std::ofstream(out) << json.dump(1) << "\n";
  return passed ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace palimpsest::cuda

int main(int argc, char** argv) { return palimpsest::cuda::Main(argc, argv); }
