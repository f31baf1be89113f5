#include "worker/core/fake_model.h"

#include <algorithm>
#include <utility>

#include "worker/core/check.h"

namespace palimpsest {
namespace {

uint64_t Mix(uint64_t state, uint64_t value) {
  state = (state ^ value) * 0x9E3779B97F4A7C15;
  return state ^ (state >> 29);
}

int32_t FirstSeen(int32_t position, int32_t window) {
  return window == 0 ? 0 : std::max(0, position - window + 1);
}

TokenId NextToken(uint64_t last_entry, uint64_t seed, int64_t output_index, int32_t vocab_size) {
  const uint64_t hash = Mix(Mix(last_entry, seed), static_cast<uint64_t>(output_index));
  return static_cast<TokenId>((hash >> 16) % vocab_size);
}

}  // namespace

uint64_t* FakeModel::EntryAt(absl::Span<const BlockId> table, int32_t position) const {
  const int32_t size = config_.geometry.block_tokens;
  const BlockId block = table.at(position / size);
  PALIMPSEST_CHECK(block != kNullBlock && block.value() < config_.geometry.block_count());
  std::byte* const start = kv_ + (config_.geometry.block_bytes * block.value()).count();
  return reinterpret_cast<uint64_t*>(start) + position % size;
}

StepResult FakeModel::Execute(const StepPlan& plan, size_t stop_after) {
  StepResult result;
  for (size_t index = 0; index < plan.chunks.size(); ++index) {
    const SequenceChunk& chunk = plan.chunks[index];
    PALIMPSEST_CHECK(!chunk.tokens.empty());
    for (size_t i = 0; i < chunk.tokens.size(); ++i) {
      const int32_t position = chunk.first_position + static_cast<int32_t>(i);
      uint64_t entry = Mix(static_cast<uint64_t>(chunk.tokens[i]) + 1, position);
      for (int32_t p = FirstSeen(position, config_.sliding_window); p < position; ++p) {
        entry = Mix(entry, *EntryAt(chunk.block_table, p));
      }
      if (index >= stop_after) entry = ~entry;
      *EntryAt(chunk.block_table, position) = entry;
    }
    result.sampled.emplace_back();
    if (chunk.sampling == nullptr || index >= stop_after) continue;
    const int32_t last = chunk.first_position + static_cast<int32_t>(chunk.tokens.size()) - 1;
    SampledToken token;
    token.token = NextToken(*EntryAt(chunk.block_table, last), chunk.sampling->params.seed,
                            chunk.sampling->output_index, config_.vocab_size);
    result.sampled.back() = token;
  }
  return result;
}

std::vector<TokenId> FakeModel::Reference(const Config& config, std::vector<TokenId> prompt,
                                          int32_t output_offset, uint64_t seed, int32_t count) {
  const size_t prompt_size = prompt.size();
  std::vector<TokenId> tokens = std::move(prompt);
  std::vector<uint64_t> entries;
  while (true) {
    for (auto position = static_cast<int32_t>(entries.size());
         position < static_cast<int32_t>(tokens.size()); ++position) {
      uint64_t entry = Mix(static_cast<uint64_t>(tokens[position]) + 1, position);
      for (int32_t p = FirstSeen(position, config.sliding_window); p < position; ++p) {
        entry = Mix(entry, entries[p]);
      }
      entries.push_back(entry);
    }
    const auto made = static_cast<int32_t>(tokens.size() - prompt_size);
    if (made == count) break;
    tokens.push_back(NextToken(entries.back(), seed, made + output_offset, config.vocab_size));
  }
  return {tokens.begin() + prompt_size, tokens.end()};
}

absl::Status FakeRunner::Submit(const StepPlan& plan) {
  PALIMPSEST_CHECK(plan_ == nullptr);
  plan_ = &plan;
  return absl::OkStatus();
}

absl::StatusOr<StepResult> FakeRunner::Wait() {
  PALIMPSEST_CHECK(plan_ != nullptr);
  const StepPlan& plan = *std::exchange(plan_, nullptr);
  constexpr int kStages = 3;
  for (int stage = 0; gate_ != nullptr && stage < kStages; ++stage) {
    if (absl::Status status = gate_->AwaitStage(stage); !status.ok()) {
      model_->Execute(plan, plan.chunks.size() / 2);
      return status;
    }
  }
  ++steps_;
  return model_->Execute(plan);
}

}  // namespace palimpsest
