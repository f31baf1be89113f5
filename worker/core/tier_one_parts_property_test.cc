#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "worker/core/tier_one_parts.h"
#include "worker/core/tier_one_parts_fixture.h"

namespace palimpsest {
namespace {

using Random = std::mt19937_64;
using Demotion = TierOneParts::Demotion;

// What was told, kept as sets, and the choice by looking at everything.
class Model {
 public:
  Model(TierOneParts::Options options, const HeadMass& mass)
      : options_(std::move(options)), mass_(mass) {}

  void Begin(uint64_t request, const BlockChain& chain) { Add(requests_[request], kRoot, chain); }
  void Extend(uint64_t request, const BlockChain& chain, absl::Time now) {
    if (const auto found = requests_.find(request); found != requests_.end()) {
      Add(found->second, chain.parent, chain);
      return;
    }
    std::vector<BlockKey> path = PathTo(chain.parent);
    if (path.empty() && chain.parent != kRoot) return;
    for (const BlockKey& key : path) ++blocks_[key].users;
    Add(path, chain.parent, chain);
    Idle(path, now);
  }
  void Set(const BlockKey& key, int32_t group, bool there) {
    if (!blocks_.contains(key)) return;
    if (there) {
      there_.insert({key, group});
    } else {
      there_.erase({key, group});
    }
  }
  void End(uint64_t request, absl::Time now) {
    const auto found = requests_.find(request);
    if (found == requests_.end()) return;
    Idle(found->second, now);
    requests_.erase(found);
  }

  int64_t parts() const { return static_cast<int64_t>(there_.size()); }
  size_t blocks() const { return blocks_.size(); }

  // Checks that it is about the least worth, and takes it.
  void Take(const Demotion& demotion, absl::Time now) {
    const std::map<std::pair<int64_t, int32_t>, double> worths = Worths(now);
    ASSERT_FALSE(worths.empty());
    const BlockKey& last = demotion.chain.keys.back();
    const int64_t run = blocks_.at(last).run;
    double least = std::numeric_limits<double>::infinity();
    for (const auto& [name, worth] : worths) least = std::min(least, worth);
    const auto named = worths.find({run, demotion.group});
    ASSERT_NE(named, worths.end()) << "its run has a part that may leave";
    ASSERT_LE(named->second, least + 1e-9);
    ASSERT_EQ(PathTo(last), demotion.chain.keys);
    for (size_t i = demotion.chain.keys.size(); i > static_cast<size_t>(demotion.first); --i) {
      const BlockKey& key = demotion.chain.keys[i - 1];
      if (!there_.contains({key, demotion.group})) continue;
      ASSERT_GT(parts(), options_.limit / kPart) << "one too many";
      ASSERT_EQ(blocks_.at(key).run, run);
      ASSERT_TRUE(MayLeave(key, demotion.group));
      there_.erase({key, demotion.group});
    }
  }
  bool Any(absl::Time now) const { return !Worths(now).empty(); }

 private:
  struct Block {
    BlockKey parent;
    int users = 0;
    int64_t run = 0;
    absl::Time since;
    int64_t distance = 0;
  };

  std::vector<BlockKey> PathTo(BlockKey key) const {
    std::vector<BlockKey> path;
    for (; blocks_.contains(key); key = blocks_.at(key).parent) path.push_back(key);
    std::reverse(path.begin(), path.end());
    return path;
  }
  void Add(std::vector<BlockKey>& path, const BlockKey& parent, const BlockChain& chain) {
    size_t at = 0;
    if (parent != kRoot) {
      const auto found = std::find(path.begin(), path.end(), parent);
      if (found == path.end()) return;
      at = static_cast<size_t>(found - path.begin()) + 1;
    }
    for (size_t i = 0; i < chain.keys.size(); ++i) {
      if (at + i < path.size()) {
        if (path[at + i] != chain.keys[i]) return;
        continue;
      }
      Block& block = blocks_[chain.keys[i]];
      block.parent = path.empty() ? kRoot : path.back();
      ++block.users;
      path.push_back(chain.keys[i]);
    }
  }
  void Idle(const std::vector<BlockKey>& path, absl::Time now) {
    ++runs_;
    for (size_t i = 0; i < path.size(); ++i) {
      Block& block = blocks_[path[i]];
      if (--block.users > 0) continue;
      block.run = runs_;
      block.since = now;
      block.distance = static_cast<int64_t>(path.size() - 1 - i) * kBlockTokens;
    }
  }
  bool MayLeave(const BlockKey& key, int32_t group) const {
    if (!there_.contains({key, group}) || blocks_.at(key).users > 0) return false;
    return std::none_of(there_.begin(), there_.end(), [&](const auto& other) {
      if (other.second != group || other.first == key) return false;
      const std::vector<BlockKey> path = PathTo(other.first);
      return std::find(path.begin(), path.end(), key) != path.end();
    });
  }
  // Of each run and group of which a part may leave: the logarithm of its mean worth.
  std::map<std::pair<int64_t, int32_t>, double> Worths(absl::Time now) const {
    std::map<std::pair<int64_t, int32_t>, std::pair<double, int>> sums;
    std::set<std::pair<int64_t, int32_t>> open;
    for (const auto& [key, group] : there_) {
      const Block& block = blocks_.at(key);
      if (block.users > 0) continue;
      double mass = 0;
      for (const int32_t head : options_.groups[group]) mass += mass_.mass(head);
      mass /= static_cast<double>(options_.groups[group].size());
      auto& [sum, count] = sums[{block.run, group}];
      sum += mass * std::exp2(-absl::FDivDuration(now - block.since, options_.worth.half_life)) /
             (1 + static_cast<double>(block.distance) / options_.worth.distance_scale);
      ++count;
      if (MayLeave(key, group)) open.insert({block.run, group});
    }
    std::map<std::pair<int64_t, int32_t>, double> worths;
    for (const auto& name : open) {
      worths[name] = std::log2(sums.at(name).first / sums.at(name).second);
    }
    return worths;
  }

  const TierOneParts::Options options_;
  const HeadMass& mass_;
  std::map<BlockKey, Block> blocks_;
  std::set<std::pair<BlockKey, int32_t>> there_;
  std::map<uint64_t, std::vector<BlockKey>> requests_;
  int64_t runs_ = 0;
};

// Sequences that branch: a path is a walk from the root, and a block is named by it.
std::vector<BlockKey> RandomPath(Random& random, size_t blocks) {
  std::vector<BlockKey> keys;
  uint64_t walk = 1;
  for (size_t i = 0; i < blocks; ++i) {
    walk = walk * 2 + (random() % 4 == 0 ? 1 : 0);
    keys.push_back({i, walk});
  }
  return keys;
}

// The same is told to both.
void Act(TierOneParts& parts, Model& model, Random& random, absl::Time now) {
  const uint64_t request = 1 + random() % 4;
  const std::vector<BlockKey> keys = RandomPath(random, 1 + random() % 9);
  switch (random() % 6) {
    case 0: {
      const BlockChain chain = Chain(kRoot, keys);
      parts.Begin(request, chain);
      model.Begin(request, chain);
      break;
    }
    case 1: {
      const size_t from = random() % keys.size();
      const BlockChain chain = Chain(from == 0 ? kRoot : keys[from - 1],
                                     {keys.begin() + static_cast<ptrdiff_t>(from), keys.end()});
      const uint64_t whose = random() % 2 == 0 ? request : 99;
      parts.Extend(whose, chain, now);
      model.Extend(whose, chain, now);
      break;
    }
    case 2:
    case 3:
      for (const BlockKey& key : keys) {
        const auto group = static_cast<int32_t>(random() % 3);
        const bool there = random() % 8 != 0;
        there ? parts.Came(key, group) : parts.Left(key, group);
        model.Set(key, group, there);
      }
      break;
    default:
      parts.End(request, now);
      model.End(request, now);
  }
}

TEST(TierOnePartsProperty, TheLeastWorthOfAllThatMayLeaveAreNamed) {
  int64_t named = 0, stuck = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Random random(seed);
    TierOneParts::Options options = Options(3, static_cast<int64_t>(random() % 12));
    options.groups = {{0, 3}, {1}, {2, 4}};
    options.worth = {.half_life = absl::Seconds(1 + random() % 20),
                     .distance_scale = 1 + static_cast<double>(random() % 100)};
    std::uniform_real_distribution<float> share(0.001f, 1.0f);
    const HeadMass mass =
        Mass({share(random), share(random), share(random), share(random), share(random)});
    TierOneParts parts(options, mass);
    Model model(options, mass);
    absl::Time now = At(0);
    for (int step = 0; step < 120; ++step) {
      now += absl::Milliseconds(static_cast<int64_t>(random() % 3000));
      Act(parts, model, random, now);
      ASSERT_EQ(parts.parts(), model.parts()) << "seed " << seed << ", step " << step;
      ASSERT_EQ(parts.known_blocks(), model.blocks());
      if (random() % 3 != 0) continue;
      for (const Demotion& demotion : parts.TakeDemotions(nullptr)) {
        ASSERT_NO_FATAL_FAILURE(model.Take(demotion, now)) << "seed " << seed << ", step " << step;
        ++named;
      }
      ASSERT_EQ(parts.parts(), model.parts());
      if (parts.parts() <= options.limit / kPart) continue;
      ASSERT_FALSE(model.Any(now)) << "as many as there are too many, if they may leave";
      ++stuck;
    }
  }
  EXPECT_GT(named, 1000);
  EXPECT_GT(stuck, 100);
}

// With a bound that everything meets: no more is known, and nothing is named that did not come, has
// left or is used.
TEST(TierOnePartsProperty, KnowsNoMoreThanItMayAndNamesNothingElse) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Random random(seed);
    TierOneParts::Options options = Options(3, static_cast<int64_t>(random() % 6));
    options.most_parts = 3 + static_cast<int64_t>(random() % 40);
    TierOneParts parts(options, Mass({0.2f, 0.5f, 0.3f}));
    std::set<std::pair<BlockKey, int32_t>> came;  // and what was forgotten since
    std::map<uint64_t, std::vector<BlockKey>> running;
    const auto known = [&](const BlockKey& key) {
      parts.Left(key, 0);
      const int64_t before = parts.parts();
      parts.Came(key, 0);
      came.insert({key, 0});
      return parts.parts() > before;
    };
    absl::Time now = At(0);
    for (int step = 0; step < 200; ++step) {
      now += absl::Seconds(1);
      const uint64_t request = 1 + random() % 4;
      const std::vector<BlockKey> keys = RandomPath(random, 1 + random() % 9);
      switch (random() % 5) {
        case 0:
          if (running.contains(request)) break;
          parts.Begin(request, Chain(kRoot, keys));
          // What has found no room is not recorded.
          for (const BlockKey& key : keys) {
            if (!known(key)) break;
            running[request].push_back(key);
          }
          break;
        case 1:
          parts.Extend(99, Chain(kRoot, keys), now);
          break;
        case 2:
        case 3:
          for (const BlockKey& key : keys) {
            const auto group = static_cast<int32_t>(random() % 3);
            parts.Came(key, group);
            came.insert({key, group});
            if (random() % 8 != 0) continue;
            parts.Left(key, group);
            came.erase({key, group});
          }
          break;
        default:
          parts.End(request, now);
          running.erase(request);
      }
      ASSERT_LE(parts.known_blocks(), static_cast<size_t>(options.most_parts) / 3);
      ASSERT_LE(parts.parts(), static_cast<int64_t>(came.size()));
      if (random() % 3 != 0) continue;
      for (const Demotion& demotion : parts.TakeDemotions(nullptr)) {
        const std::vector<BlockKey>& chain = demotion.chain.keys;
        const auto first = chain.begin() + demotion.first;
        ASSERT_TRUE(came.contains({*first, demotion.group}));
        ASSERT_TRUE(came.contains({chain.back(), demotion.group}));
        for (const auto& [other, path] : running) {
          for (const BlockKey& key : path) {
            ASSERT_EQ(std::find(first, chain.end(), key), chain.end())
                << "seed " << seed << ", step " << step << ": request " << other << " uses it";
          }
        }
        for (auto key = first; key != chain.end(); ++key) came.erase({*key, demotion.group});
      }
    }
    for (uint64_t request = 1; request <= 4; ++request) parts.End(request, now);
    while (!parts.TakeDemotions(nullptr).empty()) {
    }
    ASSERT_LE(parts.parts(), options.limit / kPart) << "once nothing is used";
  }
}

}  // namespace
}  // namespace palimpsest
