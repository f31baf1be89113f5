#include "worker/core/scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/core/check.h"

namespace palimpsest {

absl::Status SchedulerConfig::Validate() const {
  const auto positive = [](absl::string_view name, int64_t value) {
    return value > 0
               ? absl::OkStatus()
               : absl::InvalidArgumentError(absl::StrCat(name, " must be at least 1; got ", value));
  };
  for (const auto& [name, value] :
       {std::pair<absl::string_view, int64_t>{"slab size", geometry.slab_bytes.count()},
        {"KV block size", geometry.block_bytes.count()},
        {"tokens per KV block", geometry.block_tokens},
        {"KV region in slabs", geometry.region_slabs},
        {"vocabulary size", vocab_size},
        {"max_sequence_tokens", max_sequence_tokens},
        {"max_batch_sequences", max_batch_sequences},
        {"queue_capacity", queue_capacity}}) {
    if (absl::Status status = positive(name, value); !status.ok()) return status;
  }
  if (max_kv_slabs < 1 || max_kv_slabs > geometry.region_slabs) {
    return absl::InvalidArgumentError(absl::StrCat("max_kv_slabs must be from 1 to the region's ",
                                                   geometry.region_slabs, "; got ", max_kv_slabs));
  }
  if (sliding_window < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the sliding window must not be negative; got ", sliding_window));
  }
  if (max_step_tokens < max_batch_sequences) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_step_tokens (", max_step_tokens, ") must be at least max_batch_sequences (",
        max_batch_sequences, "): every running sequence decodes one token in every step"));
  }
  return absl::OkStatus();
}

Scheduler::Scheduler(const SchedulerConfig& config, const TokenBytes* token_bytes,
                     BlockKeyFunction key)
    : config_(config),
      token_bytes_(token_bytes),
      key_(key),
      blocks_(config.geometry),
      capacity_blocks_(config.geometry.BlocksIn(config.max_kv_slabs)),
      longest_sequence_(LongestSequence()) {}

int32_t Scheduler::LongestSequence() const {
  // The last token of a sequence needs no KV.
  if (PeakBlocks(config_.max_sequence_tokens - 1) <= capacity_blocks_) {
    return config_.max_sequence_tokens;
  }
  return static_cast<int32_t>(std::min<int64_t>(
      config_.max_sequence_tokens, int64_t{capacity_blocks_} * config_.geometry.block_tokens + 1));
}

// Most blocks that a sequence of `tokens` computed tokens holds at any time.
int32_t Scheduler::PeakBlocks(int32_t tokens) const {
  const int32_t all = config_.geometry.BlocksFor(tokens);
  if (config_.sliding_window == 0) return all;
  // A chunk and the window before it, which need not start on a block border.
  return std::min<int64_t>(
      all, (static_cast<int64_t>(config_.sliding_window) + config_.max_step_tokens) /
                   config_.geometry.block_tokens +
               2);
}

absl::Status Scheduler::CheckRequest(const SequenceRequest& request) const {
  const auto size = static_cast<int64_t>(request.prompt.size());
  if (size == 0) return absl::InvalidArgumentError("the prompt is empty; send at least one token");
  // An output that another worker brought to the very end only needs to be told so.
  const bool complete = size == longest_sequence_ && request.output_offset > 0;
  if (size >= longest_sequence_ && !complete) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the prompt has ", size, " tokens, but a sequence has at most ", longest_sequence_,
        ", of which the output needs at least one",
        longest_sequence_ == config_.max_sequence_tokens
            ? std::string()
            : absl::StrCat(" (the model allows ", config_.max_sequence_tokens, ", but the ",
                           config_.max_kv_slabs,
                           " KV slabs that this worker may hold have room for ", capacity_blocks_,
                           " blocks of ", config_.geometry.block_tokens, " tokens)")));
  }
  if (request.output_offset < 0 || request.output_offset >= size) {
    return absl::InvalidArgumentError(absl::StrCat("output_offset must be from 0 to ", size - 1,
                                                   " for a prompt of ", size, " tokens; got ",
                                                   request.output_offset));
  }
  for (int64_t i = 0; i < size; ++i) {
    if (request.prompt[i] < 0 || request.prompt[i] >= config_.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("token ", i, " of the prompt is ",
                                                     request.prompt[i], "; ids go from 0 to ",
                                                     config_.vocab_size - 1));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<SequenceId> Scheduler::Add(SequenceRequest request) {
  CheckBoundary();
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
    for (int32_t i = sequence.output_begin; i + 1 < sequence.size(); ++i) {
      MatchStops(sequence, sequence.tokens[i]);
    }
    SequenceOutput output{.id = id};
    if (FinishIfDone(sequence, output)) outputs_.push_back(std::move(output));
  }
  return id;
}

bool Scheduler::Cancel(SequenceId id) {
  CheckBoundary();
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return false;
  Sequence& sequence = *found->second;
  outputs_.push_back({.id = id, .finish = FinishReason::kCancelled, .usage = sequence.usage});
  Remove(sequence);
  return true;
}

bool Scheduler::Drop(SequenceId id) {
  CheckBoundary();
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return false;
  Remove(*found->second);
  return true;
}

int32_t Scheduler::PreemptAll() {
  CheckBoundary();
  const int32_t count = running();
  while (!running_.empty()) PreemptYoungest();
  return count;
}

Scheduler::Give Scheduler::GiveSlabs(int32_t count) {
  return GiveThese(blocks_.CheapestSlabs(count));
}

Scheduler::Give Scheduler::Compact() {
  const int64_t needed = std::min<int64_t>(NeededBlocks(), capacity_blocks_);
  const bool holes_are_why = needed > blocks_.usable_blocks() &&
                             needed <= config_.geometry.BlocksIn(blocks_.mapped_slabs());
  return holes_are_why ? GiveThese(blocks_.SlabsBehindHoles()) : Give();
}

Scheduler::Give Scheduler::GiveThese(std::vector<RegionIndex> slabs) {
  CheckBoundary();
  Give give;
  give.slabs = std::move(slabs);
  blocks_.BeginGive(give.slabs);
  while (blocks_.displaced_blocks() > blocks_.available_blocks()) {
    PreemptYoungest();
    ++give.preempted;
  }
  give.moves = blocks_.FinishGive();
  if (give.moves.empty()) return give;
  absl::flat_hash_map<BlockId, BlockId> moved;
  for (const BlockMove& move : give.moves) moved.emplace(move.from, move.to);
  for (Sequence* sequence : running_) {
    for (BlockId& block : sequence->blocks) {
      if (const auto found = moved.find(block); found != moved.end()) block = found->second;
    }
  }
  return give;
}

const StepPlan& Scheduler::Schedule() {
  CheckBoundary();
  plan_.chunks.clear();
  planned_.clear();
  int32_t budget = config_.max_step_tokens;
  bool stalled = false;
  ScheduleRunning(budget, stalled);
  while (!stalled && budget > 0 && AdmitNext(budget)) {
  }
  in_flight_ = !plan_.chunks.empty();
  return plan_;
}

// Plans the running sequences. `stalled` is set if one of them lacked blocks or was preempted,
// which means that nobody should be admitted.
void Scheduler::ScheduleRunning(int32_t& budget, bool& stalled) {
  const auto decodes = std::count_if(running_.begin(), running_.end(), [](const Sequence* s) {
    return s->size() - s->computed == 1;
  });
  int32_t prompt_budget = budget - static_cast<int32_t>(decodes);
  const size_t before = running_.size();
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    const int32_t pending = sequence.size() - sequence.computed;
    const int32_t asked = pending == 1 ? 1 : std::min(pending, prompt_budget);
    if (asked == 0) continue;
    const int32_t blocks = config_.geometry.BlocksFor(sequence.computed + asked) -
                           static_cast<int32_t>(sequence.blocks.size());
    while (blocks_.available_blocks() < blocks && running_.size() > i + 1) PreemptYoungest();
    const int32_t tokens = Fit(sequence, asked);
    if (tokens < asked) stalled = true;
    if (tokens == 0) continue;
    if (pending > 1) prompt_budget -= tokens;
    Plan(sequence, tokens);
  }
  if (running_.size() < before) stalled = true;
  budget = prompt_budget;
}

// Allocates blocks for the sequence's next `tokens` tokens; returns for how many there were blocks.
int32_t Scheduler::Fit(Sequence& sequence, int32_t tokens) {
  const int32_t wanted = config_.geometry.BlocksFor(sequence.computed + tokens);
  while (static_cast<int32_t>(sequence.blocks.size()) < wanted) {
    const auto block = blocks_.Allocate();
    if (!block.has_value()) break;
    sequence.blocks.push_back(*block);
  }
  const int64_t room = static_cast<int64_t>(sequence.blocks.size()) * config_.geometry.block_tokens;
  return static_cast<int32_t>(std::min<int64_t>(tokens, room - sequence.computed));
}

void Scheduler::Plan(Sequence& sequence, int32_t tokens) {
  SequenceChunk chunk;
  chunk.tokens = absl::MakeConstSpan(sequence.tokens).subspan(sequence.computed, tokens);
  chunk.first_position = sequence.computed;
  chunk.block_table = absl::MakeConstSpan(sequence.blocks)
                          .first(config_.geometry.BlocksFor(sequence.computed + tokens));
  if (sequence.computed + tokens == sequence.size()) {
    sequence.sampling.history = sequence.tokens;
    sequence.sampling.output_index = sequence.size() - sequence.output_begin;
    chunk.sampling = &sequence.sampling;
  }
  plan_.chunks.push_back(chunk);
  planned_.push_back({&sequence, tokens});
}

bool Scheduler::AdmitNext(int32_t& budget) {
  if (waiting_.empty() || running() >= config_.max_batch_sequences) return false;
  Sequence& sequence = *waiting_.front();
  // At least the last token is computed, for its logits.
  const int32_t reusable = (sequence.size() - 1) / config_.geometry.block_tokens;
  ExtendKeys(sequence, reusable);
  const BlockManager::Match match = blocks_.FindPrefix(
      absl::MakeConstSpan(sequence.keys).first(reusable), sequence.tokens, config_.sliding_window);
  const auto shared = static_cast<int32_t>(std::count_if(
      match.blocks.begin(), match.blocks.end(), [](BlockId block) { return block != kNullBlock; }));
  const int32_t fresh = std::max(0, PeakBlocks(sequence.size()) - shared);
  // One block for each running sequence keeps the newcomer from being preempted at once.
  if (fresh + match.cached_blocks + running() > blocks_.available_blocks()) return false;
  blocks_.Acquire(match);
  sequence.blocks = match.blocks;
  sequence.chain = match.node;
  sequence.published = static_cast<int32_t>(match.blocks.size());
  sequence.left_window = sequence.published - shared;
  sequence.computed = sequence.published * config_.geometry.block_tokens;
  waiting_.pop_front();
  running_.push_back(&sequence);
  if (!sequence.started) {
    sequence.started = true;
    sequence.usage.cached_tokens = sequence.computed;
    counters_.prompt_tokens += sequence.prompt_size;
    counters_.cached_tokens += sequence.computed;
  }
  const int32_t tokens = Fit(sequence, std::min(sequence.size() - sequence.computed, budget));
  PALIMPSEST_CHECK(tokens > 0);
  budget -= tokens;
  Plan(sequence, tokens);
  return true;
}

void Scheduler::Commit(StepResult result) {
  PALIMPSEST_CHECK(in_flight_ && result.sampled.size() == planned_.size());
  in_flight_ = false;
  for (size_t i = 0; i < planned_.size(); ++i) {
    Sequence& sequence = *planned_[i].sequence;
    const bool samples = plan_.chunks[i].sampling != nullptr;
    PALIMPSEST_CHECK(samples == result.sampled[i].has_value());
    sequence.computed += planned_[i].tokens;
    PublishFullBlocks(sequence);
    ReleaseBeforeWindow(sequence);
    if (samples) AppendToken(sequence, *std::move(result.sampled[i]));
  }
}

void Scheduler::Abandon() {
  PALIMPSEST_CHECK(in_flight_);
  in_flight_ = false;
}

void Scheduler::AppendToken(Sequence& sequence, SampledToken token) {
  PALIMPSEST_CHECK(token.token >= 0 && token.token < config_.vocab_size);
  sequence.tokens.push_back(token.token);
  ++sequence.usage.output_tokens;
  ++counters_.generated_tokens;
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
  Remove(sequence);
  return true;
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

void Scheduler::ExtendKeys(Sequence& sequence, int32_t blocks) {
  const int32_t size = config_.geometry.block_tokens;
  const auto tokens = absl::MakeConstSpan(sequence.tokens);
  while (static_cast<int32_t>(sequence.keys.size()) < blocks) {
    const BlockKey parent = sequence.keys.empty() ? BlockKey{} : sequence.keys.back();
    sequence.keys.push_back(key_(parent, tokens.subspan(sequence.keys.size() * size, size)));
  }
}

void Scheduler::PublishFullBlocks(Sequence& sequence) {
  const int32_t size = config_.geometry.block_tokens;
  const int32_t full = sequence.computed / size;
  ExtendKeys(sequence, full);
  while (sequence.cacheable && sequence.published < full) {
    const int32_t i = sequence.published;
    const auto tokens = absl::MakeConstSpan(sequence.tokens).subspan(i * size, size);
    const auto published =
        blocks_.Publish(sequence.chain, sequence.keys[i], tokens, sequence.blocks[i]);
    sequence.blocks[i] = published.block;
    sequence.chain = published.node;
    sequence.cacheable = published.node != nullptr;
    ++sequence.published;
  }
}

void Scheduler::ReleaseBeforeWindow(Sequence& sequence) {
  if (config_.sliding_window == 0) return;
  const int32_t first_seen = std::max(0, sequence.computed - config_.sliding_window + 1);
  for (; sequence.left_window < first_seen / config_.geometry.block_tokens;
       ++sequence.left_window) {
    BlockId& block = sequence.blocks[sequence.left_window];
    blocks_.Release(std::exchange(block, kNullBlock));
  }
}

void Scheduler::ReleaseBlocks(Sequence& sequence) {
  // Deepest first: the cache then evicts the ends of prefixes before their beginnings.
  for (auto block = sequence.blocks.rbegin(); block != sequence.blocks.rend(); ++block) {
    if (*block != kNullBlock) blocks_.Release(*block);
  }
  sequence.blocks.clear();
  if (sequence.chain != nullptr) blocks_.Unpin(std::exchange(sequence.chain, nullptr));
  sequence.computed = 0;
  sequence.published = 0;
  sequence.left_window = 0;
  sequence.cacheable = true;
}

void Scheduler::PreemptYoungest() {
  PALIMPSEST_CHECK(!running_.empty());
  Sequence& sequence = *running_.back();
  running_.pop_back();
  ReleaseBlocks(sequence);
  waiting_.push_front(&sequence);
  ++sequence.usage.preemptions;
  ++counters_.preemptions;
}

void Scheduler::Remove(Sequence& sequence) {
  ReleaseBlocks(sequence);
  const auto running = std::find(running_.begin(), running_.end(), &sequence);
  if (running != running_.end()) {
    running_.erase(running);
  } else {
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &sequence));
  }
  sequences_.erase(SequenceId(sequence.id));
}

std::vector<SequenceOutput> Scheduler::TakeOutputs() { return std::exchange(outputs_, {}); }

// Slabs to have mapped for `blocks` usable blocks, given where the mapped ones lie.
int32_t Scheduler::SlabsToHold(int32_t blocks) const {
  const KvGeometry& geometry = config_.geometry;
  const int32_t dense = geometry.SlabsFor(blocks);
  const int32_t missing = blocks - blocks_.usable_blocks();
  if (missing <= 0) return dense;
  // Holes cut straddling blocks, so that more slabs may be needed than a dense region would have.
  const auto more =
      static_cast<int32_t>(CeilDiv(geometry.block_bytes * missing, geometry.slab_bytes));
  return std::min(config_.max_kv_slabs, std::max(dense, blocks_.mapped_slabs() + more));
}

// Without these the running sequences can't take their next step, or if none runs, the first one
// can't start.
int64_t Scheduler::NeededBlocks() const {
  int64_t needed = blocks_.live_blocks();
  for (const Sequence* sequence : running_) {
    const int32_t next = std::min(sequence->size(), sequence->computed + config_.max_step_tokens);
    needed += std::max<int64_t>(
        0, config_.geometry.BlocksFor(next) - static_cast<int64_t>(sequence->blocks.size()));
  }
  if (running_.empty() && !waiting_.empty()) needed += PeakBlocks(waiting_.front()->size());
  return needed;
}

KvDemand Scheduler::Demand() const {
  const KvGeometry& geometry = config_.geometry;
  const int64_t needed = NeededBlocks();
  int64_t wanted = blocks_.live_blocks();
  for (const Sequence* sequence : running_) {
    const int32_t later =
        std::min(sequence->size() + geometry.block_tokens, sequence->longest_size);
    wanted += std::max<int64_t>(
        0, geometry.BlocksFor(later) - static_cast<int64_t>(sequence->blocks.size()));
  }
  const auto room =
      std::min<size_t>(config_.max_batch_sequences - running_.size(), waiting_.size());
  for (size_t i = 0; i < room; ++i) wanted += PeakBlocks(waiting_[i]->size()) + 1;
  return {SlabsToHold(static_cast<int32_t>(std::min<int64_t>(needed, capacity_blocks_))),
          SlabsToHold(static_cast<int32_t>(std::min<int64_t>(wanted, capacity_blocks_)))};
}

void Scheduler::CheckBoundary() const { PALIMPSEST_CHECK(!in_flight_); }

void Scheduler::CheckInvariants() const {
  blocks_.CheckInvariants();
  PALIMPSEST_CHECK(running_.size() + waiting_.size() == sequences_.size());
  absl::flat_hash_map<BlockId, int32_t> references;
  SequenceId last;
  for (const Sequence* sequence : running_) {
    PALIMPSEST_CHECK(sequence->id > last);
    last = sequence->id;
    PALIMPSEST_CHECK(sequence->started && sequence->computed < sequence->size());
    PALIMPSEST_CHECK(static_cast<int64_t>(sequence->blocks.size()) *
                         config_.geometry.block_tokens >=
                     sequence->computed);
    for (size_t i = 0; i < sequence->blocks.size(); ++i) {
      const BlockId block = sequence->blocks[i];
      PALIMPSEST_CHECK((block == kNullBlock) == (static_cast<int32_t>(i) < sequence->left_window));
      if (block != kNullBlock) ++references[block];
    }
  }
  for (const Sequence* sequence : waiting_) {
    PALIMPSEST_CHECK(sequence->id > last);
    last = sequence->id;
    PALIMPSEST_CHECK(sequence->blocks.empty() && sequence->chain == nullptr);
  }
  PALIMPSEST_CHECK(static_cast<int32_t>(references.size()) == blocks_.live_blocks());
  for (const auto& [block, count] : references) {
    PALIMPSEST_CHECK(blocks_.references(block) == count && blocks_.usable(block));
  }
}

}  // namespace palimpsest
