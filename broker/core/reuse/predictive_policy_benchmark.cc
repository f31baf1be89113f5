// What learning and deciding cost for each block of a path, in a cache of a million blocks that is
// full: conversations of some turns, each longer than the one before. Includes BlockCache.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "broker/core/cache/block_cache.h"
#include "broker/core/cache/score_policies.h"
#include "broker/core/reuse/predictive_policy.h"

namespace palimpsest::reuse {
namespace {

constexpr size_t kCapacity = size_t{1} << 20;

class Traffic {
 public:
  Traffic(std::unique_ptr<cache::EvictionPolicy> policy, size_t blocks)
      : cache_({.capacity = kCapacity, .may_refuse = true, .store_at_end = true},
               std::move(policy)),
        blocks_(blocks) {
    while (cache_.cached() < kCapacity) Turn();
    for (int i = 0; i < 2000; ++i) Turn();
  }

  // Blocks of the path.
  size_t Turn() {
    now_ += absl::Milliseconds(200);
    if (conversations_.size() < 4096 || random_() % 4 == 0) {
      Conversation fresh{.key = ++keys_, .length = 0};
      if (conversations_.size() < 4096) {
        conversations_.push_back(fresh);
      } else {
        conversations_[random_() % conversations_.size()] = fresh;
      }
    }
    Conversation& conversation = conversations_[random_() % conversations_.size()];
    conversation.length = conversation.length % (3 * blocks_) + blocks_ / 2;
    path_.clear();
    for (size_t i = 0; i < conversation.length; ++i) path_.push_back({conversation.key, i});
    const cache::RequestId id(++requests_);
    cache_.Begin({.id = id, .arrival = now_}, path_);
    cache_.End({.id = id,
                .time = now_,
                .how = static_cast<cache::Ending>(random_() % 3),
                .output_tokens = static_cast<int64_t>(random_() % 1000)});
    return path_.size();
  }

 private:
  struct Conversation {
    uint64_t key = 0;
    size_t length = 0;
  };

  cache::BlockCache cache_;
  const size_t blocks_;
  std::mt19937 random_{1};
  std::vector<Conversation> conversations_;
  std::vector<BlockKey> path_;
  absl::Time now_ = absl::UnixEpoch();
  uint64_t keys_ = 0;
  uint64_t requests_ = 0;
};

template <typename Policy>
void BM_Block(benchmark::State& state) {
  Traffic traffic(std::make_unique<Policy>(), static_cast<size_t>(state.range(0)));
  int64_t blocks = 0;
  for (auto unused : state) blocks += static_cast<int64_t>(traffic.Turn());
  state.SetItemsProcessed(blocks);
}
// By a typical path's blocks.
BENCHMARK(BM_Block<PredictivePolicy>)->Arg(24)->Arg(256)->Arg(1600);
BENCHMARK(BM_Block<cache::LruPolicy>)->Arg(24)->Arg(256)->Arg(1600);

}  // namespace
}  // namespace palimpsest::reuse

BENCHMARK_MAIN();
