// Which parts of KV blocks, by groups of heads (head_parts.h), a worker has put into tier 1, and
// which of them go below so that no more lie there than are to: those of the least worth
// (head_mass.h). Pure. Lossless: what goes comes back before its block is used.
//
// Blocks that one request used last idle together: they are a *run*, the end of the request's path
// behind what requests have used since. A store gives up a part only after those that hang on it,
// and as worth falls with the distance from a sequence's end, no end of a run's parts is worth less
// per byte than all of them. So a run's parts of one group compare by their mean worth
//
//   mean mass of the group's heads * 2^(-t / half_life) * mean over its parts of 1 / (1 + d /
//   scale)
//
// and leave from the end on, as many as there are too many. Parts on which those of another run
// hang wait for them. Masses are those that a runner has sampled, once there are kEnoughSamples,
// and those of the profile before.
//
// What is in tier 1 is what this object was told: a store may have moved or dropped parts by
// itself. Naming those costs a message. It knows a bounded number of blocks and forgets those first
// that have been idle longest; what is forgotten is the store's alone to move.
//
// Complexity: O(blocks of the call * groups), and O(log runs) for each part that comes, leaves or
// is named; a call of TakeDemotions names at most kMostDemotions ends of runs. Since the order of
// what idles does not change, nothing is compared anew. Not thread-safe.
#ifndef PALIMPSEST_WORKER_CORE_TIER_ONE_PARTS_H_
#define PALIMPSEST_WORKER_CORE_TIER_ONE_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/block_key.h"
#include "common/bytes.h"
#include "common/ids.h"
#include "worker/core/head_mass.h"
#include "worker/core/kv_store.h"

namespace palimpsest {

class TierOneParts {
 public:
  static constexpr int64_t kEnoughSamples = 20;
  static constexpr size_t kMostDemotions = 64;
  // Of a path; those behind them are not recorded.
  static constexpr size_t kMostPathBlocks = 16384;

  struct Options {
    std::vector<std::vector<int32_t>> groups;  // heads of each; 1 to kMostHeadGroups
    BlockKey root;                             // before a sequence's first block
    int32_t block_tokens = 0;
    Bytes part_bytes;  // what one takes in tier 1
    Bytes limit;       // of what parts are to take there
    // Known blocks, times groups.
    int64_t most_parts = int64_t{1} << 18;
    HeadWorth worth;
  };

  // Parts of one group are to leave tier 1: those of the chain's blocks from `first` on, as far as
  // they are there. The chain begins with its sequence's first block.
  struct Demotion {
    int32_t group = 0;
    BlockChain chain;
    int32_t first = 0;
  };

  // `profile`: of as many heads as the groups have.
  TierOneParts(Options options, HeadMass profile);

  // The request uses the full blocks of its sequence, from the first one on; again: more of them.
  void Begin(uint64_t request, const BlockChain& chain);
  // It has computed blocks that follow. One that is not running has ended with them.
  void Extend(uint64_t request, const BlockChain& chain, absl::Time now);
  // A part is in tier 1, or not (any more). Nothing if its block is not known.
  void Came(const BlockKey& block, int32_t group);
  void Left(const BlockKey& block, int32_t group);
  // Blocks that no other request uses idle from `now` on, which never goes back. Nothing if it does
  // not run.
  void End(uint64_t request, absl::Time now);
  void ForgetAll();

  // What is to leave now, the least worth first; counts as having left. `live`: null: none.
  std::vector<Demotion> TakeDemotions(const HeadMass* live);

  // In tier 1.
  int64_t parts() const { return parts_; }
  size_t known_blocks() const { return blocks_.size(); }

 private:
  using RunId = uint64_t;  // counts ends of requests
  struct Block {
    BlockKey key;
    Block* parent = nullptr;
    std::vector<TokenId> tokens;
    int32_t position = 0;
    int32_t children = 0;
    int32_t users = 0;         // running requests
    RunId run = 0;             // 0: in use
    uint64_t in_tier_one = 0;  // bit of each group
    // By group: children with parts there, their own or behind them.
    absl::InlinedVector<int32_t, 4> below;
  };
  // Of one group in a run.
  struct Share {
    int32_t parts = 0;
    double nearness = 0;        // sum
    Block* end = nullptr;       // whose part may leave next
    std::optional<double> key;  // in order_
  };
  struct Run {
    double since = 0;  // in half-lives
    int32_t path = 0;  // blocks of its sequence
    Block* last = nullptr;
    int32_t blocks = 0;
    absl::InlinedVector<Share, 4> shares;
  };
  using Path = std::vector<Block*>;
  using RunMap = absl::btree_map<RunId, Run>;

  size_t groups() const { return options_.groups.size(); }
  static bool Has(const Block& block, size_t group) {
    return (block.in_tier_one >> group & 1) != 0;
  }
  static bool Occupied(const Block& block, size_t group) {
    return Has(block, group) || block.below[group] > 0;
  }
  Block* Find(const BlockKey& key) const;
  static Path PathTo(Block* block);

  // Blocks of the chain, of which the first is the path's block `at`, join the path. Stops where
  // they cannot.
  void Continue(Path& path, const BlockChain& chain, size_t at);
  // Known or new; null: another block has the key, or there is no room.
  Block* Next(Block* parent, const BlockKey& key, absl::Span<const TokenId> tokens);
  void Use(Block& block);
  void Idle(const Path& path, absl::Time now);
  bool MakeRoom();

  void Set(Block& block, size_t group, bool in_tier_one);
  double NearnessIn(const Run& run, const Block& block) const;
  // The block's part counts in its run or no longer does.
  void Count(Run& run, const Block& block, size_t group, int32_t change);
  // Whether the block's part may leave has changed, maybe.
  void UpdateEnd(Block& block, size_t group);
  void Relist(RunId id, Run& run, size_t group);
  void RelistTouched();
  void Erase(RunMap::iterator run);

  std::vector<double> LogMasses(const HeadMass* live) const;
  Demotion Take(RunId id, size_t group, int64_t& too_many);

  const Options options_;
  const HeadMass profile_;
  const int64_t limit_;  // parts
  absl::flat_hash_map<BlockKey, std::unique_ptr<Block>> blocks_;
  absl::flat_hash_map<uint64_t, Path> requests_;
  RunMap runs_;  // the one idle longest first
  RunId last_run_ = 0;
  // By group, the least worth first; without the masses and the time that passes for all.
  std::vector<absl::btree_set<std::pair<double, RunId>>> order_;
  std::vector<RunId> touched_;  // to be listed anew
  int64_t parts_ = 0;
  absl::Time epoch_ = absl::InfinitePast();
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_TIER_ONE_PARTS_H_
