// KV of preempted sequences that leaves for host memory and returns.
#include <algorithm>
#include <utility>

#include "worker/core/check.h"
#include "worker/core/scheduler.h"

namespace palimpsest {
namespace {

using Swap = Sequence::Swap;

// So many tokens before a running sequence lacks a block others begin to leave.
constexpr int32_t kTokensAhead = 4;

}  // namespace

bool Scheduler::Ready(const Sequence& sequence) const {
  if (!sequence.arriving()) return true;
  if (!sequence.joins) return false;
  const auto found = std::find_if(transfers_.begin(), transfers_.end(), [&](const Transfer& t) {
    return t.copy.id == sequence.transfer;
  });
  return found->taken || found->after <= ended_steps_;
}

// Blocks that the sequence lacks for its next tokens.
int32_t Scheduler::BlocksAhead(const Sequence& sequence) const {
  const int32_t remaining = sequence.remaining();
  const int32_t next = remaining > 1 ? std::min(remaining, config_.max_step_tokens) : kTokensAhead;
  const int32_t end = std::min(sequence.submitted + next, sequence.longest_size);
  return std::max(0,
                  config_.geometry.BlocksFor(end) - static_cast<int32_t>(sequence.blocks.size()));
}

void Scheduler::PreemptAhead() {
  int64_t ahead = 0;
  for (const Sequence* sequence : running_) ahead += BlocksAhead(*sequence);
  while (running_.size() > 1 && blocks_.available_blocks() + LeavingBlocks() < ahead) {
    ahead -= BlocksAhead(*running_.back());
    PreemptYoungest();
  }
}

bool Scheduler::BeginLeaving(Sequence& sequence) {
  if (sequence.swap == Swap::kLoading) {
    sequence.swap = Swap::kNone;
    sequence.transfer = SwapId();
    return false;
  }
  if (sequence.swap == Swap::kArriving) {
    // What is on its way to it is in its slots too.
    sequence.swap = Swap::kAway;
    sequence.transfer = SwapId();
    ReleaseBlocks(sequence);
    return true;
  }
  // Less than a block is computed again sooner than it is copied.
  if (!swapping() || sequence.submitted < config_.geometry.block_tokens) return false;
  auto slots =
      swap_space_.Allocate(config_.geometry.BlocksFor(sequence.submitted) - sequence.left_window);
  if (!slots.has_value()) return false;
  sequence.slots = *std::move(slots);
  sequence.swapped_from = sequence.left_window;
  sequence.swap = Swap::kLeaving;
  return true;
}

void Scheduler::StartLeaving() {
  if (!swapping()) return;
  for (Sequence* sequence : waiting_) {
    if (sequence->swap != Swap::kLeaving || sequence->transfer != SwapId() ||
        sequence->steps_in_flight > 0) {
      continue;
    }
    // The steps that were in flight may have failed, or moved the window on.
    const int32_t end = config_.geometry.BlocksFor(sequence->computed);
    std::vector<SwapMove> moves;
    std::vector<SwapSlot> slots;
    for (size_t i = 0; i < sequence->slots.size(); ++i) {
      const int32_t block = sequence->swapped_from + static_cast<int32_t>(i);
      if (block < sequence->left_window || block >= end) {
        swap_space_.Release(sequence->slots[i]);
        continue;
      }
      slots.push_back(sequence->slots[i]);
      moves.push_back({sequence->blocks[block], slots.back()});
    }
    sequence->slots = std::move(slots);
    sequence->swapped_from = sequence->left_window;
    if (moves.empty()) {
      sequence->swap = Swap::kNone;
      ReleaseBlocks(*sequence);
    } else {
      AddTransfer(Transfer::Kind::kSwap, SwapTransfer::Direction::kOut, *sequence, std::move(moves),
                  0);
    }
  }
}

int32_t Scheduler::LeavingBlocks() const {
  if (!swapping()) return 0;
  int32_t blocks = 0;
  for (const Sequence* sequence : waiting_) {
    if (sequence->swap != Swap::kLeaving) continue;
    blocks += static_cast<int32_t>(sequence->blocks.size()) - sequence->left_window;
  }
  return blocks;
}

void Scheduler::Return(Sequence& sequence, const BlockManager::Match& match) {
  blocks_.Acquire(match);
  const int32_t size = config_.geometry.block_tokens;
  sequence.blocks = match.blocks;
  sequence.chain = match.node;
  SkipTo(sequence, sequence.swapped_from);
  const auto begin = static_cast<int32_t>(sequence.blocks.size());
  sequence.published = begin;
  sequence.left_window = sequence.swapped_from;
  sequence.computed = std::max(sequence.swapped_tokens, begin * size);
  sequence.submitted = sequence.computed;
  std::vector<SwapMove> moves;
  for (int32_t i = begin; i < config_.geometry.BlocksFor(sequence.swapped_tokens); ++i) {
    sequence.blocks.push_back(*blocks_.Allocate());
    moves.push_back({sequence.blocks.back(), sequence.slots[i - sequence.swapped_from]});
  }
  sequence.swap = Swap::kArriving;
  if (moves.empty()) {
    DropSlots(sequence);
    return;
  }
  // Steps in flight may still use what was free.
  AddTransfer(Transfer::Kind::kSwap, SwapTransfer::Direction::kIn, sequence, std::move(moves),
              ended_steps_ + in_flight_);
}

void Scheduler::AddTransfer(Transfer::Kind kind, SwapTransfer::Direction direction,
                            Sequence& sequence, std::vector<SwapMove> moves, int64_t after) {
  for (const SwapMove& move : moves) {
    blocks_.AddReference(move.block);
    if (move.memory == nullptr) swap_space_.AddReference(move.slot);
  }
  size_t awaited = moves.size();
  for (const Transfer& other : transfers_)
    awaited += other.copy.awaited ? other.copy.moves.size() : 0;
  sequence.transfer = SwapId(next_transfer_++);
  sequence.joins = direction == SwapTransfer::Direction::kIn &&
                   awaited <= static_cast<size_t>(Overlap(kind, sequence));
  transfers_.push_back({.copy = {.id = sequence.transfer,
                                 .direction = direction,
                                 .awaited = sequence.joins,
                                 .store = kind == Transfer::Kind::kLoad,
                                 .moves = std::move(moves)},
                        .kind = kind,
                        .sequence = sequence.id,
                        .after = after});
}

std::vector<SwapTransfer> Scheduler::TakeTransfers() {
  std::vector<SwapTransfer> due;
  for (Transfer& transfer : transfers_) {
    if (transfer.taken || transfer.after > ended_steps_) continue;
    transfer.taken = true;
    due.push_back(transfer.copy);
  }
  return due;
}

bool Scheduler::awaits_transfer() const {
  return std::any_of(transfers_.begin(), transfers_.end(), [](const Transfer& transfer) {
    return transfer.kind != Transfer::Kind::kOffload;
  });
}

void Scheduler::OnTransferEnded(const SwapEnded& ended) {
  const auto found = std::find_if(transfers_.begin(), transfers_.end(),
                                  [&](const Transfer& t) { return t.copy.id == ended.id; });
  PALIMPSEST_CHECK(found != transfers_.end() && found->taken);
  const Transfer transfer = std::move(*found);
  transfers_.erase(found);
  switch (transfer.kind) {
    case Transfer::Kind::kSwap:
      return FinishSwap(transfer, ended.status.ok());
    case Transfer::Kind::kLoad:
      return FinishLoad(transfer, ended);
    case Transfer::Kind::kOffload:
      offloader_->OnCopied(ended);
      return EndStoreRequests();
  }
}

void Scheduler::FinishSwap(const Transfer& transfer, bool succeeded) {
  const SwapId id = transfer.copy.id;
  const bool out = transfer.copy.direction == SwapTransfer::Direction::kOut;
  // Deepest first, as ReleaseBlocks does.
  for (auto move = transfer.copy.moves.rbegin(); move != transfer.copy.moves.rend(); ++move) {
    swap_space_.Release(move->slot);
    if (!out) blocks_.Release(move->block);
  }
  const auto owner = sequences_.find(transfer.sequence);
  Sequence* const sequence = owner == sequences_.end() ? nullptr : owner->second.get();
  const bool concerned = sequence != nullptr && sequence->transfer == id;
  if (concerned && out) {
    sequence->swapped_tokens = sequence->computed;
    sequence->swap = Swap::kAway;
    sequence->transfer = SwapId();
    ReleaseBlocks(*sequence);
  }
  if (out) {
    for (auto move = transfer.copy.moves.rbegin(); move != transfer.copy.moves.rend(); ++move) {
      blocks_.Release(move->block);
    }
  }
  if (succeeded) {
    (out ? counters_.blocks_swapped_out : counters_.blocks_swapped_in) +=
        static_cast<int64_t>(transfer.copy.moves.size());
  } else {
    ++counters_.failed_transfers;
  }
  if (!concerned || (out && succeeded)) return;
  DropSlots(*sequence);
  if (succeeded || out) return;
  PALIMPSEST_CHECK(!transfer.copy.awaited || in_flight_ == 0);
  ReleaseBlocks(*sequence);
}

void Scheduler::DropSlots(Sequence& sequence) {
  for (const SwapSlot slot : sequence.slots) swap_space_.Release(slot);
  sequence.slots.clear();
  sequence.swap = Swap::kNone;
  sequence.transfer = SwapId();
}

void Scheduler::MakeRoomToGive(int32_t count) {
  PALIMPSEST_CHECK(in_flight_ == 0);
  if (!swapping()) return;
  const int32_t left = blocks_.UsableWithout(blocks_.CheapestSlabs(count));
  while (!running_.empty() && blocks_.live_blocks() - LeavingBlocks() - OffloadedHeld() > left) {
    PreemptYoungest();
  }
  StartLeaving();
}

void Scheduler::CheckSwaps(const Sequence& sequence) const {
  const auto transfer = std::find_if(transfers_.begin(), transfers_.end(), [&](const Transfer& t) {
    return t.copy.id == sequence.transfer;
  });
  switch (sequence.swap) {
    case Swap::kNone:
      PALIMPSEST_CHECK(sequence.slots.empty() && sequence.transfer == SwapId());
      return;
    case Swap::kLeaving:
      PALIMPSEST_CHECK(!sequence.running && !sequence.slots.empty());
      PALIMPSEST_CHECK((sequence.transfer == SwapId()) == (transfer == transfers_.end()));
      PALIMPSEST_CHECK(sequence.transfer != SwapId() || sequence.steps_in_flight > 0);
      return;
    case Swap::kAway:
      PALIMPSEST_CHECK(!sequence.running && sequence.transfer == SwapId());
      break;
    case Swap::kArriving:
      PALIMPSEST_CHECK(sequence.running && transfer != transfers_.end());
      PALIMPSEST_CHECK(sequence.swapped_tokens <= sequence.computed);
      break;
    case Swap::kLoading:
      PALIMPSEST_CHECK(sequence.running && transfer != transfers_.end());
      PALIMPSEST_CHECK(sequence.slots.empty());
      return;
  }
  PALIMPSEST_CHECK(static_cast<int32_t>(sequence.slots.size()) ==
                   config_.geometry.BlocksFor(sequence.swapped_tokens) - sequence.swapped_from);
}

void Scheduler::CheckTransfers(absl::flat_hash_map<BlockId, int32_t>& references) const {
  swap_space_.CheckInvariants();
  absl::flat_hash_map<SwapSlot, int32_t> slots;
  for (const auto& [id, sequence] : sequences_) {
    for (const SwapSlot slot : sequence->slots) ++slots[slot];
  }
  for (const Transfer& transfer : transfers_) {
    for (const SwapMove& move : transfer.copy.moves) {
      ++references[move.block];
      if (move.memory == nullptr) ++slots[move.slot];
    }
  }
  PALIMPSEST_CHECK(static_cast<int32_t>(slots.size()) == swap_space_.used());
  for (const auto& [slot, count] : slots) PALIMPSEST_CHECK(swap_space_.references(slot) == count);
}

}  // namespace palimpsest
