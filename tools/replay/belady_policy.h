// Belady's optimum for a trace that is known in advance: the block that is needed last goes, and
// one that is needed later than all that are cached is not stored (L. A. Belady, "A study of
// replacement algorithms for a virtual-storage computer", 1966; declining to store: Mattson et al.,
// 1970). A block is needed no later than those behind it, so no online policy has more hits, in
// longest prefixes too.
#ifndef PALIMPSEST_TOOLS_REPLAY_BELADY_POLICY_H_
#define PALIMPSEST_TOOLS_REPLAY_BELADY_POLICY_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "broker/core/cache/eviction_policy.h"
#include "broker/core/cache/indexed_heap.h"

namespace palimpsest::replay {

class BeladyPolicy : public cache::EvictionPolicy {
 public:
  // The blocks of all requests that will come, numbered from 0 to distinct - 1, in their order. The
  // policy must then be told of exactly these.
  BeladyPolicy(absl::Span<const uint32_t> accesses, uint32_t distinct);

  absl::string_view name() const override { return "belady"; }
  void OnRequest(const cache::RequestInfo& request, const cache::Access& access) override;
  void OnInsert(cache::RequestId, cache::BlockHandle, cache::BlockHandle) override {}
  void OnEvictable(cache::BlockHandle block) override;
  void OnPinned(cache::BlockHandle block) override { evictable_.Remove(block); }
  std::optional<cache::BlockHandle> ChooseVictim(absl::Time now, cache::BlockHandle block,
                                                 bool may_refuse) override;
  void OnEvict(cache::BlockHandle block) override { evictable_.Remove(block); }

 private:
  std::vector<int64_t> next_;  // by access: the next one of the same block
  std::vector<int64_t> need_;  // by handle: the negated next access, so that the last one is least
  cache::IndexedHeap<int64_t> evictable_;
  size_t access_ = 0;
};

}  // namespace palimpsest::replay

#endif  // PALIMPSEST_TOOLS_REPLAY_BELADY_POLICY_H_
