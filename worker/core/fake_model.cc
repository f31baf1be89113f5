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

TokenId NextToken(uint64_t last_entry, const SamplingRequest& request, int32_t vocab_size) {
  uint64_t hash = Mix(Mix(last_entry, request.params.seed), request.output_index);
  if (request.params.repetition_penalty != 1.0f) {
    for (TokenId token : request.history) hash = Mix(hash, token);
  }
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
    const absl::Span<const TokenId> history = chunk.sampling->history;
    PALIMPSEST_CHECK(static_cast<int32_t>(history.size()) == last + 1);
    PALIMPSEST_CHECK(history.last(chunk.tokens.size()) == chunk.tokens);
    result.sampled.back().emplace().token =
        NextToken(*EntryAt(chunk.block_table, last), *chunk.sampling, config_.vocab_size);
  }
  return result;
}

std::vector<TokenId> FakeModel::Reference(const Config& config, std::vector<TokenId> prompt,
                                          int32_t output_offset, const SamplingParams& params,
                                          int32_t count) {
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
    const SamplingRequest request{params, tokens, made + output_offset};
    tokens.push_back(NextToken(entries.back(), request, config.vocab_size));
  }
  return {tokens.begin() + prompt_size, tokens.end()};
}

absl::Status FakeRunner::Submit(const StepPlan& plan) {
  PALIMPSEST_CHECK(static_cast<int>(flights_.size()) < options_.depth);
  PALIMPSEST_CHECK(!failure_seen_);
  if (std::exchange(refuse_next_, false)) return absl::InternalError("the test refuses this plan");
  for (const SequenceChunk& chunk : plan.chunks) {
    if (chunk.token_from < 0) continue;
    PALIMPSEST_CHECK(!flights_.empty() && chunk.tokens.size() == 1);
    const SequenceChunk& source = flights_.back().plan.plan().chunks.at(chunk.token_from);
    PALIMPSEST_CHECK(source.sampling != nullptr);
    PALIMPSEST_CHECK(source.first_position + static_cast<int32_t>(source.tokens.size()) ==
                     chunk.first_position);
    ++continued_chunks_;
  }
  flights_.push_back({PlanCopy(plan), std::exchange(fail_next_, false), std::nullopt});
  if (options_.depth == 1) return absl::OkStatus();
  switch (random_() % 3) {
    case 0:
      ExecuteUpTo(flights_.size() - 1);
      break;
    case 1:
      if (flights_.size() > 1) ExecuteUpTo(flights_.size() - 2);
      break;
    default:
      break;
  }
  return absl::OkStatus();
}

absl::StatusOr<StepResult> FakeRunner::Wait() {
  PALIMPSEST_CHECK(!flights_.empty());
  ExecuteUpTo(0);
  absl::StatusOr<StepResult> result = *std::move(flights_.front().result);
  flights_.pop_front();
  failure_seen_ = !flights_.empty() && (failure_seen_ || !result.ok());
  if (flights_.empty()) failed_ = false;
  return result;
}

absl::Status FakeRunner::SetRotation(const Rotation& rotation) {
  PALIMPSEST_CHECK(flights_.empty());
  rotation_ = rotation;
  return absl::OkStatus();
}

void FakeRunner::ExecuteUpTo(size_t index) {
  for (size_t i = 0; i <= index; ++i) {
    Flight& flight = flights_[i];
    if (flight.result.has_value()) continue;
    flight.plan.Resolve(last_);
    if (options_.before_execution) options_.before_execution(flight.plan.plan());
    flight.result = failed_ ? Void(flight) : Execute(flight);
    failed_ |= !flight.result->ok();
    last_ = flight.result->ok() ? **flight.result : StepResult();
  }
}

absl::Status FakeRunner::PassGate() {
  constexpr int kStages = 3;
  absl::Status status;
  for (int stage = 0; gate_ != nullptr && stage < kStages && status.ok(); ++stage) {
    status = gate_->AwaitStage(stage);
  }
  return status;
}

absl::StatusOr<StepResult> FakeRunner::Execute(Flight& flight) {
  const StepPlan& plan = flight.plan.plan();
  // A step that stops there has not touched KV, which may be arriving.
  if (absl::Status status = PassGate(); !status.ok()) return status;
  if (flight.fails) {
    model_->Execute(plan, plan.chunks.size() / 2);
    return absl::InternalError("the test lets this step fail");
  }
  ++steps_;
  return model_->Execute(plan);
}

// What a step does whose input is worthless: anything, to its own blocks.
absl::StatusOr<StepResult> FakeRunner::Void(const Flight& flight) {
  const StepPlan& plan = flight.plan.plan();
  if (absl::Status status = PassGate(); !status.ok()) return status;
  StepResult result = model_->Execute(plan, 0);
  if (random_() % 2 == 0) return absl::InternalError("a step before this one failed");
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    if (plan.chunks[i].sampling != nullptr) result.sampled[i].emplace();
  }
  return result;
}

}  // namespace palimpsest
