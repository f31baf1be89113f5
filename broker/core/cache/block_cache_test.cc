#include "broker/core/cache/block_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "broker/core/cache/indexed_heap.h"
#include "broker/core/cache/score_policies.h"

namespace palimpsest::cache {
namespace {

std::vector<BlockKey> Path(const std::string& letters) {
  std::vector<BlockKey> path;
  for (const char letter : letters) path.push_back({0, static_cast<uint64_t>(letter)});
  return path;
}

class BlockCacheTest : public testing::Test {
 protected:
  explicit BlockCacheTest(size_t capacity = 4)
      : cache_({.capacity = capacity, .history = 100}, std::make_unique<LruPolicy>()) {}

  RequestId Begin(const std::string& letters) {
    const RequestId id(++requests_);
    outcome_ = cache_.Begin({.id = id}, Path(letters));
    return id;
  }
  BlockCache::Outcome Run(const std::string& letters) {
    cache_.End({.id = Begin(letters)});
    return outcome_;
  }
  // The cached ones among these.
  std::string Cached(const std::string& letters) const {
    std::string cached;
    for (const char letter : letters) {
      if (cache_.IsCached(Path({letter})[0])) cached += letter;
    }
    return cached;
  }

  BlockCache cache_;
  BlockCache::Outcome outcome_;
  uint64_t requests_ = 0;
};

class StoreAtEndTest : public testing::Test {
 protected:
  void Make(size_t capacity, size_t history) {
    cache_ = std::make_unique<BlockCache>(
        BlockCacheOptions{.capacity = capacity, .history = history, .store_at_end = true},
        std::make_unique<LruPolicy>());
  }
  RequestId Begin(const std::string& letters) {
    const RequestId id(++requests_);
    cached_ = cache_->Begin({.id = id}, Path(letters)).cached;
    return id;
  }

  std::unique_ptr<BlockCache> cache_;
  size_t cached_ = 0;
  uint64_t requests_ = 0;
};

TEST_F(StoreAtEndTest, StoresWithWhatWasComputedMeanwhile) {
  Make(10, 10);
  const RequestId request = Begin("ab");
  EXPECT_EQ(cache_->Extend(request, absl::InfinitePast(), Path("c")[0]).stored, 0);
  EXPECT_EQ(cache_->cached(), 0);
  EXPECT_EQ(cache_->End({.id = request}).stored, 3);
  const RequestId next = Begin("abcd");
  EXPECT_EQ(cached_, 3);
  EXPECT_EQ(cache_->End({.id = next}).stored, 1);
}

TEST_F(StoreAtEndTest, WhatAnotherStoredMeanwhileIsNotStoredTwice) {
  Make(10, 10);
  const RequestId a = Begin("abc");
  const RequestId b = Begin("abd");
  EXPECT_EQ(cache_->End({.id = a}).stored, 3);
  EXPECT_EQ(cache_->End({.id = b}).stored, 1);
  EXPECT_EQ(cache_->cached(), 4);
}

TEST_F(StoreAtEndTest, WhatWasForgottenMeanwhileIsNotStoredNorWhatFollowsIt) {
  Make(10, 3);
  const RequestId a = Begin("abc");
  const RequestId b = Begin("xy");
  cache_->Extend(a, absl::InfinitePast(), Path("d")[0]);
  EXPECT_EQ(cache_->End({.id = a}).stored, 1) << "a; b and c made room for x and y";
  EXPECT_EQ(cache_->End({.id = b}).stored, 2);
  Begin("abcd");
  EXPECT_EQ(cached_, 1);
}

// A tier that is given what another one evicts.
class AdmitTest : public testing::Test {
 protected:
  void Run(const std::string& letters) {
    const RequestId id(++requests_);
    cache_.Begin({.id = id}, Path(letters));
    cache_.End({.id = id});
  }
  std::string Victims() const {
    std::string victims;
    for (const BlockKey key : cache_.victims()) victims += static_cast<char>(key.low);
    return victims;
  }

  BlockCache cache_{{.capacity = 4, .history = 6, .store_requests = false},
                    std::make_unique<LruPolicy>()};
  uint64_t requests_ = 0;
};

TEST_F(AdmitTest, RequestsAloneStoreNothing) {
  Run("abc");
  EXPECT_EQ(cache_.cached(), 0);
  EXPECT_NE(cache_.HandleOf(Path("c")[0]), kNoBlock);
  EXPECT_EQ(cache_.ParentOf(cache_.HandleOf(Path("c")[0])), Path("b")[0]);
  EXPECT_EQ(cache_.ParentOf(cache_.HandleOf(Path("a")[0])), std::nullopt);
  EXPECT_EQ(cache_.PositionOf(cache_.HandleOf(Path("c")[0])), 2);
}

TEST_F(AdmitTest, KnownBlocksAreStoredInPlaceOfOthers) {
  Run("abc");
  Run("xyz");
  EXPECT_EQ(cache_.Admit(absl::InfinitePast(), Path("abc")).stored, 3);
  Run("ab");
  const BlockCache::Outcome outcome = cache_.Admit(absl::InfinitePast(), Path("xyz"));
  EXPECT_EQ(outcome.stored, 3);
  EXPECT_EQ(outcome.evicted, 2);
  EXPECT_EQ(outcome.wasted, 1) << "b was used";
  EXPECT_EQ(Victims(), "cb");
  EXPECT_EQ(cache_.Admit(absl::InfinitePast(), Path("xyz")).stored, 0);
  EXPECT_EQ(Victims(), "");
}

TEST_F(AdmitTest, APartOfAPathIsStoredBehindWhatIsCachedAlone) {
  Run("abcd");
  EXPECT_EQ(cache_.Admit(absl::InfinitePast(), Path("cd")).stored, 0);
  EXPECT_EQ(cache_.Admit(absl::InfinitePast(), Path("ab")).stored, 2);
  EXPECT_EQ(cache_.Admit(absl::InfinitePast(), Path("cd")).stored, 2);
}

TEST_F(AdmitTest, NothingIsStoredBehindWhatIsNotKnown) {
  Run("abc");
  Run("uvwxyz");
  EXPECT_EQ(cache_.Admit(absl::InfinitePast(), Path("abc")).stored, 0) << "forgotten";
  EXPECT_EQ(cache_.Admit(absl::InfinitePast(), Path("uvwxyz")).stored, 4) << "as there is room";
}

TEST_F(BlockCacheTest, HitIsTheLongestCachedPrefix) {
  EXPECT_EQ(Run("abc").cached, 0);
  EXPECT_EQ(outcome_.stored, 3);
  EXPECT_EQ(Run("abd").cached, 2);
  EXPECT_EQ(outcome_.known, 2);
  EXPECT_EQ(Cached("abcd"), "abcd");
}

TEST_F(BlockCacheTest, LeavesGoBeforeWhatTheyStandOn) {
  Run("abcd");
  Run("x");
  EXPECT_EQ(Cached("abcdx"), "abcx");
  Run("y");
  EXPECT_EQ(Cached("abcdxy"), "abxy");
}

TEST_F(BlockCacheTest, WhatRunsStays) {
  const RequestId first = Begin("abc");
  Run("x");
  EXPECT_EQ(Run("yz").stored, 1) << "x is the only one that may go";
  EXPECT_EQ(Cached("abcxyz"), "abcy");
  cache_.End({.id = first});
  Run("yz");
  EXPECT_EQ(Cached("abcxyz"), "abyz");
}

TEST_F(BlockCacheTest, ARequestLargerThanTheCacheKeepsItsHead) {
  const BlockCache::Outcome outcome = Run("abcdef");
  EXPECT_EQ(outcome.stored, 4);
  EXPECT_EQ(outcome.evicted, 0);
  EXPECT_EQ(Run("abcdef").cached, 4);
  EXPECT_EQ(outcome_.known, 6);
}

TEST_F(BlockCacheTest, ExtendedPathsAreFoundAndHeld) {
  const RequestId id = Begin("ab");
  cache_.Extend(id, absl::UnixEpoch(), Path("c")[0]);
  Run("xy");
  EXPECT_EQ(Cached("abcxy"), "abcx");
  cache_.End({.id = id});
  EXPECT_EQ(Run("abc").cached, 3);
}

TEST_F(BlockCacheTest, NothingIsStoredBehindAGap) {
  const RequestId id = Begin("abcde");
  Run("x");
  cache_.Extend(id, absl::UnixEpoch(), Path("f")[0]);
  EXPECT_EQ(Cached("abcdefx"), "abcd");
}

// Wants nothing new where it may refuse.
class ContentPolicy : public EvictionPolicy {
 public:
  absl::string_view name() const override { return "content"; }
  void OnRequest(const RequestInfo&, const Access&) override {}
  void OnInsert(RequestId, BlockHandle, BlockHandle) override {}
  void OnEvictable(BlockHandle block) override { evictable_.insert(block); }
  void OnPinned(BlockHandle block) override { evictable_.erase(block); }
  void OnEvict(BlockHandle block) override { evictable_.erase(block); }
  std::optional<BlockHandle> ChooseVictim(absl::Time, BlockHandle, bool may_refuse) override {
    if (may_refuse || evictable_.empty()) return std::nullopt;
    return *evictable_.begin();
  }

 private:
  std::set<BlockHandle> evictable_;
};

TEST(BlockCacheOptions, APolicyMayRefuseOnlyWhereTheOptionSaysSo) {
  for (const bool may_refuse : {true, false}) {
    BlockCache cache({.capacity = 2, .may_refuse = may_refuse}, std::make_unique<ContentPolicy>());
    cache.Begin({.id = RequestId(1)}, Path("ab"));
    cache.End({.id = RequestId(1)});
    EXPECT_EQ(cache.Begin({.id = RequestId(2)}, Path("xy")).stored, may_refuse ? 0 : 2);
  }
}

TEST(BlockCacheOptions, PlainCachesKeepChildrenWithoutParents) {
  BlockCache cache({.capacity = 3, .discipline = Discipline::kPlain},
                   std::make_unique<LruPolicy>());
  cache.Begin({.id = RequestId(1)}, Path("abcd"));
  cache.End({.id = RequestId(1)});
  EXPECT_FALSE(cache.IsCached(Path("a")[0]));
  EXPECT_TRUE(cache.IsCached(Path("d")[0]));
  EXPECT_EQ(cache.Begin({.id = RequestId(2)}, Path("abcd")).cached, 0);
}

// What is cached is closed under prefixes and what is known too; hits are what a set says.
TEST(BlockCacheModel, RandomRequests) {
  std::mt19937 random(7);
  const auto below = [&random](uint64_t bound) { return random() % bound; };
  for (const size_t history : {0, 3, 50}) {
    constexpr size_t kCapacity = 20;
    BlockCache cache({.capacity = kCapacity, .history = history}, std::make_unique<LruPolicy>());
    std::map<uint64_t, uint64_t> parents;  // by key, from 1; 0: none
    std::map<RequestId, uint64_t> running;
    for (uint64_t id = 1; id <= 2000; ++id) {
      std::vector<BlockKey> path;
      for (uint64_t key = parents.empty() ? 0 : below(parents.size() + 1); key > 0;
           key = parents[key]) {
        path.insert(path.begin(), {0, key});
      }
      for (size_t more = below(3); more > 0 || path.empty(); more -= more > 0 ? 1 : 0) {
        const uint64_t key = parents.size() + 1;
        parents[key] = path.empty() ? 0 : path.back().low;
        path.push_back({0, key});
      }
      size_t hit = 0;
      while (hit < path.size() && cache.IsCached(path[hit])) ++hit;
      const BlockCache::Outcome outcome = cache.Begin({.id = RequestId(id)}, path);
      ASSERT_EQ(outcome.cached, hit);
      ASSERT_GE(outcome.known, hit);
      if (hit + outcome.stored > 0)
        running[RequestId(id)] = path[hit + outcome.stored - 1].low;
      else
        cache.End({.id = RequestId(id)});
      while (running.size() > below(4)) {
        cache.End({.id = running.begin()->first});
        running.erase(running.begin());
      }
      size_t cached = 0;
      for (const auto& [key, parent] : parents) {
        if (!cache.IsCached({0, key})) continue;
        ++cached;
        ASSERT_TRUE(parent == 0 || cache.IsCached({0, parent}));
      }
      ASSERT_EQ(cached, cache.cached());
      ASSERT_LE(cached, kCapacity);
      ASSERT_LE(cache.known(), kCapacity + history);
      for (const auto& [request, tail] : running) ASSERT_TRUE(cache.IsCached({0, tail}));
    }
  }
}

TEST(IndexedHeapProperty, TopIsTheLeast) {
  std::mt19937 random(3);
  IndexedHeap<int> heap;
  std::map<BlockHandle, int> keys;
  for (int step = 0; step < 5000; ++step) {
    const BlockHandle block(static_cast<uint32_t>(random() % 60));
    const int key = static_cast<int>(random() % 20);
    ASSERT_EQ(heap.Contains(block), keys.count(block) > 0);
    if (!heap.Contains(block)) {
      heap.Push(block, key);
      keys[block] = key;
    } else if (random() % 2 == 0) {
      heap.Update(block, key);
      keys[block] = key;
    } else {
      heap.Remove(block);
      keys.erase(block);
    }
    ASSERT_EQ(heap.size(), keys.size());
    if (keys.empty()) continue;
    const auto least = std::min_element(keys.begin(), keys.end(), [](const auto& a, const auto& b) {
      return std::pair(a.second, a.first) < std::pair(b.second, b.first);
    });
    ASSERT_EQ(heap.Top(), least->first);
    ASSERT_EQ(heap.TopKey(), least->second);
  }
}

}  // namespace
}  // namespace palimpsest::cache
