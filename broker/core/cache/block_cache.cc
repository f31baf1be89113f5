#include "broker/core/cache/block_cache.h"

#include <cassert>
#include <optional>
#include <utility>

namespace palimpsest::cache {

BlockCache::BlockCache(const BlockCacheOptions& options, std::unique_ptr<EvictionPolicy> policy)
    : options_(options), policy_(std::move(policy)) {
  assert(options_.capacity > 0 && policy_ != nullptr);
  assert(!options_.store_at_end || options_.discipline == Discipline::kLeavesFirst);
}

bool BlockCache::IsCached(BlockKey key) const {
  const BlockHandle handle = HandleOf(key);
  return handle != kNoBlock && blocks_[handle.value()].cached;
}

BlockHandle BlockCache::HandleOf(BlockKey key) const {
  const auto found = handles_.find(key);
  return found == handles_.end() ? kNoBlock : found->second;
}

std::optional<BlockKey> BlockCache::ParentOf(BlockHandle block) const {
  const BlockHandle parent = blocks_[block.value()].parent;
  if (parent == kNoBlock) return std::nullopt;
  return blocks_[parent.value()].key;
}

BlockCache::Outcome BlockCache::Begin(const RequestInfo& request, absl::Span<const BlockKey> path) {
  Outcome outcome;
  victims_.clear();
  path_.clear();
  BlockHandle parent = kNoBlock;
  for (const BlockKey key : path) {
    const auto found = handles_.find(key);
    if (found == handles_.end()) {
      parent = Allocate(key, parent);
    } else {
      assert(options_.discipline == Discipline::kPlain || At(found->second).parent == parent);
      parent = found->second;
      if (outcome.known == path_.size()) ++outcome.known;
      if (outcome.cached == path_.size() && At(parent).cached) ++outcome.cached;
    }
    path_.push_back(parent);
  }
  for (size_t i = path_.size(); i > 0; --i) {
    if (!At(path_[i - 1]).cached) history_.Push(path_[i - 1]);
  }
  for (size_t i = 0; i < outcome.cached; ++i) At(path_[i]).used = true;
  Running running;
  if (options_.discipline == Discipline::kPlain) {
    StoreEach(request, outcome);
  } else {
    policy_->OnRequest(request, {path_, outcome.cached, outcome.known});
    running = StorePrefix(request, outcome);
  }
  const bool inserted = running_.emplace(request.id, running).second;
  assert(inserted);
  static_cast<void>(inserted);
  ForgetOldest();
  return outcome;
}

void BlockCache::StoreEach(const RequestInfo& request, Outcome& outcome) {
  for (size_t i = 0; i < path_.size(); ++i) {
    const bool cached = At(path_[i]).cached;
    policy_->OnRequest(request, {.path = absl::MakeConstSpan(path_).subspan(i, 1),
                                 .cached = cached ? size_t{1} : 0,
                                 .known = i < outcome.known ? size_t{1} : 0});
    if (!cached) Store(request.id, request.arrival, path_[i], outcome);
  }
}

BlockCache::Running BlockCache::StorePrefix(const RequestInfo& request, Outcome& outcome) {
  Running running;
  if (outcome.cached > 0) {
    running.tail = path_[outcome.cached - 1];
    Hold(running.tail);
  }
  if (!options_.store_requests) return running;
  if (options_.store_at_end) {
    for (size_t i = outcome.cached; i < path_.size(); ++i) running.rest.push_back(At(path_[i]).key);
    running.announced = running.rest.size();
    return running;
  }
  for (size_t i = outcome.cached; i < path_.size() && running.whole; ++i) {
    running.whole = Store(request.id, request.arrival, path_[i], outcome);
    if (running.whole) running.tail = path_[i];
  }
  return running;
}

BlockCache::Outcome BlockCache::Extend(RequestId request, absl::Time now, BlockKey key) {
  assert(options_.discipline == Discipline::kLeavesFirst);
  Outcome outcome;
  const auto found = running_.find(request);
  assert(found != running_.end());
  Running& running = found->second;
  victims_.clear();
  if (options_.store_at_end) {
    running.rest.push_back(key);
    return outcome;
  }
  if (!running.whole || !options_.store_requests) return outcome;
  const auto known = handles_.find(key);
  const BlockHandle block = known == handles_.end() ? Allocate(key, running.tail) : known->second;
  if (At(block).cached) {  // another request has computed it meanwhile
    MoveTail(running, block);
  } else {
    history_.Push(block);
    policy_->OnExtend(request, block);
    running.whole = Store(request, now, block, outcome);
    if (running.whole) running.tail = block;
  }
  ForgetOldest();
  return outcome;
}

BlockCache::Outcome BlockCache::End(const RequestEnd& end) {
  const auto found = running_.find(end.id);
  assert(found != running_.end());
  Running running = std::move(found->second);
  running_.erase(found);
  Outcome outcome;
  victims_.clear();
  if (options_.store_at_end) NameRest(end.id, running);
  policy_->OnRequestEnd(end);
  if (options_.store_at_end) StoreRest(end.id, end.time, running, outcome);
  if (running.tail != kNoBlock) Unhold(running.tail);
  ForgetOldest();
  return outcome;
}

BlockCache::Outcome BlockCache::Admit(absl::Time now, absl::Span<const BlockKey> path) {
  assert(options_.discipline == Discipline::kLeavesFirst);
  Outcome outcome;
  victims_.clear();
  Running running;
  for (const BlockKey key : path) {
    const BlockHandle block = HandleOf(key);
    if (block == kNoBlock) break;
    if (running.tail == kNoBlock && At(block).parent != kNoBlock) {
      if (!At(At(block).parent).cached) break;
      MoveTail(running, At(block).parent);
    }
    assert(At(block).parent == running.tail);
    if (At(block).cached) {
      ++outcome.cached;
      MoveTail(running, block);
    } else if (Store(RequestId(), now, block, outcome)) {
      running.tail = block;
    } else {
      break;
    }
  }
  if (running.tail != kNoBlock) Unhold(running.tail);
  ForgetOldest();
  return outcome;
}

void BlockCache::NameRest(RequestId request, const Running& running) {
  path_.clear();
  BlockHandle parent = running.tail;
  for (size_t i = 0; i < running.rest.size(); ++i) {
    const BlockKey key = running.rest[i];
    const bool announced = i < running.announced;
    const auto known = handles_.find(key);
    if (known == handles_.end() && announced) break;  // forgotten
    parent = known == handles_.end() ? Allocate(key, parent) : known->second;
    if (!announced && !At(parent).cached) policy_->OnExtend(request, parent);
    path_.push_back(parent);
  }
  for (size_t i = path_.size(); i > 0; --i) {
    if (!At(path_[i - 1]).cached) history_.Push(path_[i - 1]);
  }
}

void BlockCache::StoreRest(RequestId request, absl::Time now, Running& running, Outcome& outcome) {
  for (const BlockHandle block : path_) {
    if (At(block).cached) {  // another request has stored it meanwhile
      MoveTail(running, block);
    } else if (Store(request, now, block, outcome)) {
      running.tail = block;
    } else {
      return;
    }
  }
}

void BlockCache::MoveTail(Running& running, BlockHandle block) {
  Hold(block);
  if (running.tail != kNoBlock) Unhold(running.tail);
  running.tail = block;
}

BlockHandle BlockCache::Allocate(BlockKey key, BlockHandle parent) {
  if (free_.empty()) {
    free_.push_back(BlockHandle(static_cast<uint32_t>(blocks_.size())));
    blocks_.emplace_back();
  }
  const BlockHandle handle = free_.back();
  free_.pop_back();
  At(handle) = {
      .key = key, .parent = parent, .position = parent == kNoBlock ? 0 : At(parent).position + 1};
  handles_.emplace(key, handle);
  return handle;
}

bool BlockCache::Store(RequestId request, absl::Time now, BlockHandle handle, Outcome& outcome) {
  while (cached_ >= options_.capacity) {
    const std::optional<BlockHandle> victim =
        policy_->ChooseVictim(now, handle, options_.may_refuse);
    if (!victim.has_value()) return false;
    Evict(*victim, outcome);
  }
  history_.Remove(handle);
  Block& block = At(handle);
  block.cached = true;
  block.used = false;
  ++cached_;
  ++outcome.stored;
  policy_->OnInsert(request, handle, block.parent);
  if (options_.discipline == Discipline::kPlain) {
    policy_->OnEvictable(handle);
  } else {
    // The request's use moves from the parent to this block, which is a child of the parent.
    block.holds = 1;
  }
  return true;
}

void BlockCache::Evict(BlockHandle handle, Outcome& outcome) {
  Block& block = At(handle);
  assert(block.cached && block.holds == 0);
  policy_->OnEvict(handle);
  block.cached = false;
  --cached_;
  ++outcome.evicted;
  outcome.wasted += block.used ? 0 : 1;
  victims_.push_back(block.key);
  history_.Push(handle);
  if (options_.discipline == Discipline::kLeavesFirst && block.parent != kNoBlock) {
    Unhold(block.parent);
  }
}

void BlockCache::Hold(BlockHandle handle) {
  if (At(handle).holds++ == 0) policy_->OnPinned(handle);
}

void BlockCache::Unhold(BlockHandle handle) {
  assert(At(handle).holds > 0);
  if (--At(handle).holds == 0) policy_->OnEvictable(handle);
}

void BlockCache::ForgetOldest() {
  if (options_.discipline == Discipline::kPlain) return;
  while (history_.size() > options_.history) {
    const BlockHandle handle = history_.oldest();
    history_.Remove(handle);
    policy_->OnForget(handle);
    handles_.erase(At(handle).key);
    free_.push_back(handle);
  }
}

}  // namespace palimpsest::cache
