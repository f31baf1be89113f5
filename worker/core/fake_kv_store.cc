#include "worker/core/fake_kv_store.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "worker/core/check.h"

namespace palimpsest {

FakeKvStore::FakeKvStore(const Options& options)
    : options_(options),
      random_(options.seed),
      arena_(static_cast<size_t>((options.block_bytes * options.capacity_blocks).count())),
      uses_(static_cast<size_t>(options.capacity_blocks)) {}

void FakeKvStore::Reserve(StoreCallId call, uint64_t, BlockChain chain) {
  PALIMPSEST_CHECK(!chain.keys.empty());
  PALIMPSEST_CHECK(chain.tokens.size() == chain.keys.size() * options_.block_tokens);
  calls_.push_back({call, std::move(chain)});
}

void FakeKvStore::Acquire(StoreCallId call, StoreQuery query) {
  ++queries_;
  PALIMPSEST_CHECK(query.request != 0);
  open_requests_.insert(query.request);
  PALIMPSEST_CHECK(query.chain.tokens.size() == query.chain.keys.size() * options_.block_tokens);
  PALIMPSEST_CHECK(query.held >= 0 && query.held <= static_cast<int>(query.chain.keys.size()));
  last_query_ = query;
  calls_.push_back({call, std::move(query)});
}

std::vector<StoreEvent> FakeKvStore::TakeEvents() { return std::exchange(events_, {}); }

void FakeKvStore::AnswerOne() {
  if (calls_.empty()) return;
  const auto index = static_cast<ptrdiff_t>(random_() % 2 == 0 ? 0 : random_() % calls_.size());
  const Call call = std::move(calls_[index]);
  calls_.erase(calls_.begin() + index);
  Answer(call);
}

void FakeKvStore::AnswerAll() {
  while (!calls_.empty()) AnswerOne();
}

void FakeKvStore::Answer(const Call& call) {
  const bool fails = !available_ || Chance(options_.failing_percent);
  const absl::Status status = fails ? absl::UnavailableError("the test's store") : absl::Status();
  if (const auto* chain = std::get_if<BlockChain>(&call.what)) {
    ReserveAnswer answer = fails ? ReserveAnswer() : AnswerReserve(*chain);
    answer.call = call.id;
    answer.status = status;
    events_.push_back(std::move(answer));
  } else {
    AcquireAnswer answer = fails ? AcquireAnswer() : AnswerAcquire(std::get<StoreQuery>(call.what));
    answer.call = call.id;
    answer.status = status;
    events_.push_back(std::move(answer));
  }
}

ReserveAnswer FakeKvStore::AnswerReserve(const BlockChain& chain) {
  ReserveAnswer answer;
  for (size_t i = 0; i < chain.keys.size(); ++i) {
    ReservedBlock& result = answer.blocks.emplace_back();
    if (const auto known = blocks_.find(chain.keys[i]); known != blocks_.end()) {
      if (Find(chain, i) == nullptr) break;  // a collision
      result.result = ReservedBlock::Result::kPresent;
      continue;
    }
    const auto slot = std::find(uses_.begin(), uses_.end(), 0);
    if (slot == uses_.end()) {
      result.result = ReservedBlock::Result::kNoRoom;
      break;
    }
    ++*slot;
    const auto tokens = chain.tokens.begin() + static_cast<ptrdiff_t>(i * options_.block_tokens);
    Block& block = blocks_[chain.keys[i]];
    block.parent = i == 0 ? chain.parent : chain.keys[i - 1];
    block.tokens.assign(tokens, tokens + options_.block_tokens);
    block.slot = static_cast<size_t>(slot - uses_.begin());
    result.result = ReservedBlock::Result::kReserved;
    result.place = Hold({block.slot, true, chain.keys[i]});
  }
  return answer;
}

AcquireAnswer FakeKvStore::AnswerAcquire(const StoreQuery& query) {
  AcquireAnswer answer;
  while (answer.kept < query.held && Find(query.chain, answer.kept) != nullptr) ++answer.kept;
  const Range all = Longest(query, /*lower=*/true);
  if (query.wait > absl::ZeroDuration()) {
    for (size_t i = all.begin; i < all.end; ++i) {
      if (Chance(80)) Find(query.chain, i)->lower = false;
    }
  }
  const Range ready = Longest(query, /*lower=*/false);
  answer.first = static_cast<int32_t>(ready.begin);
  for (size_t i = ready.begin; i < ready.end; ++i) {
    answer.blocks.push_back(Pin(*Find(query.chain, i), query.request));
  }
  const auto more = static_cast<int32_t>(all.end - ready.end);
  const auto seconds = [this] { return static_cast<double>(random_() % 5) / 1000; };
  if (query.window > 0 && more > 0) answer.lower.push_back({more, seconds()});
  for (int32_t i = 0; query.window == 0 && i < more; ++i) answer.lower.push_back({1, seconds()});
  if (!blocks_.empty() && Chance(options_.lying_percent)) {
    ++lies_;
    for (int extra = 0; extra < 3; ++extra)
      answer.blocks.push_back(Pin(AnyReady()->second, query.request));
  }
  return answer;
}

FakeKvStore::Range FakeKvStore::Longest(const StoreQuery& query, bool lower) {
  const auto held = static_cast<size_t>(query.held);
  const auto window = static_cast<size_t>(query.window);
  Range longest = {held, held};
  size_t present = held;  // blocks at the end of the path
  for (size_t i = held; i < query.chain.keys.size(); ++i) {
    const Block* const block = Find(query.chain, i);
    const bool there = block != nullptr && block->ready && (lower || !block->lower);
    present = there ? present + 1 : 0;
    if (present >= (window == 0 ? i + 1 : std::min(window, i + 1))) longest.end = i + 1;
  }
  if (window > 0 && longest.end > held + window) longest.begin = longest.end - window;
  return longest;
}

FakeKvStore::Block* FakeKvStore::Find(const BlockChain& chain, size_t index) {
  const auto found = blocks_.find(chain.keys[index]);
  if (found == blocks_.end()) return nullptr;
  const auto tokens = chain.tokens.begin() + static_cast<ptrdiff_t>(index * options_.block_tokens);
  const BlockKey& parent = index == 0 ? chain.parent : chain.keys[index - 1];
  Block& block = found->second;
  return block.parent == parent && std::equal(block.tokens.begin(), block.tokens.end(), tokens)
             ? &block
             : nullptr;
}

PinnedBlock FakeKvStore::Pin(const Block& block, uint64_t request) {
  PinnedBlock pinned{Hold({block.slot, false, {}, request}), block.checksum};
  if (!Chance(options_.lying_percent)) return pinned;
  ++lies_;
  if (Chance(50)) {
    ++pinned.checksum;
  } else {
    const size_t other = random_() % uses_.size();
    pinned.place.memory = arena_.data() + (options_.block_bytes * other).count();
  }
  return pinned;
}

StorePlace FakeKvStore::Hold(const Held& held) {
  if (!held.writing) ++uses_[held.slot];
  const uint64_t id = next_place_++;
  held_.emplace(id, held);
  return {arena_.data() + (options_.block_bytes * held.slot).count(), id};
}

FakeKvStore::Held FakeKvStore::Take(const StorePlace& place, bool writing) {
  const auto found = held_.find(place.id);
  PALIMPSEST_CHECK(found != held_.end() && found->second.writing == writing);
  const Held held = found->second;
  held_.erase(found);
  return held;
}

void FakeKvStore::Unuse(size_t slot) {
  PALIMPSEST_CHECK(uses_[slot] > 0);
  --uses_[slot];
}

void FakeKvStore::Commit(std::vector<WrittenBlock> blocks) {
  PALIMPSEST_CHECK(!blocks.empty());
  for (const WrittenBlock& written : blocks) {
    const Held held = Take(written.place, true);
    PALIMPSEST_CHECK(held.key == written.key);
    const auto found = blocks_.find(held.key);
    // It may have been lost meanwhile, and reserved again.
    if (found == blocks_.end() || found->second.slot != held.slot) {
      Unuse(held.slot);
      continue;
    }
    found->second.ready = true;
    found->second.checksum = written.checksum;
  }
}

void FakeKvStore::Abort(std::vector<WrittenBlock> blocks) {
  PALIMPSEST_CHECK(!blocks.empty());
  for (const WrittenBlock& written : blocks) {
    const Held held = Take(written.place, true);
    const auto found = blocks_.find(held.key);
    if (found != blocks_.end() && found->second.slot == held.slot) blocks_.erase(found);
    Unuse(held.slot);
  }
}

void FakeKvStore::Release(std::vector<StorePlace> places) {
  PALIMPSEST_CHECK(!places.empty());
  for (const StorePlace& place : places) Unuse(Take(place, false).slot);
}

void FakeKvStore::EndRequest(const StoreRequestEnd& end) {
  PALIMPSEST_CHECK(open_requests_.erase(end.request) == 1);
  for (const Call& call : calls_) {
    const auto* query = std::get_if<StoreQuery>(&call.what);
    PALIMPSEST_CHECK(query == nullptr || query->request != end.request);
  }
  for (const auto& [id, held] : held_) {
    PALIMPSEST_CHECK(held.writing || held.request != end.request);
  }
  ended_requests_.push_back(end);
}

std::map<BlockKey, FakeKvStore::Block>::iterator FakeKvStore::AnyReady() {
  return std::next(blocks_.begin(), static_cast<ptrdiff_t>(random_() % blocks_.size()));
}

void FakeKvStore::DropOne() {
  if (blocks_.empty()) return;
  const auto block = AnyReady();
  if (!block->second.ready) return;
  Unuse(block->second.slot);
  blocks_.erase(block);
}

void FakeKvStore::DemoteOne() {
  if (!blocks_.empty()) AnyReady()->second.lower = true;
}

void FakeKvStore::Demote(const BlockChain& chain, int32_t first) {
  for (auto i = static_cast<size_t>(first); i < chain.keys.size(); ++i) {
    Block* const block = Find(chain, i);
    if (block != nullptr && block->ready) block->lower = true;
  }
}

void FakeKvStore::Lose() {
  for (const auto& [key, block] : blocks_) {
    if (block.ready) Unuse(block.slot);
  }
  blocks_.clear();
  const bool before = std::exchange(available_, false);
  AnswerAll();
  available_ = before;
  events_.push_back(StoreLost{});
}

void FakeKvStore::Corrupt() {
  for (const auto& [key, block] : blocks_) {
    if (block.ready) arena_[(options_.block_bytes * block.slot).count()] ^= std::byte(1);
  }
}

}  // namespace palimpsest
