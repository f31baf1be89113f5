#include "worker/compute/cuda/logits_check.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace palimpsest::cuda {

// Largest and mean difference to a reference.
struct LogitsCheck::Difference {
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

LogitsCheck::LogitsCheck(GpuModel& model, const Json& reference, int32_t block_tokens)
    : CheckedModel(model, reference["tokens"].get<std::vector<TokenId>>(), block_tokens),
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

Json LogitsCheck::Judge(const Difference& got) const {
  const auto vocabulary = static_cast<int64_t>(model_.config().vocab_size);
  return {{"ok", got.count > 0 && got.largest <= 2 * own_max_ && got.mean() <= 2 * own_mean_},
          {"max_error", got.largest},
          {"mean_error", got.mean()},
          {"max_error_of_bf16", own_max_},
          {"mean_error_of_bf16", own_mean_},
          {"positions", got.count / vocabulary}};
}

void LogitsCheck::Compare(GpuRunner& runner, size_t chunk, size_t last, Difference& got) {
  const auto expected = expected_.find(last);
  if (expected == expected_.end()) return;
  got.Add(ValueOrDie(runner.Logits(chunk)), expected->second);
}

Json LogitsCheck::DecodeLogits(size_t sequences) {
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

void LogitsCheck::Prefill(GpuRunner& runner, size_t past, size_t length, Difference& got) {
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

Json LogitsCheck::PrefillLogits() {
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

Json LogitsCheck::MixedLogits() {
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

Json LogitsCheck::AgainstOneGpu(GpuModel& one) {
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

Json LogitsCheck::AgainstWideKv(GpuModel& wide) {
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

}  // namespace palimpsest::cuda
