#include "worker/core/scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/core/check.h"

namespace palimpsest {
namespace {

// Holds the place of a token that a step in flight samples.
constexpr TokenId kUnknownToken = 0;
constexpr int32_t kAdmissionInterval = 16;

bool IsOlder(const Sequence* a, const Sequence* b) { return a->id < b->id; }

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config, const TokenBytes* token_bytes, KvStore* store,
                     BlockKeyFunction key)
    : config_(config),
      token_bytes_(token_bytes),
      key_(key),
      blocks_(config.geometry),
      capacity_blocks_(config.capacity_blocks()),
      longest_sequence_(config.LongestSequence()),
      swap_space_(config.swap_blocks),
      // A token that sees itself alone needs nothing of what was before it.
      store_(config.sliding_window == 1 ? nullptr : store) {
  if (store_ == nullptr) return;
  Offloader::Limits limits;
  limits.copying_blocks = std::clamp(capacity_blocks_ / 8, 1, limits.copying_blocks);
  limits.windowed = config.sliding_window > 0;
  offloader_.emplace(&blocks_, store_, config.root_key, limits);
}

absl::StatusOr<SequenceId> Scheduler::Add(SequenceRequest request) {
  if (absl::Status status = CheckRequest(request); !status.ok()) return status;
  if (static_cast<int32_t>(sequences_.size()) >= config_.max_sequences()) {
    return absl::ResourceExhaustedError(absl::StrCat("the queue is full: ", sequences_.size(),
                                                     " requests run or wait; try again later"));
  }
  const int64_t begin = static_cast<int64_t>(request.prompt.size()) - request.output_offset;
  const int64_t longest =
      request.params.max_tokens > 0
          ? std::min<int64_t>(longest_sequence_, begin + request.params.max_tokens)
          : longest_sequence_;
  const SequenceId id(next_id_++);
  auto owned = std::make_unique<Sequence>(id, std::move(request), static_cast<int32_t>(longest));
  Sequence& sequence = *owned;
  sequence.usage.prompt_tokens = sequence.prompt_size;
  sequences_.emplace(id, std::move(owned));
  waiting_.push_back(&sequence);
  // Tokens that another worker made count for stop strings, and the last one may have been the end.
  if (sequence.output_begin < sequence.size()) {
    for (int32_t i = sequence.output_begin; i < sequence.size(); ++i) {
      WatchForToolCall(sequence, sequence.tokens[i]);
      if (i + 1 < sequence.size()) MatchStops(sequence, sequence.tokens[i]);
    }
    SequenceOutput output{.id = id};
    if (FinishIfDone(sequence, output)) outputs_.push_back(std::move(output));
    Sweep();
  }
  return id;
}

bool Scheduler::Cancel(SequenceId id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return false;
  Sequence& sequence = *found->second;
  outputs_.push_back({.id = id, .finish = FinishReason::kCancelled, .usage = sequence.usage});
  Remove(sequence);
  Sweep();
  return true;
}

bool Scheduler::Drop(SequenceId id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return false;
  Remove(*found->second);
  Sweep();
  return true;
}

const StepPlan& Scheduler::Schedule() {
  PALIMPSEST_CHECK(in_flight_ < config_.pipeline_depth);
  plan_.chunks.clear();
  plan_.arriving = false;
  steps_[in_flight_].clear();
  int32_t budget = config_.max_step_tokens;
  bool stalled = false;
  if (swapping()) PreemptAhead();
  if (store_ != nullptr) AskAhead();
  ScheduleRunning(budget, stalled);
  while (!stalled && budget > 0 && AdmitNext(budget)) {
  }
  StartLeaving();
  if (!plan_.chunks.empty()) ++in_flight_;
  return plan_;
}

// Plans the running sequences. `stalled` is set if one of them lacked blocks or was preempted,
// which means that nobody should be admitted.
void Scheduler::ScheduleRunning(int32_t& budget, bool& stalled) {
  const auto decodes = std::count_if(running_.begin(), running_.end(), [this](const Sequence* s) {
    return Ready(*s) && s->remaining() == 1;
  });
  int32_t prompt_budget = budget - static_cast<int32_t>(decodes);
  const size_t before = running_.size();
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (!Ready(sequence)) continue;
    const int32_t remaining = sequence.remaining();
    const int32_t asked = remaining == 1 ? 1 : std::min(remaining, prompt_budget);
    if (asked == 0) continue;
    const int32_t blocks = config_.geometry.BlocksFor(sequence.submitted + asked) -
                           static_cast<int32_t>(sequence.blocks.size());
    while (blocks_.available_blocks() + LeavingBlocks() < blocks && running_.size() > i + 1) {
      PreemptYoungest();
    }
    const int32_t tokens = Fit(sequence, asked);
    if (tokens < asked) stalled = true;
    if (tokens == 0) continue;
    if (remaining > 1) prompt_budget -= tokens;
    Plan(sequence, tokens);
  }
  if (running_.size() < before) stalled = true;
  budget = prompt_budget;
}

void Scheduler::Plan(Sequence& sequence, int32_t tokens) {
  SequenceChunk chunk;
  if (sequence.pending > 0) {
    // The only step in flight samples it.
    PALIMPSEST_CHECK(sequence.pending == 1 && sequence.submitted == sequence.size());
    chunk.tokens = absl::MakeConstSpan(&kUnknownToken, 1);
    chunk.token_from = sequence.last_chunk;
  } else {
    chunk.tokens = absl::MakeConstSpan(sequence.tokens).subspan(sequence.submitted, tokens);
  }
  chunk.first_position = sequence.submitted;
  sequence.submitted += tokens;
  chunk.block_table =
      absl::MakeConstSpan(sequence.blocks).first(config_.geometry.BlocksFor(sequence.submitted));
  const bool samples = sequence.submitted == sequence.size_with_pending();
  if (samples) {
    sequence.sampling.history = sequence.tokens;
    sequence.sampling.output_index = sequence.size_with_pending() - sequence.output_begin;
    chunk.sampling = &sequence.sampling;
    ++sequence.pending;
  }
  plan_.arriving |= sequence.arriving();
  sequence.last_chunk = static_cast<int32_t>(plan_.chunks.size());
  ++sequence.steps_in_flight;
  plan_.chunks.push_back(chunk);
  steps_[in_flight_].push_back({&sequence, tokens, samples, sequence.stay});
}

bool Scheduler::RefusedLately(const Sequence& sequence) {
  return sequence.id == refusal_.id && running() > 0 && --refusal_.plans_to_skip > 0 &&
         refusal_.needed_blocks + running() > blocks_.available_blocks();
}

Sequence* Scheduler::NextWaiting() {
  for (size_t i = 0; i < std::min(kAsksAhead, waiting_.size()); ++i) {
    if (store_ != nullptr) Ask(*waiting_[i]);
    if (!waiting_[i]->awaits_store()) return waiting_[i];
  }
  return nullptr;
}

bool Scheduler::AdmitNext(int32_t& budget) {
  if (running() >= config_.max_batch_sequences) return false;
  Sequence* const next = NextWaiting();
  if (next == nullptr) return false;
  Sequence& sequence = *next;
  // Preempted while in flight: what it has to compute is not known yet.
  if (sequence.pending > 0 || sequence.swap == Sequence::Swap::kLeaving) return false;
  if (RefusedLately(sequence)) return false;
  // At least the last token is computed, for its logits.
  const int32_t reusable = (sequence.size() - 1) / config_.geometry.block_tokens;
  ExtendKeys(sequence, reusable);
  const bool returns = sequence.swap == Sequence::Swap::kAway;
  // With a window, what the cache has need not meet what host memory has.
  BlockManager::Match match;
  if (!returns || config_.sliding_window == 0) {
    match = blocks_.FindPrefix(absl::MakeConstSpan(sequence.keys).first(reusable), sequence.tokens,
                               config_.sliding_window);
  }
  if (!sequence.pinned.empty()) blocks_.Narrow(match, FirstNeeded(sequence));
  const auto shared = static_cast<int32_t>(std::count_if(
      match.blocks.begin(), match.blocks.end(), [](BlockId block) { return block != kNullBlock; }));
  const int32_t fresh = std::max(0, config_.PeakBlocks(sequence.size()) - shared);
  // One block for each running sequence keeps the newcomer from being preempted at once, and two
  // keep one from it that was.
  const int32_t needed = fresh + match.cached_blocks + (returns ? running() : 0);
  if (needed + running() > blocks_.available_blocks()) {
    refusal_ = {sequence.id, needed, kAdmissionInterval};
    return false;
  }
  if (store_ != nullptr && !returns && !FitPinned(sequence, match)) return true;
  if (returns) {
    Return(sequence, match);
  } else if (!sequence.pinned.empty()) {
    Load(sequence, match);
  } else {
    blocks_.Acquire(match);
    sequence.blocks = match.blocks;
    sequence.chain = match.node;
    sequence.published = static_cast<int32_t>(match.blocks.size());
    sequence.left_window = sequence.published - shared;
    sequence.computed = sequence.published * config_.geometry.block_tokens;
    sequence.submitted = sequence.computed;
  }
  waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &sequence));
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, IsOlder),
                  &sequence);
  sequence.running = true;
  if (!sequence.started) {
    sequence.started = true;
    // With what is being loaded; steps may end before the load is known to have.
    sequence.usage.cached_tokens = sequence.computed;
    counters_.prompt_tokens += sequence.prompt_size;
    counters_.cached_tokens +=
        static_cast<int32_t>(match.blocks.size()) * config_.geometry.block_tokens;
  }
  if (!Ready(sequence)) return true;
  const int32_t tokens = Fit(sequence, std::min(sequence.remaining(), budget));
  PALIMPSEST_CHECK(tokens > 0);
  budget -= tokens;
  Plan(sequence, tokens);
  return true;
}

void Scheduler::Commit(StepResult result) {
  PALIMPSEST_CHECK(in_flight_ > 0 && result.sampled.size() == steps_[0].size());
  for (size_t i = 0; i < steps_[0].size(); ++i) {
    const Planned& planned = steps_[0][i];
    PALIMPSEST_CHECK(planned.samples == result.sampled[i].has_value());
    Sequence& sequence = *planned.sequence;
    --sequence.steps_in_flight;
    sequence.pending -= planned.samples;
    if (sequence.removed) {
      counters_.discarded_tokens += planned.samples;
      continue;
    }
    if (planned.stay == sequence.stay) {
      sequence.computed += planned.tokens;
      PublishFullBlocks(sequence);
      ReleaseBeforeWindow(sequence);
      if (planned.samples && !std::exchange(sequence.prompt_offered, true)) Offer(sequence);
    }
    if (planned.samples) AppendToken(sequence, *std::move(result.sampled[i]));
  }
  --in_flight_;
  ++ended_steps_;
  std::rotate(steps_.begin(), steps_.begin() + 1, steps_.end());
  Sweep();
  StartLeaving();
}

void Scheduler::Abandon() {
  PALIMPSEST_CHECK(in_flight_ > 0);
  for (; in_flight_ > 0; --in_flight_, ++ended_steps_) {
    for (const Planned& planned : steps_[in_flight_ - 1]) {
      Sequence& sequence = *planned.sequence;
      --sequence.steps_in_flight;
      sequence.pending -= planned.samples;
      sequence.submitted = sequence.computed;
    }
  }
  Sweep();
  StartLeaving();
}

void Scheduler::AppendToken(Sequence& sequence, SampledToken token) {
  PALIMPSEST_CHECK(token.token >= 0 && token.token < config_.vocab_size);
  sequence.tokens.push_back(token.token);
  ++sequence.usage.output_tokens;
  ++counters_.generated_tokens;
  WatchForToolCall(sequence, token.token);
  SequenceOutput output{.id = sequence.id, .token = std::move(token)};
  FinishIfDone(sequence, output);
  outputs_.push_back(std::move(output));
}

// Looks at the sequence's last token, which is output. If it is the end, fills `output` and removes
// the sequence.
bool Scheduler::FinishIfDone(Sequence& sequence, SequenceOutput& output) {
  const SamplingParams& params = sequence.sampling.params;
  const TokenId last = sequence.tokens.back();
  const auto contains = [&](const std::vector<TokenId>& ids) {
    return std::find(ids.begin(), ids.end(), last) != ids.end();
  };
  if (contains(params.stop_token_ids) || (!params.ignore_eos && contains(config_.eos_token_ids))) {
    output.finish = FinishReason::kStopToken;
  } else if (const auto trim = MatchStops(sequence, last)) {
    output.finish = FinishReason::kStopString;
    output.stop_trim_bytes = *trim;
  } else if (sequence.size() >= sequence.longest_size) {
    output.finish = FinishReason::kLength;
  } else {
    return false;
  }
  output.usage = sequence.usage;
  using How = StoreRequestEnd::How;
  Remove(sequence, output.finish == FinishReason::kLength ? How::kUnknown
                   : sequence.calls_tool                  ? How::kToolCall
                                                          : How::kEndOfTurn);
  return true;
}

void Scheduler::WatchForToolCall(Sequence& sequence, TokenId token) const {
  const RequestHints& hints = sequence.hints;
  if (std::find(hints.tool_call_tokens.begin(), hints.tool_call_tokens.end(), token) !=
          hints.tool_call_tokens.end() ||
      (!hints.tool_call_texts.empty() &&
       sequence.tool_call_texts.Push(token_bytes_->BytesOf(token)).has_value())) {
    sequence.calls_tool = true;
  }
}

// Feeds one token of the output to the stop matcher. If a stop string is complete: how many bytes
// of the output come after its start.
std::optional<int32_t> Scheduler::MatchStops(Sequence& sequence, TokenId token) {
  const absl::string_view bytes = token_bytes_->BytesOf(token);
  sequence.output_bytes += static_cast<int64_t>(bytes.size());
  const auto& match = sequence.stops.Push(bytes);
  if (!match.has_value()) return std::nullopt;
  return static_cast<int32_t>(sequence.output_bytes - static_cast<int64_t>(match->start));
}

// Takes the sequence out of everything but `running_`; Sweep does the rest, for many at once.
void Scheduler::Remove(Sequence& sequence, StoreRequestEnd::How how) {
  DropSlots(sequence);
  LeaveStore(sequence, how);
  ReleaseBlocks(sequence);
  if (!sequence.running) waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &sequence));
  sequence.removed = true;
  const auto found = sequences_.find(sequence.id);
  ended_.push_back(std::move(found->second));
  sequences_.erase(found);
}

void Scheduler::Sweep() {
  if (ended_.empty()) return;
  std::erase_if(running_, [](const Sequence* sequence) { return sequence->removed; });
  std::erase_if(ended_, [](const auto& sequence) { return sequence->steps_in_flight == 0; });
}

std::vector<SequenceOutput> Scheduler::TakeOutputs() { return std::exchange(outputs_, {}); }

// The sequences know of exactly the chunks in flight.
void Scheduler::CheckFlights() const {
  absl::flat_hash_map<const Sequence*, std::pair<int32_t, int32_t>> known;  // steps, tokens
  for (int32_t i = 0; i < in_flight_; ++i) {
    for (const Planned& planned : steps_[i]) {
      ++known[planned.sequence].first;
      known[planned.sequence].second += planned.samples;
    }
  }
  size_t found = 0;
  const auto check = [&](const Sequence& sequence) {
    const auto at = known.find(&sequence);
    const auto flights = at == known.end() ? std::pair<int32_t, int32_t>() : at->second;
    PALIMPSEST_CHECK(flights == std::pair(sequence.steps_in_flight, sequence.pending));
    found += at != known.end();
  };
  for (const auto& [id, sequence] : sequences_) check(*sequence);
  for (const auto& sequence : ended_) {
    PALIMPSEST_CHECK(sequence->removed && sequence->steps_in_flight > 0);
    check(*sequence);
  }
  PALIMPSEST_CHECK(found == known.size());
}

void Scheduler::CheckInvariants() const {
  blocks_.CheckInvariants();
  PALIMPSEST_CHECK(running_.size() + waiting_.size() == sequences_.size());
  CheckFlights();
  absl::flat_hash_map<BlockId, int32_t> references;
  std::vector<const Sequence*> holders(running_.begin(), running_.end());
  SequenceId last;
  for (const Sequence* sequence : running_) {
    PALIMPSEST_CHECK(sequence->id > last);
    last = sequence->id;
    PALIMPSEST_CHECK(sequence->started && sequence->running && !sequence->removed);
    PALIMPSEST_CHECK(!sequence->awaits_store() && sequence->pinned.empty());
    PALIMPSEST_CHECK(sequence->computed < sequence->size());
    PALIMPSEST_CHECK(sequence->computed <= sequence->submitted);
    PALIMPSEST_CHECK(sequence->submitted <= sequence->size_with_pending());
    PALIMPSEST_CHECK(static_cast<int64_t>(sequence->blocks.size()) *
                         config_.geometry.block_tokens >=
                     sequence->submitted);
    CheckSwaps(*sequence);
  }
  if (store_ != nullptr) last = SequenceId();
  for (const Sequence* sequence : waiting_) {
    PALIMPSEST_CHECK(sequence->id > last);
    last = sequence->id;
    PALIMPSEST_CHECK(!sequence->running && !sequence->removed);
    PALIMPSEST_CHECK(!sequence->awaits_store() || asking_.contains(sequence->store_call));
    CheckSwaps(*sequence);
    if (sequence->swap == Sequence::Swap::kLeaving) {
      holders.push_back(sequence);
      continue;
    }
    PALIMPSEST_CHECK(sequence->blocks.empty() && sequence->chain == nullptr);
    PALIMPSEST_CHECK(sequence->computed == 0 && sequence->submitted == 0);
  }
  for (const Sequence* sequence : holders) {
    for (size_t i = 0; i < sequence->blocks.size(); ++i) {
      const BlockId block = sequence->blocks[i];
      PALIMPSEST_CHECK((block == kNullBlock) == (static_cast<int32_t>(i) < sequence->left_window));
      if (block != kNullBlock) ++references[block];
    }
  }
  CheckTransfers(references);
  PALIMPSEST_CHECK(static_cast<int32_t>(references.size()) == blocks_.live_blocks());
  for (const auto& [block, count] : references) {
    PALIMPSEST_CHECK(blocks_.references(block) == count && blocks_.usable(block));
  }
}

}  // namespace palimpsest
