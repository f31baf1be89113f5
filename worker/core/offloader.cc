#include "worker/core/offloader.h"

#include <algorithm>
#include <utility>

#include "worker/core/check.h"

namespace palimpsest {

Offloader::Offloader(BlockManager* blocks, KvStore* store, const BlockKey& root,
                     const Limits& limits)
    : blocks_(blocks), store_(store), root_(root), limits_(limits) {}

void Offloader::Forget(PrefixCache::Node* node, uint32_t era) {
  if (node->offered() == era) node->set_offered(0);
  blocks_->Unpin(node);
}

void Offloader::Settle(PrefixCache::Node* node, uint32_t era) {
  if (node->offered() == era) node->set_offered(era + 1);
  blocks_->Unpin(node);
}

void Offloader::DropOldest() {
  ++counters_.dropped;
  Forget(queue_.front().node, era_);
  Close(queue_.front().request);
  queue_.pop_front();
}

void Offloader::Close(uint64_t request) {
  const auto open = open_.find(request);
  PALIMPSEST_CHECK(open != open_.end());
  if (--open->second == 0) open_.erase(open);
}

void Offloader::Offer(PrefixCache::Node* last, uint64_t request) {
  if (!store_->available()) return;
  std::vector<PrefixCache::Node*> fresh;
  for (auto* node = last; node != nullptr && !Offered(node); node = node->parent()) {
    if (node->block() != kNullBlock) fresh.push_back(node);
  }
  Enqueue(fresh, request);
}

void Offloader::OfferLost(PrefixCache::Node* last, int32_t count, uint64_t request) {
  if (!store_->available()) return;
  std::vector<PrefixCache::Node*> lost;
  PrefixCache::Node* node = last;
  for (int32_t i = 0; i < count && node != nullptr; ++i, node = node->parent()) {
    if (Stored(node) && node->block() != kNullBlock) lost.push_back(node);
  }
  counters_.lost += static_cast<int64_t>(lost.size());
  Enqueue(lost, request);
}

void Offloader::Enqueue(const std::vector<PrefixCache::Node*>& deepest_first, uint64_t request) {
  for (auto node = deepest_first.rbegin(); node != deepest_first.rend(); ++node) {
    (*node)->set_offered(era_);
    blocks_->Pin(*node);
    queue_.push_back({*node, request});
    ++open_[request];
  }
  while (static_cast<int32_t>(queue_.size()) > limits_.queued_blocks) DropOldest();
}

void Offloader::Postpone(const Batch& batch, size_t first) {
  const auto postpone = [this](const Entry& entry) {
    Close(entry.request);
    if (Queued(entry.node)) entry.node->set_offered(0);
    if (entry.tries < limits_.tries) {
      no_room_.push_back(entry);
    } else {
      ++counters_.refused;
      blocks_->Unpin(entry.node);
    }
  };
  for (size_t i = first; i < batch.nodes.size(); ++i) {
    postpone({batch.nodes[i], batch.request, batch.tries[i] + 1});
  }
  const PrefixCache::Node* last = batch.nodes.back();
  while (!queue_.empty() && queue_.front().node->parent() == last) {
    last = queue_.front().node;
    postpone({queue_.front().node, queue_.front().request, queue_.front().tries + 1});
    queue_.pop_front();
  }
  while (static_cast<int32_t>(no_room_.size()) > limits_.queued_blocks) {
    ++counters_.dropped;
    blocks_->Unpin(no_room_.front().node);
    no_room_.pop_front();
  }
}

void Offloader::Retry() {
  for (const Entry& entry : std::exchange(no_room_, {})) {
    if (Offered(entry.node) || entry.node->block() == kNullBlock) {
      blocks_->Unpin(entry.node);
      continue;
    }
    ++counters_.retried;
    entry.node->set_offered(era_);
    queue_.push_back(entry);
    ++open_[entry.request];
  }
  while (static_cast<int32_t>(queue_.size()) > limits_.queued_blocks) DropOldest();
}

Offloader::Batch Offloader::NextBatch() {
  Batch batch{.era = era_};
  const auto most =
      static_cast<size_t>(std::min(limits_.batch_blocks, limits_.copying_blocks - copying_blocks_));
  while (!queue_.empty() && batch.nodes.size() < most) {
    const auto [node, request, tries] = queue_.front();
    const bool continues =
        batch.nodes.empty() || (node->parent() == batch.nodes.back() && request == batch.request);
    if (!continues) break;
    // Without what comes before it a block is of no use.
    const bool orphan = node->parent() != nullptr && !Offered(node->parent());
    if (node->block() == kNullBlock || (orphan && !limits_.windowed)) {
      DropOldest();
      continue;
    }
    batch.request = request;
    batch.nodes.push_back(node);
    batch.tries.push_back(tries);
    queue_.pop_front();
  }
  return batch;
}

bool Offloader::Pump(StoreCallId call) {
  if (batch_.has_value() || !store_->available()) return false;
  Batch batch = NextBatch();
  if (batch.nodes.empty()) return false;
  batch.call = call;
  const PrefixCache::Node* const parent = batch.nodes.front()->parent();
  BlockChain chain{.parent = parent == nullptr ? root_ : parent->key()};
  for (const PrefixCache::Node* node : batch.nodes) {
    chain.keys.push_back(node->key());
    chain.tokens.insert(chain.tokens.end(), node->tokens().begin(), node->tokens().end());
  }
  batch_ = std::move(batch);
  store_->Reserve(call, batch_->request, std::move(chain));
  return true;
}

std::vector<SwapMove> Offloader::OnReserved(const ReserveAnswer& answer, SwapId transfer) {
  PALIMPSEST_CHECK(Awaits(answer.call));
  const Batch batch = *std::move(batch_);
  batch_.reset();
  counters_.failed += !answer.status.ok();
  std::vector<SwapMove> moves;
  std::vector<WrittenBlock> unused;
  Copy copy{.era = batch.era, .request = batch.request};
  bool granted = false, full = false;
  for (size_t i = 0; i < std::max(batch.nodes.size(), answer.blocks.size()); ++i) {
    const ReservedBlock block = i < answer.blocks.size() ? answer.blocks[i] : ReservedBlock();
    const bool reserved = block.result == ReservedBlock::Result::kReserved;
    if (i >= batch.nodes.size() || full) {
      if (reserved) unused.push_back({{}, block.place});
      continue;
    }
    PrefixCache::Node* const node = batch.nodes[i];
    granted |= reserved;
    if (block.result == ReservedBlock::Result::kPresent) {
      ++counters_.present;
      Settle(node, batch.era);
    } else if (block.result == ReservedBlock::Result::kNoRoom && batch.era == era_) {
      full = true;
      Postpone(batch, i);
      continue;
    } else if (!reserved) {
      counters_.refused += answer.status.ok();
      Forget(node, batch.era);
    } else if (node->block() == kNullBlock) {
      ++counters_.dropped;
      unused.push_back({node->key(), block.place});
      Forget(node, batch.era);
    } else {
      blocks_->AddReference(node->block());
      moves.push_back({.block = node->block(), .memory = block.place.memory, .key = node->key()});
      copy.nodes.push_back(node);
      copy.held.push_back(node->block());
      copy.written.push_back({node->key(), block.place});
      continue;
    }
    Close(batch.request);
  }
  if (!unused.empty()) store_->Abort(std::move(unused));
  if (granted && !full) Retry();
  if (moves.empty()) return moves;
  copying_blocks_ += static_cast<int32_t>(moves.size());
  copies_.emplace(transfer, std::move(copy));
  return moves;
}

void Offloader::OnCopied(const SwapEnded& ended) {
  const auto found = copies_.find(ended.id);
  PALIMPSEST_CHECK(found != copies_.end());
  Copy copy = std::move(found->second);
  copies_.erase(found);
  copying_blocks_ -= static_cast<int32_t>(copy.nodes.size());
  // Deepest first, so that the cache evicts the ends of prefixes before their beginnings.
  for (auto block = copy.held.rbegin(); block != copy.held.rend(); ++block) {
    blocks_->Release(*block);
  }
  const bool good = ended.status.ok() && ended.checksums.size() == copy.written.size();
  for (size_t i = 0; i < copy.nodes.size(); ++i) {
    if (good) {
      copy.written[i].checksum = ended.checksums[i];
      Settle(copy.nodes[i], copy.era);
    } else {
      Forget(copy.nodes[i], copy.era);
    }
    Close(copy.request);
  }
  if (good) {
    counters_.stored += static_cast<int64_t>(copy.written.size());
    store_->Commit(std::move(copy.written));
  } else {
    ++counters_.failed;
    store_->Abort(std::move(copy.written));
  }
}

void Offloader::ForgetStored() {
  while (!queue_.empty()) DropOldest();
  for (const Entry& entry : std::exchange(no_room_, {})) blocks_->Unpin(entry.node);
  era_ += 2;
}

int32_t Offloader::held_blocks() const {
  int32_t held = 0;
  for (const auto& [id, copy] : copies_) {
    held += static_cast<int32_t>(
        std::count_if(copy.held.begin(), copy.held.end(),
                      [this](BlockId block) { return blocks_->references(block) == 1; }));
  }
  return held;
}

}  // namespace palimpsest
