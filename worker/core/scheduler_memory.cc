// What the scheduler does with blocks and slabs.
#include <algorithm>
#include <utility>

#include "worker/core/check.h"
#include "worker/core/scheduler.h"

namespace palimpsest {

// Allocates blocks for the sequence's next `tokens` tokens; returns for how many there were blocks.
int32_t Scheduler::Fit(Sequence& sequence, int32_t tokens) {
  const int32_t wanted = config_.geometry.BlocksFor(sequence.submitted + tokens);
  while (static_cast<int32_t>(sequence.blocks.size()) < wanted) {
    const auto block = blocks_.Allocate();
    if (!block.has_value()) break;
    sequence.blocks.push_back(*block);
  }
  const int64_t room = static_cast<int64_t>(sequence.blocks.size()) * config_.geometry.block_tokens;
  return static_cast<int32_t>(std::min<int64_t>(tokens, room - sequence.submitted));
}

void Scheduler::ExtendKeys(Sequence& sequence, int32_t blocks) {
  const int32_t size = config_.geometry.block_tokens;
  const auto tokens = absl::MakeConstSpan(sequence.tokens);
  while (static_cast<int32_t>(sequence.keys.size()) < blocks) {
    const BlockKey parent = sequence.keys.empty() ? config_.root_key : sequence.keys.back();
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
  const int32_t first_block = first_seen / config_.geometry.block_tokens;
  if (sequence.left_window < first_block) Offer(sequence);
  for (; sequence.left_window < first_block; ++sequence.left_window) {
    BlockId& block = sequence.blocks[sequence.left_window];
    blocks_.Release(std::exchange(block, kNullBlock));
  }
}

void Scheduler::SkipTo(Sequence& sequence, int32_t count) {
  const int32_t size = config_.geometry.block_tokens;
  for (auto i = static_cast<int32_t>(sequence.blocks.size()); i < count; ++i) {
    sequence.blocks.push_back(kNullBlock);
    if (!sequence.cacheable) continue;
    const auto tokens = absl::MakeConstSpan(sequence.tokens).subspan(i * size, size);
    sequence.chain = blocks_.Connect(sequence.chain, sequence.keys[i], tokens);
    sequence.cacheable = sequence.chain != nullptr;
  }
}

void Scheduler::ReleaseBlocks(Sequence& sequence) {
  // Deepest first: the cache then evicts the ends of prefixes before their beginnings.
  for (auto block = sequence.blocks.rbegin(); block != sequence.blocks.rend(); ++block) {
    if (*block != kNullBlock) blocks_.Release(*block);
  }
  sequence.blocks.clear();
  if (sequence.chain != nullptr) blocks_.Unpin(std::exchange(sequence.chain, nullptr));
  ++sequence.stay;
  sequence.computed = 0;
  sequence.submitted = 0;
  sequence.published = 0;
  sequence.left_window = 0;
  sequence.cacheable = true;
}

void Scheduler::PreemptYoungest() {
  PALIMPSEST_CHECK(!running_.empty());
  Sequence& sequence = *running_.back();
  running_.pop_back();
  sequence.running = false;
  Offer(sequence);
  const bool kept = BeginLeaving(sequence);
  if (!kept) ReleaseBlocks(sequence);
  sequence.ask = Sequence::Ask::kNone;
  sequence.asks = 0;
  InsertWaiting(sequence);
  ++sequence.usage.preemptions;
  ++counters_.preemptions;
  counters_.swapped_preemptions += kept;
}

void Scheduler::InsertWaiting(Sequence& sequence) {
  const auto place = std::find_if(waiting_.begin(), waiting_.end(),
                                  [&](const Sequence* other) { return other->id > sequence.id; });
  waiting_.insert(place, &sequence);
}

// For when there is no time to copy anything.
void Scheduler::PreemptNow() {
  Sequence& sequence = *running_.back();
  PreemptYoungest();
  if (sequence.swap != Sequence::Swap::kLeaving) return;
  DropSlots(sequence);
  ReleaseBlocks(sequence);
  --counters_.swapped_preemptions;
}

int32_t Scheduler::PreemptAll() {
  const int32_t count = running();
  while (!running_.empty()) PreemptYoungest();
  StartLeaving();
  return count;
}

Scheduler::Give Scheduler::GiveSlabs(int32_t count) {
  return GiveThese(blocks_.CheapestSlabs(count));
}

Scheduler::Give Scheduler::Compact() {
  PALIMPSEST_CHECK(in_flight_ == 0);
  const int64_t needed = std::min<int64_t>(NeededBlocks(), capacity_blocks_);
  const bool holes_are_why = needed > blocks_.usable_blocks() &&
                             needed <= config_.geometry.BlocksIn(blocks_.mapped_slabs());
  return holes_are_why ? GiveThese(blocks_.SlabsBehindHoles()) : Give();
}

Scheduler::Give Scheduler::GiveThese(std::vector<RegionIndex> slabs) {
  PALIMPSEST_CHECK(in_flight_ == 0 && transfers_.empty());
  Give give;
  give.slabs = std::move(slabs);
  blocks_.BeginGive(give.slabs);
  while (blocks_.displaced_blocks() > blocks_.available_blocks()) {
    PreemptNow();
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
  int64_t needed = blocks_.live_blocks() - OffloadedHeld();
  for (const Sequence* sequence : running_) {
    const int32_t next =
        sequence->submitted + std::min(sequence->remaining(), config_.max_step_tokens);
    needed += std::max<int64_t>(
        0, config_.geometry.BlocksFor(next) - static_cast<int64_t>(sequence->blocks.size()));
  }
  if (running_.empty() && !waiting_.empty())
    needed += std::max<int64_t>(0, config_.PeakBlocks(waiting_.front()->size_with_pending()) -
                                       static_cast<int64_t>(waiting_.front()->blocks.size()));
  return needed;
}

KvDemand Scheduler::Demand() const {
  const KvGeometry& geometry = config_.geometry;
  const int64_t needed = NeededBlocks();
  int64_t wanted = blocks_.live_blocks() - OffloadedHeld();
  for (const Sequence* sequence : running_) {
    const int32_t later =
        std::min(sequence->size_with_pending() + geometry.block_tokens, sequence->longest_size);
    wanted += std::max<int64_t>(
        0, geometry.BlocksFor(later) - static_cast<int64_t>(sequence->blocks.size()));
  }
  const auto room =
      std::min<size_t>(config_.max_batch_sequences - running_.size(), waiting_.size());
  for (size_t i = 0; i < room; ++i) {
    // One that leaves still has blocks, which count already.
    wanted += std::max<int64_t>(0, config_.PeakBlocks(waiting_[i]->size_with_pending()) + 1 -
                                       static_cast<int64_t>(waiting_[i]->blocks.size()));
  }
  return {SlabsToHold(static_cast<int32_t>(std::min<int64_t>(needed, capacity_blocks_))),
          SlabsToHold(static_cast<int32_t>(std::min<int64_t>(wanted, capacity_blocks_)))};
}

}  // namespace palimpsest
