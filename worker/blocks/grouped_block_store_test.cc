#include "worker/blocks/grouped_block_store.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <variant>
#include <vector>

#include "common/block_checksum.h"
#include "common/mutex.h"
#include "gtest/gtest.h"
#include "worker/blocks/common_lower.h"
#include "worker/blocks/grouped_block_store_fixture.h"
#include "worker/core/fake_kv_store.h"

namespace palimpsest {
namespace {

TEST(GroupedBlockStore, BlocksComeBackFromTheirParts) {
  Grouped grouped(Capacity(60), std::nullopt, 20);
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

TEST(GroupedBlockStore, AMissingPartIsAMissAndOneBelowIsAwaited) {
  Grouped grouped(Capacity(60), std::nullopt, 20);
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
  Grouped grouped(Capacity(60), std::nullopt, 20);
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
  Grouped small(Capacity(10), std::nullopt, 20);
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

  Grouped staged(Capacity(60), std::nullopt, 2);
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
  Grouped grouped(Capacity(10), std::nullopt, 2);
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
    FakeKvStore::Options options = Capacity(20 + static_cast<int32_t>(random() % 60));
    options.seed = seed;
    options.failing_percent = static_cast<int>(random() % 20);
    options.lying_percent = static_cast<int>(random() % 10);
    std::optional<int64_t> limit;
    if (random() % 3 != 0) limit = static_cast<int64_t>(random() % 20);
    Grouped grouped(options, limit, 2 + static_cast<int32_t>(random() % 10));
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
  Grouped grouped(Capacity(60), std::nullopt, 20);
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
