// The predictive policy in a cache: the order of its victims against brute force, what it learns,
// and that it forgets.
#include "broker/core/reuse/predictive_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "broker/core/cache/block_cache.h"

namespace palimpsest::reuse {
namespace {

using cache::BlockCache;
using cache::BlockCacheOptions;
using cache::BlockHandle;
using cache::Ending;
using cache::RequestId;

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

// Passes everything on and checks each victim: evictable, and worth no more than any that is.
class Audited : public cache::EvictionPolicy {
 public:
  explicit Audited(const HazardModelOptions& options) : policy_(options) {}

  PredictivePolicy& policy() { return policy_; }
  int audits() const { return audits_; }
  int refusals() const { return refusals_; }

  absl::string_view name() const override { return policy_.name(); }
  void OnRequest(const cache::RequestInfo& request, const cache::Access& access) override {
    policy_.OnRequest(request, access);
  }
  void OnExtend(RequestId request, BlockHandle block) override { policy_.OnExtend(request, block); }
  void OnInsert(RequestId request, BlockHandle block, BlockHandle parent) override {
    policy_.OnInsert(request, block, parent);
  }
  void OnEvictable(BlockHandle block) override {
    evictable_.insert(block);
    policy_.OnEvictable(block);
  }
  void OnPinned(BlockHandle block) override {
    evictable_.erase(block);
    policy_.OnPinned(block);
  }
  void OnEvict(BlockHandle block) override {
    evictable_.erase(block);
    policy_.OnEvict(block);
  }
  void OnRequestEnd(const cache::RequestEnd& end) override { policy_.OnRequestEnd(end); }
  void OnForget(BlockHandle block) override { policy_.OnForget(block); }
  std::optional<BlockHandle> ChooseVictim(absl::Time now, BlockHandle block,
                                          bool may_refuse) override {
    policy_.ChooseVictim(now, block, may_refuse);  // as of now
    float least = std::numeric_limits<float>::infinity();
    for (const BlockHandle other : evictable_) {
      EXPECT_TRUE(policy_.IsEvictable(other));
      least = std::min(least, policy_.WorthOf(other));
    }
    const auto victim = policy_.ChooseVictim(now, block, may_refuse);
    EXPECT_EQ(victim, policy_.ChooseVictim(now, block, may_refuse)) << "asked again";
    if (victim.has_value()) {
      EXPECT_TRUE(evictable_.contains(*victim));
      EXPECT_EQ(policy_.WorthOf(*victim), least);
      EXPECT_EQ(policy_.OutlookOf(now, *victim)->hits_per_second, least);
      ++audits_;
    } else if (!evictable_.empty()) {
      EXPECT_TRUE(may_refuse);
      EXPECT_LT(policy_.WorthOf(block), least);
      ++refusals_;
    }
    return victim;
  }

 private:
  PredictivePolicy policy_;
  std::set<BlockHandle> evictable_;
  int audits_ = 0;
  int refusals_ = 0;
};

// Random conversations that go on, branch, overlap, grow while they run, and end in all ways.
class Fuzzer {
 public:
  Fuzzer(const BlockCacheOptions& options, const HazardModelOptions& model, uint32_t seed)
      : random_(seed) {
    auto policy = std::make_unique<Audited>(model);
    audited_ = policy.get();
    cache_ = std::make_unique<BlockCache>(options, std::move(policy));
  }

  void Run(int steps) {
    for (int i = 0; i < steps; ++i) {
      now_ += random_() % 30 == 0 ? 300 : static_cast<double>(random_() % 50) / 10;
      const auto choice = random_() % 4;
      if (choice <= 1 || running_.empty()) {
        Begin();
      } else if (choice == 2) {
        auto& [id, path] = running_[random_() % running_.size()];
        path.push_back(Next(path));
        cache_->Extend(id, At(now_), path.back());
      } else {
        End(random_() % running_.size());
      }
      if (running_.size() > 4) End(0);
      ASSERT_LE(audited_->policy().segments(),
                cache_->known() + running_.size() + PredictivePolicy::kMostPending);
      ASSERT_LE(cache_->cached(), cache_->capacity());
    }
    while (!running_.empty()) End(0);
  }

  Audited& audited() { return *audited_; }
  BlockCache& cache() { return *cache_; }
  size_t hits() const { return hits_; }
  // Extensions by blocks that another path had.
  int shared() const { return shared_; }

 private:
  // What another path has behind this one, if any has and the dice are for it; else something new.
  BlockKey Next(const std::vector<BlockKey>& path) {
    if (random_() % 3 > 0) {
      for (const auto& [id, other] : running_) {
        if (other.size() > path.size() && std::equal(path.begin(), path.end(), other.begin())) {
          ++shared_;
          return other[path.size()];
        }
      }
      for (const std::vector<BlockKey>& other : ended_) {
        if (other.size() > path.size() && std::equal(path.begin(), path.end(), other.begin())) {
          ++shared_;
          return other[path.size()];
        }
      }
    }
    return {1, next_key_++};
  }

  void Begin() {
    std::vector<BlockKey> path;
    bool grows = true;
    if (!running_.empty() && random_() % 3 == 0) {
      // The same prompt at once, or the beginning of it.
      path = running_[random_() % running_.size()].second;
      if (random_() % 2 == 0) path.resize(1 + random_() % path.size());
      grows = random_() % 4 == 0;
    } else if (!ended_.empty() && random_() % 3 > 0) {
      path = ended_[ended_.size() - 1 - random_() % std::min<size_t>(ended_.size(), 12)];
      if (random_() % 3 == 0) path.resize(1 + random_() % path.size());
    }
    for (size_t more = 1 + random_() % 9; grows && more > 0; --more) {
      path.push_back({1, next_key_++});
    }
    const RequestId id(++requests_);
    const std::vector<cache::BlockType> types(random_() % 5,
                                              static_cast<cache::BlockType>(random_() % 5));
    hits_ += cache_
                 ->Begin({.id = id,
                          .arrival = At(now_),
                          .conversation = cache::ConversationId(random_() % 3),
                          .types = types},
                         path)
                 .cached;
    running_.emplace_back(id, std::move(path));
  }

  void End(size_t which) {
    auto [id, path] = running_[which];
    running_.erase(running_.begin() + static_cast<ptrdiff_t>(which));
    cache_->End({.id = id,
                 .time = At(now_),
                 .how = static_cast<Ending>(random_() % 3),
                 .output_tokens = static_cast<int64_t>(random_() % 1000),
                 .expected_idle = random_() % 4 == 0 ? std::optional(absl::Seconds(random_() % 100))
                                                     : std::nullopt,
                 .last_turn = random_() % 5 == 0});
    ended_.push_back(std::move(path));
  }

  std::mt19937 random_;
  Audited* audited_ = nullptr;
  std::unique_ptr<BlockCache> cache_;
  std::vector<std::pair<RequestId, std::vector<BlockKey>>> running_;
  std::vector<std::vector<BlockKey>> ended_;
  uint64_t next_key_ = 1;
  uint64_t requests_ = 0;
  double now_ = 0;
  size_t hits_ = 0;
  int shared_ = 0;
};

TEST(PredictivePolicyProperty, VictimsAreTheLeastWorthOfAllEvictableBlocks) {
  uint32_t seed = 0;
  for (const bool may_refuse : {false, true}) {
    for (const bool at_end : {false, true}) {
      for (const size_t history : {20, 400}) {
        for (const HazardModelOptions model :
             {HazardModelOptions{}, HazardModelOptions{.pairs = true, .features = false}}) {
          Fuzzer fuzzer({.capacity = 60,
                         .history = history,
                         .may_refuse = may_refuse,
                         .store_at_end = at_end},
                        model, ++seed);
          fuzzer.Run(1500);
          EXPECT_GT(fuzzer.audited().audits(), 500);
          EXPECT_GT(fuzzer.shared(), 20);
          if (may_refuse && model.features) {
            EXPECT_GT(fuzzer.audited().refusals(), 10);
          }
        }
      }
    }
  }
}

TEST(PredictivePolicyProperty, IsDeterministic) {
  const BlockCacheOptions options{.capacity = 50, .history = 200, .may_refuse = true};
  Fuzzer a(options, {}, 77);
  Fuzzer b(options, {}, 77);
  a.Run(2000);
  b.Run(2000);
  EXPECT_EQ(a.hits(), b.hits());
  EXPECT_EQ(a.audited().policy().calibration().bins(), b.audited().policy().calibration().bins());
}

// Two requests compute the same blocks at once; one of them is stored for the first alone.
TEST(PredictivePolicy, ABlockBehindOneOfAnotherPathStaysThere) {
  const BlockKey shared{0, 1}, third{0, 2}, fourth{0, 3}, other{0, 4};
  for (const bool runs : {true, false}) {
    BlockCache cache({.capacity = 3, .history = 10, .may_refuse = false},
                     std::make_unique<PredictivePolicy>());
    const RequestId first(1), second(2), third_one(3);
    cache.Begin({.id = first, .arrival = At(1)}, std::vector<BlockKey>{shared});
    cache.Begin({.id = second, .arrival = At(2)}, std::vector<BlockKey>{shared});
    cache.Extend(first, At(3), third);
    cache.Begin({.id = third_one, .arrival = At(4)}, std::vector<BlockKey>{other});
    cache.Extend(first, At(5), fourth);  // known, but there is no room for it
    cache.End({.id = third_one, .time = At(6)});
    if (!runs) cache.End({.id = first, .time = At(7)});
    cache.Extend(second, At(8), third);
    cache.Extend(second, At(9), fourth);
    if (runs) cache.End({.id = first, .time = At(10)});
    cache.End({.id = second, .time = At(11)});
    EXPECT_TRUE(cache.IsCached(fourth));
    EXPECT_FALSE(cache.IsCached(other));
    // All of it may go, from the end.
    const std::vector<BlockKey> next = {{1, 1}, {1, 2}, {1, 3}};
    cache.Begin({.id = RequestId(4), .arrival = At(20)}, next);
    EXPECT_EQ(cache.cached(), 3u);
    EXPECT_TRUE(cache.IsCached({1, 3}));
  }
}

TEST(PredictivePolicy, WorksOnBlocksAlone) {
  BlockCache cache({.capacity = 3, .discipline = cache::Discipline::kPlain, .may_refuse = true},
                   std::make_unique<PredictivePolicy>());
  for (uint64_t i = 1; i <= 200; ++i) {
    const std::vector<BlockKey> path = {{0, i % 5}, {0, i % 7 + 10}, {0, i % 3 + 20}};
    cache.Begin({.id = RequestId(i), .arrival = At(static_cast<double>(i))}, path);
    cache.End({.id = RequestId(i), .time = At(static_cast<double>(i))});
  }
  EXPECT_EQ(cache.cached(), 3);
}

class LearningTest : public testing::Test {
 protected:
  explicit LearningTest(size_t most_watched = PredictivePolicy::kMostWatched) {
    auto policy = std::make_unique<PredictivePolicy>(HazardModelOptions{}, most_watched);
    policy_ = policy.get();
    cache_ = std::make_unique<BlockCache>(BlockCacheOptions{.capacity = 100, .history = 1000},
                                          std::move(policy));
  }

  static std::vector<BlockKey> Path(uint64_t conversation, size_t blocks) {
    std::vector<BlockKey> path;
    for (size_t i = 0; i < blocks; ++i) path.push_back({conversation, i});
    return path;
  }
  size_t Run(double time, uint64_t conversation, size_t blocks, cache::RequestEnd end) {
    const RequestId id(++requests_);
    const size_t cached =
        cache_->Begin({.id = id, .arrival = At(time)}, Path(conversation, blocks)).cached;
    end.id = id;
    end.time = At(time);
    cache_->End(end);
    return cached;
  }
  // Rounds in which a conversation is continued a minute after its tool call and others are not;
  // hits of the last continuation.
  size_t HitsAfterToolCalls(int rounds) {
    double now = 0;
    uint64_t next = 1;
    for (int round = 0; round < rounds; ++round, now += 100) {
      const uint64_t tool = next++;
      Run(now, tool, 10, {.how = Ending::kToolCall});
      for (int i = 1; i <= 4; ++i) Run(now + i, next++, 10, {.how = Ending::kEndOfTurn});
      Run(now + 60, tool, 20, {.how = Ending::kEndOfTurn});
    }
    const uint64_t tool = next++;
    Run(now, tool, 10, {.how = Ending::kToolCall});
    for (int i = 1; i <= 30; ++i) Run(now + i, next++, 10, {.how = Ending::kEndOfTurn});
    return Run(now + 60, tool, 20, {.how = Ending::kEndOfTurn});
  }
  size_t Cached(uint64_t conversation, size_t blocks) const {
    size_t cached = 0;
    for (const BlockKey key : Path(conversation, blocks)) cached += cache_->IsCached(key) ? 1 : 0;
    return cached;
  }

  std::unique_ptr<BlockCache> cache_;
  PredictivePolicy* policy_ = nullptr;
  uint64_t requests_ = 0;
};

// Conversations that a tool answers after a minute, and others that nobody continues.
TEST_F(LearningTest, KeepsWhatReturnsRatherThanWhatWasUsedLast) {
  EXPECT_GE(HitsAfterToolCalls(60), 9U) << "300 blocks of others came since into a cache of 100";
  EXPECT_LT(policy_->calibration().Brier(), policy_->calibration().BrierOfMean());
}

class FewWatchedTest : public LearningTest {
 protected:
  FewWatchedTest() : LearningTest(8) {}
};

TEST_F(FewWatchedTest, LearnsFromAPartOfTheSegments) {
  EXPECT_GE(HitsAfterToolCalls(200), 9U);
  EXPECT_LT(policy_->calibration().votes(), 20'000) << "all segments together vote 140,000 times";
  EXPECT_GT(policy_->calibration().votes(), 5'000);
}

TEST_F(LearningTest, ATurnThatTheClientCallsTheLastGoesFirstOnceThatProvedTrue) {
  double now = 0;
  uint64_t next = 1;
  for (int round = 0; round < 100; ++round, now += 100) {
    Run(now, next, 10, {.how = Ending::kEndOfTurn});
    Run(now + 1, next + 1, 10, {.how = Ending::kEndOfTurn, .last_turn = true});
    Run(now + 30, next, 11, {.how = Ending::kEndOfTurn, .last_turn = true});
    next += 2;
  }
  const uint64_t returns = next++;
  Run(now, returns, 10, {.how = Ending::kEndOfTurn});
  for (int i = 1; i <= 20; ++i) {
    Run(now + i, next++, 10, {.how = Ending::kEndOfTurn, .last_turn = true});
  }
  EXPECT_GE(Cached(returns, 10), 9U);
}

TEST_F(LearningTest, SegmentsGoWithTheirBlocks) {
  for (uint64_t i = 1; i <= 500; ++i) Run(static_cast<double>(i), i % 60, 3 + i % 5, {});
  EXPECT_GT(policy_->segments(), 40U);
  for (uint64_t i = 1; i <= 300; ++i) Run(20000 + static_cast<double>(i), 1000 + i, 10, {});
  Run(90000, 5000, 1, {});
  EXPECT_LE(policy_->segments(), cache_->known());
  EXPECT_LE(policy_->model().classes(), 200U);
}

}  // namespace
}  // namespace palimpsest::reuse
