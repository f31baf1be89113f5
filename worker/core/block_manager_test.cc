#include "worker/core/block_manager.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/core/block_keys.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Blocks of 3 units in slabs of 8: every third slab border cuts no block.
KvGeometry TestGeometry(int32_t slabs = 6) {
  return {
      .slab_bytes = Bytes(8), .block_bytes = Bytes(3), .region_slabs = slabs, .block_tokens = 2};
}

std::vector<RegionIndex> Slabs(const std::vector<uint32_t>& indexes) {
  std::vector<RegionIndex> result;
  for (uint32_t index : indexes) result.push_back(RegionIndex(index));
  return result;
}

// The chain of a token sequence, published block by block.
struct Chain {
  std::vector<TokenId> tokens;
  std::vector<BlockKey> keys;
  std::vector<BlockId> blocks;
  PrefixCache::Node* node = nullptr;

  explicit Chain(std::vector<TokenId> text) : tokens(std::move(text)) {
    for (size_t i = 0; i + 2 <= tokens.size(); i += 2) {
      const BlockKey parent = keys.empty() ? BlockKey{} : keys.back();
      keys.push_back(ChainKey(parent, absl::MakeConstSpan(tokens).subspan(i, 2)));
    }
  }

  void Compute(BlockManager& manager) {
    for (size_t i = blocks.size(); i < keys.size(); ++i) {
      const auto block = manager.Allocate();
      ASSERT_TRUE(block.has_value());
      const auto published =
          manager.Publish(node, keys[i], absl::MakeConstSpan(tokens).subspan(2 * i, 2), *block);
      blocks.push_back(published.block);
      node = published.node;
    }
  }

  void Release(BlockManager& manager) {
    for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) {
      if (*it != kNullBlock) manager.Release(*it);
    }
    if (node != nullptr) manager.Unpin(node);
    blocks.clear();
    node = nullptr;
  }

  BlockManager::Match Find(const BlockManager& manager, int32_t window = 0) const {
    return manager.FindPrefix(keys, tokens, window);
  }
};

TEST(KvGeometry, BlocksAndSlabsAreInverse) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const KvGeometry geometry{.slab_bytes = Bytes(1 + random() % 40),
                              .block_bytes = Bytes(1 + random() % 40),
                              .region_slabs = static_cast<int32_t>(1 + random() % 30),
                              .block_tokens = 4};
    for (uint32_t id = 1; id < geometry.block_count(); ++id) {
      const auto slabs = geometry.SlabsOf(BlockId(id));
      ASSERT_LE(slabs.end, static_cast<uint32_t>(geometry.region_slabs));
      for (uint32_t slab = 0; slab < static_cast<uint32_t>(geometry.region_slabs); ++slab) {
        const auto blocks = geometry.BlocksOf(RegionIndex(slab));
        ASSERT_EQ(slab >= slabs.begin && slab < slabs.end, id >= blocks.begin && id < blocks.end);
      }
    }
    const int32_t blocks = random() % 50;
    const int32_t slabs = geometry.SlabsFor(blocks);
    ASSERT_GE(geometry.BlocksIn(slabs), blocks);
    if (blocks > 0) {
      ASSERT_LT(geometry.BlocksIn(slabs - 1), blocks);
    }
  }
}

TEST(BlockManager, BlocksNeedAllTheirSlabs) {
  BlockManager manager(TestGeometry());
  EXPECT_EQ(manager.usable_blocks(), 0);
  EXPECT_EQ(manager.Allocate(), std::nullopt);
  manager.OnSlabsMapped(Slabs({0}));  // bytes 0 .. 7: the null block, block 1, a part of 2
  EXPECT_EQ(manager.free_blocks(), 1);
  manager.OnSlabsMapped(Slabs({2}));  // 16 .. 23: a part of 5, blocks 6 and 7
  EXPECT_EQ(manager.free_blocks(), 3);
  manager.OnSlabsMapped(Slabs({1}));
  EXPECT_EQ(manager.free_blocks(), 7);
  EXPECT_EQ(manager.Allocate(), BlockId(1));
  EXPECT_EQ(manager.Allocate(), BlockId(2));
  manager.Release(BlockId(1));
  EXPECT_EQ(manager.Allocate(), BlockId(1));
  manager.CheckInvariants();
}

TEST(BlockManager, FindsTheLongestPublishedPrefix) {
  BlockManager manager(TestGeometry());
  manager.OnSlabsMapped(Slabs({0, 1, 2, 3, 4, 5}));
  Chain first({1, 2, 3, 4, 5, 6});
  first.Compute(manager);
  const std::vector<BlockId> blocks = first.blocks;
  EXPECT_EQ(Chain({1, 2, 3, 4, 9, 9}).Find(manager).blocks, (std::vector{blocks[0], blocks[1]}));
  EXPECT_THAT(Chain({9, 2, 3, 4}).Find(manager).blocks, IsEmpty());
  EXPECT_EQ(Chain({1, 2, 3, 4}).Find(manager).cached_blocks, 0);
  first.Release(manager);
  EXPECT_EQ(manager.cached_blocks(), 3);
  const auto match = Chain({1, 2, 3, 4}).Find(manager);
  EXPECT_EQ(match.cached_blocks, 2);
  manager.Acquire(match);
  EXPECT_EQ(manager.live_blocks(), 2);
  manager.CheckInvariants();
  manager.Release(blocks[1]);
  manager.Release(blocks[0]);
  manager.Unpin(match.node);
  manager.CheckInvariants();
}

TEST(BlockManager, EqualContentIsKeptOnce) {
  BlockManager manager(TestGeometry());
  manager.OnSlabsMapped(Slabs({0, 1, 2, 3, 4, 5}));
  Chain first({1, 2, 3, 4}), second({1, 2, 3, 4});
  first.Compute(manager);
  second.Compute(manager);
  EXPECT_EQ(first.blocks, second.blocks);
  EXPECT_EQ(manager.live_blocks(), 2);
  EXPECT_EQ(manager.references(first.blocks[0]), 2);
  first.Release(manager);
  EXPECT_EQ(manager.live_blocks(), 2);
  second.Release(manager);
  EXPECT_EQ(manager.cached_blocks(), 2);
  manager.CheckInvariants();
}

TEST(BlockManager, EvictsTheEndsOfOldPrefixesFirst) {
  BlockManager manager(TestGeometry(3));
  manager.OnSlabsMapped(Slabs({0, 1, 2}));
  Chain old_chain({1, 2, 3, 4, 5, 6}), new_chain({7, 8, 9, 10, 11, 12});
  old_chain.Compute(manager);
  new_chain.Compute(manager);
  old_chain.Release(manager);
  new_chain.Release(manager);
  EXPECT_EQ(manager.free_blocks(), 1);
  std::vector<size_t> found;
  for (int i = 0; i < 7; ++i) {
    ASSERT_TRUE(manager.Allocate().has_value());
    found.push_back(old_chain.Find(manager).blocks.size() * 10 +
                    new_chain.Find(manager).blocks.size());
    manager.CheckInvariants();
  }
  EXPECT_THAT(found, ElementsAre(33, 23, 13, 3, 2, 1, 0));
  EXPECT_EQ(manager.Allocate(), std::nullopt);
}

TEST(BlockManager, WindowNeedsOnlyTheBlocksThatAreSeen) {
  BlockManager manager(TestGeometry());
  manager.OnSlabsMapped(Slabs({0, 1, 2, 3, 4, 5}));
  Chain chain({1, 2, 3, 4, 5, 6, 7, 8});
  chain.Compute(manager);
  const std::vector<BlockId> blocks = chain.blocks;
  // The first two blocks leave the window and are evicted.
  manager.Release(blocks[0]);
  manager.Release(blocks[1]);
  chain.blocks[0] = chain.blocks[1] = kNullBlock;
  std::vector<BlockId> taken;
  while (const auto block = manager.Allocate()) taken.push_back(*block);
  EXPECT_THAT(Chain({1, 2, 3, 4, 5, 6, 7, 8}).Find(manager).blocks, IsEmpty());
  // Behind 8 tokens, a window of 4 sees positions 5 to 7: blocks 2 and 3.
  EXPECT_THAT(Chain({1, 2, 3, 4, 5, 6, 7, 8}).Find(manager, 4).blocks,
              ElementsAre(kNullBlock, kNullBlock, blocks[2], blocks[3]));
  EXPECT_THAT(Chain({1, 2, 3, 4, 5, 6, 7, 8}).Find(manager, 6).blocks, IsEmpty());
  EXPECT_THAT(Chain({1, 2, 3, 4, 5, 6, 7, 8}).Find(manager, 1).blocks.size(), 4);
  chain.Release(manager);
  manager.CheckInvariants();
}

TEST(BlockManager, EqualKeysOfDifferentPrefixesAreAMiss) {
  BlockManager manager(TestGeometry());
  manager.OnSlabsMapped(Slabs({0, 1, 2, 3, 4, 5}));
  Chain first({1, 2, 3, 4});
  first.Compute(manager);
  Chain other({5, 6, 7, 8});
  other.keys = first.keys;
  EXPECT_THAT(other.Find(manager).blocks, IsEmpty());
  const BlockId block = *manager.Allocate();
  const auto published = manager.Publish(nullptr, other.keys[0], {5, 6}, block);
  EXPECT_EQ(published.block, block);
  EXPECT_EQ(published.node, nullptr);
  manager.Release(block);
  EXPECT_EQ(manager.cached_blocks(), 0);
  manager.CheckInvariants();
}

TEST(BlockManager, GivesEmptySlabsBeforeUsedOnesAndHighBeforeLow) {
  BlockManager manager(TestGeometry());
  manager.OnSlabsMapped(Slabs({0, 1, 2, 3, 4, 5}));
  manager.Allocate();
  manager.Allocate();
  const auto given = manager.CheapestSlabs(2);
  EXPECT_THAT(given, ElementsAre(RegionIndex(5), RegionIndex(4)));
  manager.BeginGive(given);
  EXPECT_THAT(manager.FinishGive(), IsEmpty());
  EXPECT_EQ(manager.mapped_slabs(), 4);
  manager.CheckInvariants();
}

TEST(BlockManager, SlabsOfTheNullBlockGoLastHoweverCheapTheyAre) {
  BlockManager manager(TestGeometry(4));
  manager.OnSlabsMapped(Slabs({0, 1, 2, 3}));  // blocks 1 to 9
  std::vector<BlockId> held;
  while (const auto block = manager.Allocate()) held.push_back(*block);
  manager.Release(BlockId(1));
  manager.Release(BlockId(2));
  EXPECT_EQ(manager.CountSlabs().free, 1);
  EXPECT_EQ(manager.CheapestSlabs(4).back(), RegionIndex(0));
  manager.BeginGive(manager.CheapestSlabs(3));
  for (size_t i = 2; i < held.size(); ++i) {
    if (manager.displaced_blocks() > manager.available_blocks()) manager.Release(held[i]);
  }
  manager.FinishGive();
  EXPECT_EQ(manager.mapped_slabs(), 1);
  EXPECT_TRUE(manager.usable(BlockId(1)));
  manager.CheckInvariants();

  KvGeometry large = TestGeometry(4);
  large.block_bytes = Bytes(10);  // the null block has two slabs
  BlockManager other(large);
  other.OnSlabsMapped(Slabs({0, 1, 2, 3}));
  EXPECT_EQ(other.CheapestSlabs(4), Slabs({3, 2, 1, 0}));
  other.BeginGive(other.CheapestSlabs(3));
  other.FinishGive();
  EXPECT_EQ(other.usable_blocks(), 0);
  other.CheckInvariants();
  other.OnSlabsMapped(Slabs({1, 2}));
  EXPECT_EQ(other.usable_blocks(), 1);
  other.CheckInvariants();
}

TEST(BlockManager, NothingIsUsableWithoutTheNullBlock) {
  BlockManager manager(TestGeometry());
  manager.OnSlabsMapped(Slabs({1, 2}));
  EXPECT_EQ(manager.usable_blocks(), 0);
  EXPECT_EQ(manager.Allocate(), std::nullopt);
  EXPECT_EQ(manager.SlabsBehindHoles(), Slabs({2}));
  manager.CheckInvariants();
  manager.OnSlabsMapped(Slabs({0}));
  EXPECT_EQ(manager.usable_blocks(), 7);
  manager.CheckInvariants();
  Chain chain({1, 2, 3, 4});
  chain.Compute(manager);
  manager.BeginGive(Slabs({0}));
  EXPECT_EQ(manager.displaced_blocks(), 2);
  EXPECT_EQ(manager.available_blocks(), 0);
  chain.Release(manager);
  EXPECT_THAT(manager.FinishGive(), IsEmpty());
  EXPECT_EQ(manager.mapped_slabs(), 2);
  manager.CheckInvariants();
}

TEST(BlockManager, MovesBlocksInUseWithTheirReferencesAndKeys) {
  BlockManager manager(TestGeometry(3));
  manager.OnSlabsMapped(Slabs({0, 2}));  // blocks 1, 6 and 7
  ASSERT_EQ(manager.Allocate(), BlockId(1));
  Chain chain({1, 2, 3, 4});
  chain.Compute(manager);
  ASSERT_THAT(chain.blocks, ElementsAre(BlockId(6), BlockId(7)));
  manager.AddReference(BlockId(6));
  manager.Release(BlockId(1));
  manager.OnSlabsMapped(Slabs({1}));
  manager.BeginGive(Slabs({2}));
  EXPECT_EQ(manager.displaced_blocks(), 2);
  const auto moves = manager.FinishGive();
  ASSERT_EQ(moves.size(), 2);
  EXPECT_EQ(moves[0].from, BlockId(6));
  EXPECT_EQ(moves[0].to, BlockId(1));
  EXPECT_EQ(moves[1].from, BlockId(7));
  EXPECT_EQ(moves[1].to, BlockId(2));
  EXPECT_EQ(manager.references(BlockId(1)), 2);
  EXPECT_THAT(Chain({1, 2, 3, 4}).Find(manager).blocks, ElementsAre(BlockId(1), BlockId(2)));
  manager.CheckInvariants();
}

TEST(BlockManager, DisplacedBlocksThatAreReleasedAreForgotten) {
  BlockManager manager(TestGeometry(3));
  manager.OnSlabsMapped(Slabs({0, 2}));
  ASSERT_EQ(manager.Allocate(), BlockId(1));
  Chain chain({1, 2, 3, 4});
  chain.Compute(manager);
  manager.BeginGive(Slabs({2}));
  EXPECT_EQ(manager.available_blocks(), 0);
  chain.Release(manager);
  EXPECT_THAT(manager.FinishGive(), IsEmpty());
  EXPECT_THAT(Chain({1, 2, 3, 4}).Find(manager).blocks, IsEmpty());
  EXPECT_EQ(manager.usable_blocks(), 1);
  manager.CheckInvariants();
}

TEST(BlockManager, SlabsBehindHolesAreThoseThatADenseRegionLacks) {
  BlockManager manager(TestGeometry());
  EXPECT_THAT(manager.SlabsBehindHoles(), IsEmpty());
  manager.OnSlabsMapped(Slabs({1, 3, 4}));
  EXPECT_EQ(manager.SlabsBehindHoles(), Slabs({3, 4}));
  manager.OnSlabsMapped(Slabs({0, 2, 5}));
  EXPECT_THAT(manager.SlabsBehindHoles(), IsEmpty());
}

// Random actions against a plain model of what every holder must see.
TEST(BlockManager, RandomActionsKeepAllInvariants) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const KvGeometry geometry{.slab_bytes = Bytes(4 + random() % 12),
                              .block_bytes = Bytes(2 + random() % 12),
                              .region_slabs = static_cast<int32_t>(4 + random() % 20),
                              .block_tokens = 2};
    BlockManager manager(geometry);
    std::vector<bool> mapped(geometry.region_slabs);
    std::vector<Chain> chains;
    std::map<BlockId, std::vector<TokenId>> content;  // what a live or cached block must hold
    for (int step = 0; step < 150; ++step) {
      switch (random() % 5) {
        case 0: {
          std::vector<RegionIndex> fresh;
          for (uint32_t i = 0; i < mapped.size(); ++i) {
            if (!mapped[i] && random() % 2) fresh.push_back(RegionIndex(i));
          }
          for (RegionIndex index : fresh) mapped[index.value()] = true;
          manager.OnSlabsMapped(fresh);
          break;
        }
        case 1:
        case 2: {  // a new sequence: acquire what is there, compute the rest
          std::vector<TokenId> tokens(2 + 2 * (random() % 5));
          for (TokenId& token : tokens) token = random() % 2;
          Chain chain(tokens);
          const auto match = chain.Find(manager);
          for (size_t i = 0; i < match.blocks.size(); ++i) {
            ASSERT_EQ(content.at(match.blocks[i]),
                      std::vector(tokens.begin(), tokens.begin() + 2 * (i + 1)));
          }
          manager.Acquire(match);
          chain.blocks = match.blocks;
          chain.node = match.node;
          for (size_t i = chain.blocks.size(); i < chain.keys.size(); ++i) {
            const auto block = manager.Allocate();
            if (!block.has_value()) break;
            content[*block] = std::vector(tokens.begin(), tokens.begin() + 2 * (i + 1));
            const auto published = manager.Publish(
                chain.node, chain.keys[i], absl::MakeConstSpan(tokens).subspan(2 * i, 2), *block);
            chain.blocks.push_back(published.block);
            chain.node = published.node;
            ASSERT_EQ(content.at(published.block), content.at(*block));
          }
          chains.push_back(chain);
          break;
        }
        case 3:
          if (!chains.empty()) {
            std::swap(chains[random() % chains.size()], chains.back());
            chains.back().Release(manager);
            chains.pop_back();
          }
          break;
        case 4: {
          const auto given =
              random() % 4 ? manager.CheapestSlabs(random() % 5) : manager.SlabsBehindHoles();
          const int32_t left = manager.UsableWithout(given);
          manager.BeginGive(given);
          ASSERT_EQ(manager.usable_blocks(), left);
          while (manager.displaced_blocks() > manager.available_blocks()) {
            ASSERT_FALSE(chains.empty());
            chains.back().Release(manager);
            chains.pop_back();
          }
          const auto moves = manager.FinishGive();
          std::map<BlockId, BlockId> moved;
          for (const BlockMove& move : moves) {
            ASSERT_TRUE(moved.emplace(move.from, move.to).second);
            content[move.to] = content.at(move.from);
          }
          for (Chain& chain : chains) {
            for (BlockId& block : chain.blocks) {
              if (moved.contains(block)) block = moved[block];
            }
          }
          for (RegionIndex index : given) {
            ASSERT_TRUE(mapped[index.value()]);
            mapped[index.value()] = false;
          }
          break;
        }
      }
      manager.CheckInvariants();
      ASSERT_EQ(manager.mapped_slabs(), std::count(mapped.begin(), mapped.end(), true));
      std::set<BlockId> live;
      for (const Chain& chain : chains) {
        for (size_t i = 0; i < chain.blocks.size(); ++i) {
          ASSERT_TRUE(manager.usable(chain.blocks[i]));
          ASSERT_EQ(content.at(chain.blocks[i]),
                    std::vector(chain.tokens.begin(), chain.tokens.begin() + 2 * (i + 1)));
          live.insert(chain.blocks[i]);
        }
      }
      ASSERT_EQ(static_cast<int>(live.size()), manager.live_blocks());
    }
  }
}

}  // namespace
}  // namespace palimpsest
