// KV that goes down to the block store and comes back.
#include <algorithm>
#include <utility>

#include "worker/core/check.h"
#include "worker/core/scheduler.h"

namespace palimpsest {
namespace {

using AskState = Sequence::Ask;

// A prefix that is in T0 when the store is asked may be gone when there is room.
constexpr int32_t kMostAsks = 3;

}  // namespace

void Scheduler::AskAhead() {
  for (size_t i = 0; i < std::min(kAsksAhead, waiting_.size()); ++i) Ask(*waiting_[i]);
}

void Scheduler::Ask(Sequence& sequence) {
  if (sequence.ask != AskState::kNone || sequence.swap != Sequence::Swap::kNone ||
      sequence.pending > 0) {
    return;
  }
  const int32_t size = config_.geometry.block_tokens;
  const int32_t reusable = (sequence.size() - 1) / size;
  sequence.ask = AskState::kAnswered;
  sequence.asked_from = sequence.pinned_from = 0;
  if (reusable == 0 || sequence.asks >= kMostAsks || !store_->available()) return;
  ++sequence.asks;
  ExtendKeys(sequence, reusable);
  const auto match = blocks_.FindPrefix(absl::MakeConstSpan(sequence.keys).first(reusable),
                                        sequence.tokens, config_.sliding_window);
  const auto held = static_cast<int32_t>(match.blocks.size());
  const int32_t lacking = (reusable - held) * size;
  const bool asks = lacking > 0 && WorthAsking(load_costs_, held * size, lacking);
  if (sequence.asks == 1) sequence.give_up = now_ + TimeToCompute(held, reusable - held);
  // The store is told of every request, to learn what is used again.
  if (asks || !sequence.known_to_store) {
    Query(sequence, asks ? held : reusable, absl::ZeroDuration());
  }
  sequence.asked_from = sequence.pinned_from = held;
  if (asks) sequence.ask = AskState::kAsked;
}

void Scheduler::Query(Sequence& sequence, int32_t held, absl::Duration wait) {
  const size_t blocks = (sequence.size() - 1) / config_.geometry.block_tokens;
  const RequestHints& hints = sequence.hints;
  StoreQuery query{.held = held,
                   .window = config_.WindowBlocks(),
                   .request = sequence.id.value(),
                   .conversation = hints.conversation,
                   .types = BlockTypes(hints.parts, config_.geometry.block_tokens, blocks),
                   .input_tokens = sequence.prompt_size,
                   .wait = wait};
  if (!sequence.known_to_store) EndStoreRequestsOf(hints.conversation);
  query.chain.parent = config_.root_key;
  query.chain.keys.assign(sequence.keys.begin(), sequence.keys.begin() + blocks);
  query.chain.tokens.assign(sequence.tokens.begin(),
                            sequence.tokens.begin() + blocks * config_.geometry.block_tokens);
  sequence.store_call = StoreCallId(next_store_call_++);
  sequence.told_held = held;
  sequence.known_to_store = true;
  ++counters_.store_queries;
  asking_.emplace(sequence.store_call, sequence.id);
  store_->Acquire(sequence.store_call, std::move(query));
}

absl::Duration Scheduler::TimeToCompute(int32_t first_block, int32_t blocks) const {
  const int32_t size = config_.geometry.block_tokens;
  const double seconds = ComputeSeconds(load_costs_, first_block * size, blocks * size);
  return seconds > 0 ? absl::Seconds(seconds) : absl::InfiniteDuration();
}

int32_t Scheduler::Overlap(Transfer::Kind kind, const Sequence& sequence) const {
  const int32_t overlap = std::max(0, swap_overlap_);
  const bool others = std::any_of(running_.begin(), running_.end(), [&](const Sequence* other) {
    return other != &sequence && Ready(*other);
  });
  if (kind != Transfer::Kind::kLoad || others || load_costs_.block_seconds == 0) return overlap;
  // Nobody else waits for the step: it may as well take as long as the copies.
  const int32_t tokens = std::min(sequence.size() - sequence.submitted, config_.max_step_tokens);
  const double seconds = ComputeSeconds(load_costs_, sequence.submitted, tokens);
  const double blocks = std::min(seconds / load_costs_.block_seconds, 1e9);
  return std::max(overlap, static_cast<int32_t>(blocks));
}

absl::Time Scheduler::next_give_up() const {
  absl::Time next = absl::InfiniteFuture();
  for (const Sequence* sequence : waiting_) {
    if (sequence->awaits_store()) next = std::min(next, sequence->give_up);
  }
  for (const Sequence* sequence : running_) {
    const bool loads = sequence->swap == Sequence::Swap::kLoading && !sequence->joins;
    if (loads) next = std::min(next, sequence->give_up);
  }
  return next;
}

void Scheduler::GiveUpLate() {
  if (next_give_up() > now_) return;
  for (Sequence* sequence : waiting_) {
    if (!sequence->awaits_store() || sequence->give_up > now_) continue;
    // What the first answer has pinned is loaded.
    sequence->ask = AskState::kAnswered;
    ++counters_.late_answers;
  }
  for (Sequence* sequence : running_) {
    const bool loads = sequence->swap == Sequence::Swap::kLoading && !sequence->joins;
    if (loads && sequence->give_up <= now_) GiveUpLoad(*sequence);
  }
}

// Copies that have begun go on, into blocks that the transfer holds.
void Scheduler::GiveUpLoad(Sequence& sequence) {
  ++counters_.late_loads;
  const auto transfer = std::find_if(transfers_.begin(), transfers_.end(), [&](const Transfer& t) {
    return t.copy.id == sequence.transfer;
  });
  if (!transfer->taken) {
    transfer->taken = true;
    OnTransferEnded({.id = transfer->copy.id, .status = absl::CancelledError("late")});
    return;
  }
  sequence.swap = Sequence::Swap::kNone;
  sequence.transfer = SwapId();
  CutBack(sequence, sequence.loaded_from);
}

bool Scheduler::PollStore(absl::Time now) {
  now_ = now;
  if (store_ == nullptr) return false;
  const std::vector<StoreEvent> events = store_->TakeEvents();
  for (const StoreEvent& event : events) {
    std::visit([this](const auto& e) { OnStoreEvent(e); }, event);
  }
  GiveUpLate();
  if (offloader_->Pump(StoreCallId(next_store_call_))) ++next_store_call_;
  EndStoreRequests();
  return !events.empty();
}

void Scheduler::OnStoreEvent(const ReserveAnswer& answer) {
  if (!offloader_->Awaits(answer.call)) return;
  const SwapId id(next_transfer_++);
  std::vector<SwapMove> moves = offloader_->OnReserved(answer, id);
  if (moves.empty()) return;
  transfers_.push_back({.copy = {.id = id,
                                 .direction = SwapTransfer::Direction::kOut,
                                 .store = true,
                                 .moves = std::move(moves)},
                        .kind = Transfer::Kind::kOffload});
}

void Scheduler::OnStoreEvent(const AcquireAnswer& answer) {
  const auto call = asking_.find(answer.call);
  if (call == asking_.end()) return;
  const auto owner = sequences_.find(call->second);
  asking_.erase(call);
  Sequence* const sequence = owner == sequences_.end() ? nullptr : owner->second.get();
  if (sequence != nullptr && answer.status.ok()) NoteLost(*sequence, answer);
  if (sequence != nullptr && sequence->awaits_store() && sequence->store_call == answer.call) {
    OnAcquired(*sequence, answer);
    return;
  }
  std::vector<StorePlace> places;
  for (const PinnedBlock& block : answer.blocks) places.push_back(block.place);
  if (!places.empty()) store_->Release(std::move(places));
  EndStoreRequests();
}

void Scheduler::OnAcquired(Sequence& sequence, const AcquireAnswer& answer) {
  const bool first = sequence.ask == AskState::kAsked;
  sequence.ask = AskState::kAnswered;
  if (!answer.status.ok()) return;
  ReleasePinned(sequence, 0);
  sequence.pinned = answer.blocks;
  sequence.pinned_from = answer.first;
  const int32_t size = config_.geometry.block_tokens;
  const int32_t most = (sequence.size() - 1) / size - sequence.pinned_from;
  ReleasePinned(sequence, static_cast<size_t>(std::max(0, most)));
  const int32_t needed = FirstNeeded(sequence);
  const int32_t from = sequence.pinned_from;
  const bool behind_held = from == sequence.asked_from && from >= needed;
  const bool whole_window = from > sequence.asked_from && from == needed;
  if (!behind_held && !whole_window) ReleasePinned(sequence, 0);
  if (sequence.pinned.empty()) sequence.pinned_from = sequence.asked_from;
  LoadOffer offer{.block_tokens = size,
                  .first = sequence.asked_from * size,
                  .skipped = sequence.pinned_from - sequence.asked_from,
                  .ready = static_cast<int32_t>(sequence.pinned.size()),
                  .window = config_.WindowBlocks()};
  std::vector<LowerBlocks> lower;
  int32_t room = first ? most - offer.ready : 0;
  for (const LowerBlocks& blocks : answer.lower) {
    if (room <= 0) break;
    lower.push_back({std::min(blocks.blocks, room), blocks.expected_seconds});
    room -= blocks.blocks;
  }
  offer.lower = lower;
  for (const Transfer& transfer : transfers_) {
    const bool in = transfer.copy.direction == SwapTransfer::Direction::kIn;
    offer.queued += in ? static_cast<int32_t>(transfer.copy.moves.size()) : 0;
  }
  const LoadChoice choice = ChooseLoad(load_costs_, offer);
  counters_.blocks_recomputed += offer.ready - choice.load;
  ReleasePinned(sequence, static_cast<size_t>(choice.load));
  if (choice.patience <= absl::ZeroDuration() || !store_->available()) return;
  ++counters_.promotions_awaited;
  Query(sequence, sequence.asked_from, choice.patience);
  sequence.ask = AskState::kAwaited;
}

// The chunks may be those of any sequence's blocks; what was found is found again, or computed.
void Scheduler::OnStoreEvent(const PlacesWanted&) {
  for (Sequence* sequence : waiting_) {
    if (sequence->pinned.empty()) continue;
    ReleasePinned(*sequence, 0);
    if (sequence->ask == AskState::kAnswered) sequence->ask = AskState::kNone;
  }
}

void Scheduler::OnStoreEvent(const StoreLost&) { offloader_->ForgetStored(); }

void Scheduler::ReleasePinned(Sequence& sequence, size_t count) {
  if (sequence.pinned.size() <= count) return;
  std::vector<StorePlace> places;
  for (size_t i = count; i < sequence.pinned.size(); ++i) {
    places.push_back(sequence.pinned[i].place);
  }
  sequence.pinned.resize(count);
  store_->Release(std::move(places));
}

int32_t Scheduler::FirstNeeded(const Sequence& sequence) const {
  const int32_t end = sequence.pinned_from + static_cast<int32_t>(sequence.pinned.size());
  return config_.sliding_window == 0 ? 0 : std::max(0, end - config_.WindowBlocks());
}

bool Scheduler::FitPinned(Sequence& sequence, const BlockManager::Match& match) {
  const auto matched = static_cast<int32_t>(match.blocks.size());
  const int32_t from = sequence.pinned.empty() ? sequence.asked_from : sequence.pinned_from;
  const bool whole_window = !sequence.pinned.empty() && from == FirstNeeded(sequence);
  if (matched < from && !whole_window) {
    ReleasePinned(sequence, 0);
    sequence.ask = AskState::kNone;
    return false;
  }
  const auto known = std::min<size_t>(std::max(0, matched - from), sequence.pinned.size());
  if (known == 0) return true;
  std::rotate(sequence.pinned.begin(), sequence.pinned.begin() + static_cast<ptrdiff_t>(known),
              sequence.pinned.end());
  ReleasePinned(sequence, sequence.pinned.size() - known);
  sequence.pinned_from += static_cast<int32_t>(known);
  return true;
}

void Scheduler::Load(Sequence& sequence, const BlockManager::Match& match) {
  blocks_.Acquire(match);
  const auto matched = static_cast<int32_t>(match.blocks.size());
  sequence.blocks = match.blocks;
  sequence.chain = match.node;
  sequence.left_window = FirstNeeded(sequence);
  SkipTo(sequence, sequence.pinned_from);
  sequence.published = static_cast<int32_t>(sequence.blocks.size());
  const auto end = sequence.pinned_from + static_cast<int32_t>(sequence.pinned.size());
  sequence.give_up = now_ + TimeToCompute(matched, end - matched);
  std::vector<SwapMove> moves;
  std::vector<StorePlace> places;
  for (const PinnedBlock& pinned : std::exchange(sequence.pinned, {})) {
    const BlockKey& key = sequence.keys[sequence.blocks.size()];
    sequence.blocks.push_back(*blocks_.Allocate());
    moves.push_back({.block = sequence.blocks.back(),
                     .memory = pinned.place.memory,
                     .key = key,
                     .checksum = pinned.checksum});
    places.push_back(pinned.place);
  }
  sequence.loaded_from = sequence.published;
  sequence.computed = static_cast<int32_t>(sequence.blocks.size()) * config_.geometry.block_tokens;
  sequence.submitted = sequence.computed;
  sequence.swap = Sequence::Swap::kLoading;
  ++counters_.loads;
  // Steps in flight may still use what was free.
  AddTransfer(Transfer::Kind::kLoad, SwapTransfer::Direction::kIn, sequence, std::move(moves),
              ended_steps_ + in_flight_);
  transfers_.back().places = std::move(places);
}

void Scheduler::FinishLoad(const Transfer& transfer, const SwapEnded& ended) {
  store_->Release(transfer.places);
  // Deepest first, as ReleaseBlocks does.
  for (auto move = transfer.copy.moves.rbegin(); move != transfer.copy.moves.rend(); ++move) {
    blocks_.Release(move->block);
  }
  const int32_t intact =
      ended.status.ok() ? static_cast<int32_t>(transfer.copy.moves.size()) : ended.intact;
  counters_.failed_loads += !ended.status.ok();
  counters_.blocks_loaded += intact;
  EndStoreRequests();
  const auto owner = sequences_.find(transfer.sequence);
  if (owner == sequences_.end() || owner->second->transfer != transfer.copy.id) return;
  Sequence& sequence = *owner->second;
  sequence.swap = Sequence::Swap::kNone;
  sequence.transfer = SwapId();
  if (!ended.status.ok()) {
    PALIMPSEST_CHECK(!transfer.copy.awaited || in_flight_ == 0);
    CutBack(sequence, sequence.loaded_from + intact);
  }
  PublishFullBlocks(sequence);
}

void Scheduler::CutBack(Sequence& sequence, int32_t blocks) {
  if (sequence.left_window > 0) {
    // The window of a shorter prefix begins where its KV is not there.
    ReleaseBlocks(sequence);
  } else {
    PALIMPSEST_CHECK(sequence.published <= blocks);
    while (static_cast<int32_t>(sequence.blocks.size()) > blocks) {
      blocks_.Release(sequence.blocks.back());
      sequence.blocks.pop_back();
    }
    ++sequence.stay;
    sequence.computed = blocks * config_.geometry.block_tokens;
    sequence.submitted = sequence.computed;
  }
  sequence.usage.cached_tokens = std::min(sequence.usage.cached_tokens, sequence.computed);
}

void Scheduler::NoteLost(Sequence& sequence, const AcquireAnswer& answer) {
  if (sequence.store_call != answer.call || answer.kept >= sequence.told_held) return;
  sequence.lost_from = std::max(0, answer.kept);
  sequence.lost_to = sequence.told_held;
}

void Scheduler::Offer(Sequence& sequence) {
  if (store_ == nullptr || sequence.chain == nullptr) return;
  if (sequence.lost_from < sequence.lost_to && sequence.lost_to <= sequence.published) {
    PrefixCache::Node* last = sequence.chain;
    for (int32_t i = sequence.published; i > sequence.lost_to; --i) last = last->parent();
    offloader_->OfferLost(last, sequence.lost_to - sequence.lost_from, sequence.id.value());
    sequence.lost_to = 0;
  }
  offloader_->Offer(sequence.chain, sequence.id.value());
}

void Scheduler::LeaveStore(Sequence& sequence, StoreRequestEnd::How how) {
  Offer(sequence);
  ReleasePinned(sequence, 0);
  if (!sequence.known_to_store) return;
  ended_requests_.push_back({.request = sequence.id.value(),
                             .conversation = sequence.hints.conversation,
                             .how = how,
                             .output_tokens = sequence.size() - sequence.output_begin,
                             .expected_idle = sequence.hints.expected_idle,
                             .last_turn = sequence.hints.last_turn,
                             .then = sequence.hints.then});
  EndStoreRequests();
}

void Scheduler::EndStoreRequests() {
  std::erase_if(ended_requests_, [this](const StoreRequestEnd& end) {
    // What the request leaves belongs to it only as long as it has not ended.
    if (IsCopiedFor(end) || (store_->available() && offloader_->Busy(end.request))) return false;
    store_->EndRequest(end);
    return true;
  });
}

void Scheduler::EndStoreRequestsOf(uint64_t conversation) {
  std::erase_if(ended_requests_, [&](const StoreRequestEnd& end) {
    if (conversation == 0 || end.conversation != conversation || IsCopiedFor(end)) return false;
    store_->EndRequest(end);
    return true;
  });
}

bool Scheduler::IsCopiedFor(const StoreRequestEnd& end) const {
  const SequenceId id(end.request);
  return std::any_of(asking_.begin(), asking_.end(),
                     [id](const auto& call) { return call.second == id; }) ||
         std::any_of(transfers_.begin(), transfers_.end(), [id](const Transfer& transfer) {
           return transfer.kind == Transfer::Kind::kLoad && transfer.sequence == id;
         });
}

}  // namespace palimpsest
