#include "worker/blocks/grouped_block_store.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <variant>
#include <vector>

#include "common/block_checksum.h"
#include "common/mutex.h"
#include "gtest/gtest.h"
#include "worker/blocks/common_lower.h"
#include "worker/core/block_keys.h"
#include "worker/core/conversation_hints.h"
#include "worker/core/fake_block_store.h"

namespace palimpsest {
namespace {

constexpr int32_t kBlockTokens = 4;
constexpr BlockKey kRoot{1, 2};

HeadParts ThreeParts() {
  return HeadParts::Create(
             {.layers = 3, .kv_heads = 2, .block_tokens = kBlockTokens, .row = Bytes(8)},
             {{5, 0}, {2, 4}, {1, 3}})
      .value();
}

// The bytes of a block are those that its key says.
std::vector<std::byte> Content(const BlockKey& key, Bytes size) {
  std::mt19937_64 random(key.low ^ key.high);
  std::vector<std::byte> bytes(static_cast<size_t>(size.count()));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

BlockChain Chain(uint64_t seed, size_t blocks) {
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

FakeBlockStore::Options Capacity(int32_t parts) {
  FakeBlockStore::Options options;
  options.capacity_blocks = parts;
  return options;
}

class Grouped {
 public:
  Grouped(FakeBlockStore::Options options, int32_t demoted, int32_t staging) {
    options.block_bytes = ThreeParts().part_bytes();
    options.block_tokens = kBlockTokens;
    inner_ = std::make_unique<FakeBlockStore>(options);
    store_ = std::make_unique<GroupedBlockStore>(
        GroupedBlockStore::Options{.demoted_groups = demoted, .staging_blocks = staging},
        ThreeParts(), inner_.get(), &hints_);
  }

  FakeBlockStore& inner() { return *inner_; }
  FakeHints& hints() { return hints_; }
  GroupedBlockStore& store() { return *store_; }
  Bytes block_bytes() const { return ThreeParts().block_bytes(); }

  // Reserves and commits; returns how many blocks were written.
  size_t Put(const BlockChain& chain) {
    const ReserveAnswer answer = Reserve(chain);
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

  ReserveAnswer Reserve(const BlockChain& chain) {
    store_->Reserve(StoreCallId(++calls_), 0, chain);
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
  std::unique_ptr<FakeBlockStore> inner_;
  std::unique_ptr<GroupedBlockStore> store_;
  uint64_t calls_ = 0;
};

// What was found is released; returns how many blocks there were.
size_t Check(Grouped& grouped, const BlockChain& chain, const AcquireAnswer& answer) {
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

TEST(GroupedBlockStore, BlocksComeBackFromTheirParts) {
  Grouped grouped(Capacity(60), 0, 20);
  const BlockChain chain = Chain(1, 8);
  EXPECT_EQ(grouped.Put(chain), 8u);
  EXPECT_EQ(grouped.inner().blocks(), 24u) << "three parts of each";
  EXPECT_EQ(grouped.Put(chain), 0u) << "present";
  EXPECT_EQ(Check(grouped, chain, grouped.Get(chain, 1)), 8u);
  EXPECT_EQ(Check(grouped, Chain(1, 5), grouped.Get(Chain(1, 5), 1)), 5u);
  grouped.End(1);
  EXPECT_EQ(grouped.inner().held(), 0u);
  EXPECT_EQ(grouped.inner().open_requests(), 0u);
  EXPECT_EQ(grouped.store().staged_blocks(), 0);
  EXPECT_EQ(grouped.store().counters().stored, 24);
  EXPECT_EQ(grouped.store().counters().loaded, 39);
}

TEST(GroupedBlockStore, EndsOfRequestsDemoteTheColdestGroups) {
  Grouped grouped(Capacity(60), 2, 20);
  const BlockChain chain = Chain(2, 3);
  grouped.Put(chain);
  Check(grouped, chain, grouped.Get(chain, 7));
  grouped.End(7);
  const std::vector<StoreRequestEnd>& ends = grouped.inner().ended_requests();
  ASSERT_EQ(ends.size(), 3u);
  for (size_t group = 0; group < ends.size(); ++group) {
    EXPECT_EQ(ends[group].request, 7 * 3 + group);
    ASSERT_EQ(ends[group].then.has_value(), group < 2);
    if (group >= 2) continue;
    EXPECT_EQ(ends[group].then->kind, CacheAction::Kind::kDemote);
  }
}

TEST(GroupedBlockStore, AMissingPartIsAMissAndOneBelowIsAwaited) {
  Grouped grouped(Capacity(60), 1, 20);
  const BlockChain chain = Chain(3, 6);
  grouped.Put(chain);
  // Whatever part of whatever block goes down, T1 has fewer blocks than before or as many.
  size_t last = 6;
  for (int round = 0; round < 30; ++round) {
    grouped.inner().DemoteOne();
    const AcquireAnswer answer = grouped.Get(chain, 1);
    const size_t found = Check(grouped, chain, answer);
    ASSERT_LE(found, last);
    last = found;
    int32_t lower = 0;
    for (const LowerBlocks& run : answer.lower) lower += run.blocks;
    ASSERT_EQ(found + static_cast<size_t>(lower), 6u) << "every block can be had";
  }
  ASSERT_LT(last, 6u);
  for (int round = 0; round < 60; ++round) {
    last = Check(grouped, chain, grouped.Get(chain, 1, /*wait=*/true));
  }
  EXPECT_EQ(last, 6u);
  grouped.inner().DropOne();
  const AcquireAnswer answer = grouped.Get(chain, 1);
  size_t reach = Check(grouped, chain, answer);
  for (const LowerBlocks& run : answer.lower) reach += static_cast<size_t>(run.blocks);
  EXPECT_LT(reach, 6u);
  grouped.End(1);
  EXPECT_EQ(grouped.inner().held(), 0u);
}

TEST(GroupedBlockStore, CorruptPartsEndThePrefix) {
  Grouped grouped(Capacity(60), 0, 20);
  const BlockChain chain = Chain(4, 4);
  grouped.Put(chain);
  grouped.inner().Corrupt();
  EXPECT_EQ(Check(grouped, chain, grouped.Get(chain, 1)), 0u);
  EXPECT_EQ(grouped.store().counters().corrupt, 1);
  grouped.End(1);
  EXPECT_EQ(grouped.inner().held(), 0u);
  EXPECT_EQ(grouped.store().staged_blocks(), 0);
}

TEST(GroupedBlockStore, RoomBoundsWhatIsStoredAndLoaded) {
  Grouped small(Capacity(10), 0, 20);
  const ReserveAnswer answer = small.Reserve(Chain(5, 6));
  ASSERT_FALSE(answer.blocks.empty());
  EXPECT_NE(answer.blocks.back().result, ReservedBlock::Result::kReserved) << "ten parts for six";
  std::vector<WrittenBlock> aborted;
  for (const ReservedBlock& block : answer.blocks) {
    if (block.result == ReservedBlock::Result::kReserved)
      aborted.push_back({BlockKey{}, block.place, 0});
  }
  if (!aborted.empty()) small.store().Abort(std::move(aborted));
  EXPECT_EQ(small.inner().held(), 0u) << "what one group got and another did not was given back";
  EXPECT_EQ(small.store().staged_blocks(), 0);

  Grouped staged(Capacity(60), 0, 2);
  EXPECT_EQ(staged.Put(Chain(6, 5)), 2u) << "as many as can be taken apart at once";
  EXPECT_EQ(staged.Put(Chain(6, 5)), 2u);
  EXPECT_EQ(staged.Put(Chain(6, 5)), 1u);
  EXPECT_EQ(Check(staged, Chain(6, 5), staged.Get(Chain(6, 5), 1)), 2u);
  EXPECT_EQ(staged.inner().held(), 0u);
}

TEST(LowerOfAll, BlocksAreAsSlowAsTheirSlowestParts) {
  AcquireAnswer a, b;
  a.blocks.resize(3);
  a.lower = {{4, 0.5}, {2, 2.0}};
  b.blocks.resize(1);
  b.lower = {{3, 1.0}, {9, 3.0}};
  const std::vector<LowerBlocks> lower = LowerOfAll({&a, &b}, 1);
  std::vector<std::pair<int32_t, double>> runs;
  for (const LowerBlocks& run : lower) runs.emplace_back(run.blocks, run.expected_seconds);
  EXPECT_EQ(runs,
            (std::vector<std::pair<int32_t, double>>{{2, 1.0}, {1, 1.0}, {3, 3.0}, {2, 3.0}}));
  b.lower.clear();
  EXPECT_TRUE(LowerOfAll({&a, &b}, 1).empty());
}

TEST(GroupedBlockStore, HintsReachAllParts) {
  Grouped grouped(Capacity(10), 0, 2);
  std::vector<absl::StatusOr<uint64_t>> answers;
  const auto done = [&](const absl::StatusOr<uint64_t>& blocks) { answers.push_back(blocks); };
  CacheAction action;
  action.kind = CacheAction::Kind::kPrefetch;
  grouped.store().Hint(9, action, done);
  EXPECT_EQ(grouped.hints().conversations, (std::vector<uint64_t>{27, 28, 29}));
  EXPECT_EQ(grouped.hints().kinds.back(), CacheAction::Kind::kPrefetch);
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].value(), 3u);
  grouped.hints().fails = true;
  grouped.store().Hint(9, action, done);
  ASSERT_EQ(answers.size(), 2u);
  EXPECT_EQ(answers[1].status().code(), absl::StatusCode::kNotFound);
}

// Random calls in any order, of which some fail, some lie and blocks come and go: what is found
// always has its bytes, and nothing is left behind.
TEST(GroupedBlockStoreProperty, NothingWrongIsFoundAndNothingLeaks) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    std::mt19937_64 random(seed);
    FakeBlockStore::Options options = Capacity(20 + static_cast<int32_t>(random() % 60));
    options.seed = seed;
    options.failing_percent = static_cast<int>(random() % 20);
    options.lying_percent = static_cast<int>(random() % 10);
    Grouped grouped(options, static_cast<int32_t>(random() % 3),
                    2 + static_cast<int32_t>(random() % 10));
    uint64_t calls = 0;
    std::map<uint64_t, BlockChain> waiting;       // by call
    std::map<uint64_t, uint64_t> request_of;      // Acquire
    std::vector<std::vector<StorePlace>> pinned;  // to be released
    std::vector<std::pair<std::vector<WrittenBlock>, bool>> written;
    std::map<uint64_t, int> open;  // requests: calls that wait
    const auto take = [&] {
      for (StoreEvent& event : grouped.store().TakeEvents()) {
        if (auto* reserve = std::get_if<ReserveAnswer>(&event)) {
          const BlockChain& chain = waiting.at(reserve->call.value());
          std::vector<WrittenBlock> blocks;
          for (size_t i = 0; i < reserve->blocks.size(); ++i) {
            if (reserve->blocks[i].result != ReservedBlock::Result::kReserved) continue;
            blocks.push_back(grouped.Write(chain.keys[i], reserve->blocks[i].place));
          }
          if (!blocks.empty()) written.emplace_back(std::move(blocks), random() % 4 != 0);
        } else if (auto* acquire = std::get_if<AcquireAnswer>(&event)) {
          const BlockChain& chain = waiting.at(acquire->call.value());
          std::vector<StorePlace> places;
          for (size_t i = 0; i < acquire->blocks.size(); ++i) {
            const auto want = Content(chain.keys.at(i), grouped.block_bytes());
            ASSERT_TRUE(std::equal(want.begin(), want.end(), acquire->blocks[i].place.memory));
            places.push_back(acquire->blocks[i].place);
          }
          if (!places.empty()) pinned.push_back(std::move(places));
          --open[request_of.at(acquire->call.value())];
        }
      }
    };
    const auto give_back = [&](bool all) {
      while (!pinned.empty() && (all || random() % 2 == 0)) {
        grouped.store().Release(std::move(pinned.back()));
        pinned.pop_back();
      }
      while (!written.empty() && (all || random() % 2 == 0)) {
        auto [blocks, commit] = std::move(written.back());
        written.pop_back();
        if (commit) {
          grouped.store().Commit(std::move(blocks));
        } else {
          grouped.store().Abort(std::move(blocks));
        }
      }
    };
    for (int step = 0; step < 300; ++step) {
      const BlockChain chain = Chain(random() % 3, 1 + random() % 8);
      switch (random() % 9) {
        case 0:
          grouped.store().Reserve(StoreCallId(++calls), 0, chain);
          waiting[calls] = chain;
          break;
        case 1:
        case 2: {
          const uint64_t request = 1 + random() % 5;
          StoreQuery query;
          query.chain = chain;
          query.request = request;
          if (random() % 3 == 0) query.wait = absl::Milliseconds(5);
          grouped.store().Acquire(StoreCallId(++calls), std::move(query));
          waiting[calls] = chain;
          request_of[calls] = request;
          ++open[request];
          break;
        }
        case 3:
          grouped.inner().AnswerOne();
          break;
        case 4:
          grouped.store().CopyOne();
          break;
        case 5:
          random() % 2 == 0 ? grouped.inner().DropOne() : grouped.inner().DemoteOne();
          break;
        case 6:
          if (random() % 20 == 0) grouped.inner().Lose();
          if (random() % 20 == 0) grouped.inner().Corrupt();
          break;
        case 7:
          give_back(false);
          break;
        default:
          take();
      }
    }
    for (int i = 0; i < 4; ++i) {
      grouped.inner().AnswerAll();
      take();
      while (grouped.store().CopyOne()) take();
      take();
      give_back(true);
    }
    for (const auto& [request, calls_left] : open) {
      ASSERT_EQ(calls_left, 0);
      grouped.End(request);
    }
    ASSERT_EQ(grouped.inner().held(), 0u) << "seed " << seed;
    ASSERT_EQ(grouped.inner().open_requests(), 0u);
    ASSERT_EQ(grouped.store().staged_blocks(), 0);
  }
}

TEST(GroupedBlockStore, ItsThreadCopiesAndWakes) {
  Grouped grouped(Capacity(60), 0, 20);
  Mutex mutex;
  CondVar changed;
  int wakeups = 0;
  grouped.store().SetWakeup([&] {
    MutexLock lock(&mutex);
    ++wakeups;
    changed.SignalAll();
  });
  const BlockChain chain = Chain(8, 4);
  const ReserveAnswer answer = grouped.Reserve(chain);
  std::vector<WrittenBlock> written;
  for (size_t i = 0; i < answer.blocks.size(); ++i) {
    written.push_back(grouped.Write(chain.keys[i], answer.blocks[i].place));
  }
  grouped.store().Start();
  grouped.store().Commit(std::move(written));
  {
    MutexLock lock(&mutex);
    while (wakeups == 0) ASSERT_FALSE(changed.WaitWithTimeout(&mutex, absl::Seconds(30)));
  }
  EXPECT_TRUE(grouped.store().TakeEvents().empty());
  grouped.store().Stop();
  grouped.store().SetWakeup(nullptr);
  EXPECT_EQ(grouped.inner().held(), 0u);
  EXPECT_EQ(grouped.inner().blocks(), 12u);
}

}  // namespace
}  // namespace palimpsest
