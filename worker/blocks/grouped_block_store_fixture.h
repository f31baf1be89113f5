// For tests of GroupedBlockStore: blocks of six heads in three parts, over a FakeKvStore.
#ifndef PALIMPSEST_WORKER_BLOCKS_GROUPED_BLOCK_STORE_FIXTURE_H_
#define PALIMPSEST_WORKER_BLOCKS_GROUPED_BLOCK_STORE_FIXTURE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <variant>
#include <vector>

#include "common/block_checksum.h"
#include "common/clock.h"
#include "gtest/gtest.h"
#include "worker/blocks/grouped_block_store.h"
#include "worker/core/block_keys.h"
#include "worker/core/conversation_hints.h"
#include "worker/core/fake_kv_store.h"

namespace palimpsest {

inline constexpr int32_t kBlockTokens = 4;
inline constexpr BlockKey kRoot{1, 2};

inline HeadParts ThreeParts() {
  return HeadParts::Create(
             {.layers = 3, .kv_heads = 2, .block_tokens = kBlockTokens, .row = Bytes(8)},
             {{5, 0}, {2, 4}, {1, 3}})
      .value();
}

// In groups as those parts, coldest first.
inline HeadMass SixHeads(bool reversed, int64_t samples) {
  HeadMass mass = HeadMass::Create({.layers = 3, .kv_heads = 2}).value();
  const float first = reversed ? 0.9f : 0.1f, last = reversed ? 0.1f : 0.9f;
  for (int64_t i = 0; i < samples; ++i) {
    EXPECT_TRUE(mass.Sample({first, last, 0.5f, last, 0.5f, first}).ok());
  }
  return mass;
}

// The bytes of a block are those that its key says.
inline std::vector<std::byte> Content(const BlockKey& key, Bytes size) {
  std::mt19937_64 random(key.low ^ key.high);
  std::vector<std::byte> bytes(static_cast<size_t>(size.count()));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

inline BlockChain Chain(uint64_t seed, size_t blocks) {
  std::mt19937_64 random(seed);
  BlockChain chain = {.parent = kRoot, .keys = {}, .tokens = {}};
  for (size_t i = 0; i < blocks; ++i) {
    for (int t = 0; t < kBlockTokens; ++t) {
      chain.tokens.push_back(static_cast<TokenId>(random() % 3));
    }
    const BlockKey& parent = i == 0 ? chain.parent : chain.keys.back();
    chain.keys.push_back(ChainKey(
        parent, absl::MakeConstSpan(chain.tokens).last(static_cast<size_t>(kBlockTokens))));
  }
  return chain;
}

// Keeps what it is told, and answers with as many blocks as there were hints before.
class FakeHints final : public ConversationHints {
 public:
  void Hint(uint64_t conversation, const CacheAction& action,
            std::function<void(absl::StatusOr<uint64_t>)> done) override {
    conversations.push_back(conversation);
    kinds.push_back(action.kind);
    if (fails) return done(absl::NotFoundError("no such conversation"));
    done(conversations.size());
  }

  std::vector<uint64_t> conversations;
  std::vector<CacheAction::Kind> kinds;
  bool fails = false;
};

inline FakeKvStore::Options Capacity(int32_t parts) {
  FakeKvStore::Options options;
  options.capacity_blocks = parts;
  return options;
}

class Grouped {
 public:
  // `limit`: parts that are to lie in tier 1.
  Grouped(FakeKvStore::Options options, std::optional<int64_t> limit, int32_t staging) {
    options.block_bytes = ThreeParts().part_bytes();
    options.block_tokens = kBlockTokens;
    inner_ = std::make_unique<FakeKvStore>(options);
    GroupedBlockStore::TierOne tier_one;
    if (limit.has_value()) {
      TierOneParts::Options parts = {.groups = {{5, 0}, {2, 4}, {1, 3}},
                                     .root = kRoot,
                                     .block_tokens = kBlockTokens,
                                     .part_bytes = options.block_bytes,
                                     .limit = options.block_bytes * *limit};
      tier_one = {.parts = std::make_unique<TierOneParts>(std::move(parts), SixHeads(false, 1)),
                  .clock = &clock_,
                  .masses = [this] { return live_; },
                  .demote =
                      [this](const BlockChain& chain, int32_t first) {
                        inner_->Demote(chain, first);
                        demoted_.emplace_back(chain, first);
                      }};
    }
    store_ = std::make_unique<GroupedBlockStore>(
        GroupedBlockStore::Options{.staging_blocks = staging}, ThreeParts(), inner_.get(), &hints_,
        std::move(tier_one));
  }

  FakeKvStore& inner() { return *inner_; }
  FakeHints& hints() { return hints_; }
  GroupedBlockStore& store() { return *store_; }
  Bytes block_bytes() const { return ThreeParts().block_bytes(); }
  FakeClock& clock() { return clock_; }
  void SetLive(const HeadMass* live) { live_ = live; }
  // Chains of parts, and from where on.
  std::vector<std::pair<BlockChain, int32_t>> TakeDemoted() { return std::exchange(demoted_, {}); }

  // Reserves and commits; returns how many blocks were written.
  size_t Put(const BlockChain& chain, uint64_t request = 0) {
    const ReserveAnswer answer = Reserve(chain, request);
    std::vector<WrittenBlock> written;
    for (size_t i = 0; i < answer.blocks.size(); ++i) {
      if (answer.blocks[i].result != ReservedBlock::Result::kReserved) continue;
      written.push_back(Write(chain.keys[i], answer.blocks[i].place));
    }
    const size_t count = written.size();
    if (count > 0) store_->Commit(std::move(written));
    Settle();
    return count;
  }

  ReserveAnswer Reserve(const BlockChain& chain, uint64_t request = 0) {
    store_->Reserve(StoreCallId(++calls_), request, chain);
    return std::get<ReserveAnswer>(Event());
  }

  WrittenBlock Write(const BlockKey& key, const StorePlace& place) const {
    const std::vector<std::byte> bytes = Content(key, block_bytes());
    std::copy(bytes.begin(), bytes.end(), place.memory);
    return {key, place, BlockChecksum(key, bytes)};
  }

  AcquireAnswer Get(const BlockChain& chain, uint64_t request, bool wait = false) {
    StoreQuery query;
    query.chain = chain;
    query.request = request;
    if (wait) query.wait = absl::Seconds(1);
    store_->Acquire(StoreCallId(++calls_), std::move(query));
    return std::get<AcquireAnswer>(Event());
  }

  void End(uint64_t request) {
    StoreRequestEnd end;
    end.request = request;
    store_->EndRequest(end);
    Settle();
  }

  // Does all that is to be done.
  std::vector<StoreEvent> Settle() {
    std::vector<StoreEvent> events;
    bool more = true;
    while (more) {
      inner_->AnswerAll();
      for (StoreEvent& event : store_->TakeEvents()) events.push_back(std::move(event));
      more = store_->CopyOne();
    }
    return events;
  }

 private:
  StoreEvent Event() {
    std::vector<StoreEvent> events = Settle();
    EXPECT_EQ(events.size(), 1u);
    return std::move(events.front());
  }

  FakeHints hints_;
  FakeClock clock_;
  const HeadMass* live_ = nullptr;
  std::vector<std::pair<BlockChain, int32_t>> demoted_;
  std::unique_ptr<FakeKvStore> inner_;
  std::unique_ptr<GroupedBlockStore> store_;
  uint64_t calls_ = 0;
};

// What was found is released; returns how many blocks there were.
inline size_t Check(Grouped& grouped, const BlockChain& chain, const AcquireAnswer& answer) {
  std::vector<StorePlace> places;
  EXPECT_LE(answer.blocks.size(), chain.keys.size());
  for (size_t i = 0; i < answer.blocks.size(); ++i) {
    const PinnedBlock& block = answer.blocks[i];
    const std::vector<std::byte> want = Content(chain.keys[i], grouped.block_bytes());
    EXPECT_TRUE(std::equal(want.begin(), want.end(), block.place.memory)) << "block " << i;
    EXPECT_EQ(block.checksum, BlockChecksum(chain.keys[i], want));
    places.push_back(block.place);
  }
  if (!places.empty()) grouped.store().Release(std::move(places));
  return answer.blocks.size();
}

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_BLOCKS_GROUPED_BLOCK_STORE_FIXTURE_H_
