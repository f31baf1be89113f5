// The fallback policies: each against a plain reading of its paper, and what each is for.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "broker/core/cache/block_cache.h"
#include "broker/core/cache/naive_policies.h"
#include "broker/core/cache/queue_policies.h"
#include "broker/core/cache/score_policies.h"

namespace palimpsest::cache {
namespace {

struct Candidate {
  std::string name;
  std::function<std::unique_ptr<EvictionPolicy>(size_t capacity)> real, naive;
};

template <typename Policy, typename... Arguments>
std::unique_ptr<EvictionPolicy> Make(Arguments... arguments) {
  return std::make_unique<Policy>(arguments...);
}

const std::vector<Candidate>& Candidates() {
  static const auto* candidates = new std::vector<Candidate>{
      {"lru", [](size_t) { return Make<LruPolicy>(); },
       [](size_t) { return Make<NaiveScores>(false, false); }},
      {"lfu", [](size_t) { return Make<LfuPolicy>(); },
       [](size_t) { return Make<NaiveScores>(true, false); }},
      {"gdsf", [](size_t) { return Make<GdsfPolicy>(); },
       [](size_t) { return Make<NaiveScores>(true, true); }},
      {"arc", [](size_t c) { return Make<ArcPolicy>(c); },
       [](size_t c) { return Make<NaiveArc>(c); }},
      {"s3fifo", [](size_t c) { return Make<S3FifoPolicy>(c); },
       [](size_t c) { return Make<NaiveS3Fifo>(c); }},
      {"tinylfu", [](size_t c) { return Make<TinyLfuPolicy>(c); },
       [](size_t c) { return Make<NaiveTinyLfu>(c); }},
  };
  return *candidates;
}

// Tells two policies the same and asks that they name the same victims.
class Twins : public EvictionPolicy {
 public:
  Twins(std::unique_ptr<EvictionPolicy> a, std::unique_ptr<EvictionPolicy> b)
      : a_(std::move(a)), b_(std::move(b)) {}

  absl::string_view name() const override { return a_->name(); }
  void OnRequest(const RequestInfo& request, const Access& access) override {
    Both([&](EvictionPolicy& policy) { policy.OnRequest(request, access); });
  }
  void OnInsert(RequestId request, BlockHandle block, BlockHandle parent) override {
    Both([&](EvictionPolicy& policy) { policy.OnInsert(request, block, parent); });
  }
  void OnEvictable(BlockHandle block) override {
    Both([&](EvictionPolicy& policy) { policy.OnEvictable(block); });
  }
  void OnPinned(BlockHandle block) override {
    Both([&](EvictionPolicy& policy) { policy.OnPinned(block); });
  }
  std::optional<BlockHandle> ChooseVictim(absl::Time now, BlockHandle block,
                                          bool may_refuse) override {
    const auto victim = a_->ChooseVictim(now, block, may_refuse);
    EXPECT_EQ(victim, b_->ChooseVictim(now, block, may_refuse));
    EXPECT_EQ(victim, a_->ChooseVictim(now, block, may_refuse)) << "asked again";
    ++asked_;
    return victim;
  }
  void OnEvict(BlockHandle block) override {
    Both([&](EvictionPolicy& policy) { policy.OnEvict(block); });
  }
  void OnRequestEnd(const RequestEnd& end) override {
    Both([&](EvictionPolicy& policy) { policy.OnRequestEnd(end); });
  }
  void OnForget(BlockHandle block) override {
    ++forgotten_;
    Both([&](EvictionPolicy& policy) { policy.OnForget(block); });
  }

  int asked() const { return asked_; }
  int forgotten() const { return forgotten_; }

 private:
  void Both(const std::function<void(EvictionPolicy&)>& tell) {
    tell(*a_);
    tell(*b_);
  }

  std::unique_ptr<EvictionPolicy> a_, b_;
  int asked_ = 0;
  int forgotten_ = 0;
};

// Paths of a random tree: a prefix of some earlier path and a few new or old blocks behind it.
class RandomPaths {
 public:
  explicit RandomPaths(uint32_t seed) : random_(seed) {}

  std::vector<BlockKey> Next() {
    std::vector<BlockKey> path;
    if (!paths_.empty() && Below(4) > 0) {
      // Recent ones more often.
      const size_t back = std::min(Below(paths_.size()), Below(paths_.size()));
      path = paths_[paths_.size() - 1 - back];
      path.resize(1 + Below(path.size()));
    }
    for (size_t more = Below(6) + (path.empty() ? 1 : 0); more > 0; --more) {
      path.push_back({0, ++keys_});
    }
    paths_.push_back(path);
    return path;
  }

  BlockKey NewKey() { return {0, ++keys_}; }
  size_t Below(size_t bound) {
    return std::uniform_int_distribution<size_t>(0, bound - 1)(random_);
  }

 private:
  std::mt19937 random_;
  std::vector<std::vector<BlockKey>> paths_;
  uint64_t keys_ = 0;
};

class PolicyProperty : public testing::TestWithParam<Candidate> {};

TEST_P(PolicyProperty, VictimsAreThoseOfAPlainSearchOfBlocksAlone) {
  for (const size_t capacity : {1, 2, 7, 100}) {
    auto twins = std::make_unique<Twins>(GetParam().real(capacity), GetParam().naive(capacity));
    const Twins& asked = *twins;
    BlockCache cache({.capacity = capacity, .discipline = Discipline::kPlain}, std::move(twins));
    RandomPaths paths(static_cast<uint32_t>(capacity));
    for (uint64_t id = 1; id <= 400; ++id) {
      cache.Begin({.id = RequestId(id)}, paths.Next());
      cache.End({.id = RequestId(id)});
      ASSERT_FALSE(HasFailure()) << "capacity " << capacity << ", request " << id;
    }
    EXPECT_GT(asked.asked(), 300);
  }
}

// Requests that overlap, grow, and hold what they use; a history that is too short.
TEST_P(PolicyProperty, VictimsAreThoseOfAPlainSearchOfLeaves) {
  for (const size_t capacity : {1, 7, 100}) {
    auto twins = std::make_unique<Twins>(GetParam().real(capacity), GetParam().naive(capacity));
    const Twins& asked = *twins;
    BlockCache cache({.capacity = capacity, .history = capacity / 2}, std::move(twins));
    RandomPaths paths(static_cast<uint32_t>(capacity));
    std::vector<RequestId> running;
    uint64_t id = 0;
    for (int step = 0; step < 2000; ++step) {
      const size_t action = paths.Below(4);
      if (action == 0 || running.empty()) {
        running.push_back(RequestId(++id));
        cache.Begin({.id = running.back()}, paths.Next());
      } else if (action == 1) {
        cache.Extend(running[paths.Below(running.size())], absl::UnixEpoch(), paths.NewKey());
      } else if (running.size() > 3 || action == 2) {
        const auto ended = running.begin() + static_cast<ptrdiff_t>(paths.Below(running.size()));
        cache.End({.id = *ended});
        running.erase(ended);
      }
      ASSERT_FALSE(HasFailure()) << "capacity " << capacity << ", step " << step;
      ASSERT_LE(cache.cached(), capacity);
      ASSERT_LE(cache.known(), capacity + capacity / 2);
    }
    EXPECT_GT(asked.asked(), 300);
    EXPECT_GT(asked.forgotten(), 100);
  }
}

INSTANTIATE_TEST_SUITE_P(Fallbacks, PolicyProperty, testing::ValuesIn(Candidates()),
                         [](const auto& info) { return info.param.name; });

// A cache of single blocks, as the policies' papers have it.
class SingleBlocks {
 public:
  SingleBlocks(size_t capacity, std::unique_ptr<EvictionPolicy> policy)
      : cache_({.capacity = capacity, .discipline = Discipline::kPlain}, std::move(policy)) {}

  // Whether each was cached.
  std::vector<bool> Use(const std::vector<uint64_t>& keys) {
    std::vector<bool> hits;
    for (const uint64_t key : keys) {
      const RequestId id(++requests_);
      hits.push_back(cache_.Begin({.id = id}, {BlockKey{0, key}}).cached == 1);
      cache_.End({.id = id});
    }
    return hits;
  }

  bool Has(uint64_t key) const { return cache_.IsCached({0, key}); }

 private:
  BlockCache cache_;
  uint64_t requests_ = 0;
};

TEST(LruPolicy, TheOneUsedLongestAgoGoes) {
  SingleBlocks cache(3, std::make_unique<LruPolicy>());
  cache.Use({1, 2, 3, 1, 4});
  EXPECT_TRUE(cache.Has(1));
  EXPECT_FALSE(cache.Has(2));
}

TEST(LfuPolicy, CountsStartAnewWithEachStay) {
  SingleBlocks cache(2, std::make_unique<LfuPolicy>());
  cache.Use({1, 1, 2, 3});
  EXPECT_TRUE(cache.Has(1));
  EXPECT_FALSE(cache.Has(2));
  cache.Use({3, 3, 4});  // 3 has three uses, 1 two
  EXPECT_FALSE(cache.Has(1));
  cache.Use({1, 4});  // each once or twice; 3 stays
  EXPECT_TRUE(cache.Has(3));
}

TEST(GdsfPolicy, OldFrequencyFades) {
  SingleBlocks lfu(2, std::make_unique<LfuPolicy>()), gdsf(2, std::make_unique<GdsfPolicy>());
  const std::vector<uint64_t> uses = {1, 1, 1, 1, 2, 3, 4, 5, 6, 7};
  lfu.Use(uses);
  gdsf.Use(uses);
  EXPECT_TRUE(lfu.Has(1));
  EXPECT_FALSE(gdsf.Has(1)) << "each victim raises the score of those that come after it";
}

std::vector<uint64_t> Range(uint64_t first, uint64_t last) {
  std::vector<uint64_t> keys;
  for (uint64_t key = first; key <= last; ++key) keys.push_back(key);
  return keys;
}

TEST(ArcPolicy, AScanLeavesWhatWasUsedTwice) {
  SingleBlocks cache(10, std::make_unique<ArcPolicy>(10));
  cache.Use({1, 2, 3, 1, 2, 3});
  cache.Use(Range(100, 200));
  EXPECT_TRUE(cache.Has(1) && cache.Has(2) && cache.Has(3));
}

TEST(ArcPolicy, HitsAmongTheEvictedMoveTheTarget) {
  SingleBlocks cache(4, std::make_unique<ArcPolicy>(4));
  cache.Use({1, 1, 2, 2, 3, 4, 5});  // T1 {4, 5}, B1 {3}
  EXPECT_FALSE(cache.Has(3));
  cache.Use({3});  // target 1: from T1, as it has two
  EXPECT_TRUE(cache.Has(5));
  EXPECT_FALSE(cache.Has(4));
  cache.Use({4});  // target 2: T1 has one block alone, so 1 goes, the oldest of T2
  EXPECT_TRUE(cache.Has(5));
  EXPECT_FALSE(cache.Has(1));
}

TEST(S3FifoPolicy, WhatIsNotUsedAgainLeavesTheSmallQueueAndIsKnownWhenItReturns) {
  SingleBlocks cache(20, std::make_unique<S3FifoPolicy>(20));
  cache.Use(Range(1, 20));
  cache.Use({2, 2, 3, 21, 22});  // 1 goes; 2 moves to the main queue, 3 was used again only once
  EXPECT_FALSE(cache.Has(1));
  EXPECT_TRUE(cache.Has(2));
  EXPECT_FALSE(cache.Has(3));
  cache.Use({1});  // from the ghosts into the main queue
  cache.Use(Range(30, 60));
  EXPECT_TRUE(cache.Has(1) && cache.Has(2));
}

TEST(TinyLfuPolicy, NewBlocksDoNotDisplaceFrequentOnes) {
  SingleBlocks cache(100, std::make_unique<TinyLfuPolicy>(100));
  cache.Use(Range(1, 100));
  cache.Use(Range(1, 100));
  cache.Use(Range(1000, 1200));
  size_t left = 0;
  for (uint64_t key = 1; key <= 100; ++key) left += cache.Has(key) ? 1 : 0;
  EXPECT_EQ(left, 99) << "all but the one whose place the window has";
}

TEST(TinyLfuPolicy, CountsAreHalvedSoThatOldOnesFade) {
  SingleBlocks cache(10, std::make_unique<TinyLfuPolicy>(10));
  for (int round = 0; round < 3; ++round) cache.Use(Range(1, 10));
  for (int round = 0; round < 40; ++round) cache.Use(Range(100, 108));
  for (uint64_t key = 101; key <= 108; ++key) EXPECT_TRUE(cache.Has(key)) << key;
}

}  // namespace
}  // namespace palimpsest::cache
