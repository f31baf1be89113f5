// What other nodes have in a tier that they share, as far as it is known here. Nothing of it counts
// against a budget, and nobody here removes it: to forget a block is all that can happen to it.
//
// Of more than `limit` blocks those that were found or used longest ago are forgotten. O(log n) per
// operation. Pure logic; the caller serializes.
#ifndef PALIMPSEST_BROKER_TIER_FOREIGN_CATALOG_H_
#define PALIMPSEST_BROKER_TIER_FOREIGN_CATALOG_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "broker/tier/block_record.h"
#include "broker/tier/tier_backend.h"

namespace palimpsest {

class ForeignCatalog {
 public:
  explicit ForeignCatalog(size_t limit) : limit_(limit) {}

  // Null if it is not known. Valid until the next call that changes something.
  const StoredBlock* Find(const BlockKey& key) const;

  struct Added {
    // False if the same block was known; then at most its expiry is another one.
    bool added = false;
    // Forgotten for it: another one with its key, and what is beyond the limit.
    std::vector<BlockRecord> forgotten;
  };
  Added Add(StoredBlock block);
  // It was used.
  void Touch(const BlockKey& key);
  // What was known of it.
  std::optional<BlockRecord> Forget(BlockKey key);

  // At most `limit` blocks that expire by `now`, the first ones first.
  std::vector<BlockKey> Expired(absl::Time now, size_t limit) const;
  absl::Time next_expiry() const;
  // O(all blocks).
  std::vector<BlockKey> OfTenant(const std::string& tenant) const;
  size_t size() const { return blocks_.size(); }

  absl::Status CheckConsistency() const;

 private:
  struct Entry {
    StoredBlock block;
    uint64_t used = 0;
  };

  const size_t limit_;
  uint64_t last_use_ = 0;
  absl::flat_hash_map<BlockKey, Entry> blocks_;
  absl::btree_set<std::pair<uint64_t, BlockKey>> by_use_;
  absl::btree_set<std::pair<absl::Time, BlockKey>> expiries_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_FOREIGN_CATALOG_H_
