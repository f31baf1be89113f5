// What lies in one tier: each block's record, place and state, the room that it takes of the tier's
// and its tenant's budget, and when it expires.
//
// A block is added (kWriting), published (kReady), condemned (kRemoving: never loaded again) and
// erased. It is handed out for removal when it was condemned and no load reads it any more. A block
// that is condemned while it is written is handed out after it was written, or erased if that
// failed.
//
// Entries stay where they are until they are erased or quarantined. O(log n) per operation. Pure
// logic; the caller serializes.
#ifndef PALIMPSEST_BROKER_TIER_TIER_CATALOG_H_
#define PALIMPSEST_BROKER_TIER_TIER_CATALOG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "broker/tier/block_record.h"
#include "broker/tier/tier_backend.h"

namespace palimpsest {

class TierCatalog {
 public:
  enum class State { kWriting, kReady, kRemoving };

  struct Entry {
    BlockRecord record;
    TierPlace place;
    Bytes footprint;
    State state = State::kWriting;
    int loads = 0;
    bool condemned = false;
    TierBackend::RemoveReason reason = TierBackend::RemoveReason::kUnwanted;
    int failed_removals = 0;
  };

  explicit TierCatalog(Bytes capacity) : capacity_(capacity) {}

  // Null if there is none.
  Entry* Find(const BlockKey& key);
  const Entry* Find(const BlockKey& key) const;

  // A block that is about to be written. AlreadyExists, ResourceExhausted.
  absl::StatusOr<Entry*> Add(const BlockRecord& record, Bytes footprint);
  // A block that an earlier process left: ready at once, whatever the budget is. AlreadyExists.
  absl::StatusOr<Entry*> Adopt(const StoredBlock& block, Bytes footprint);

  // It was written: true if it can be loaded from now on, false if it was condemned meanwhile.
  bool Publish(Entry* entry, TierPlace place);
  void BeginLoad(Entry* entry) { ++entry->loads; }
  void EndLoad(Entry* entry);
  // True if it could be loaded until now. The reason kCorrupt stays.
  bool Condemn(Entry* entry, TierBackend::RemoveReason reason);

  // The next one whose removal may begin, or null.
  Entry* TakeRemovable();
  // Its removal failed: it will be handed out again.
  void PutBack(Entry* entry);
  bool has_removable() const { return !removable_.empty(); }

  void Erase(Entry* entry);
  // Forgets the block, but not the room that it takes.
  void Quarantine(Entry* entry);
  // Room that is taken by nothing that is known.
  void AddQuarantined(Bytes footprint);

  // At most `limit` ready blocks that expire by `now`, the first ones first.
  std::vector<Entry*> Expired(absl::Time now, size_t limit) const;
  absl::Time next_expiry() const;
  std::vector<Entry*> OfTenant(const std::string& tenant) const;
  std::vector<BlockRecord> Ready() const;

  void set_capacity(Bytes capacity) { capacity_ = capacity; }
  void SetLimit(const std::string& tenant, Bytes limit);
  Bytes capacity() const { return capacity_; }
  Bytes used() const { return used_; }
  Bytes quarantined() const { return quarantined_; }
  uint64_t ready() const { return ready_; }
  Bytes UsedBy(const std::string& tenant) const;
  Bytes LimitOf(const std::string& tenant) const;
  uint64_t ReadyOf(const std::string& tenant) const;

  // Recounts everything. O(n); for tests and the operator's doctor.
  absl::Status CheckConsistency() const;

 private:
  struct Tenant {
    Bytes used;
    Bytes limit = kUnlimited;
    uint64_t ready = 0;
    absl::flat_hash_set<Entry*> entries;
  };
  static constexpr Bytes kUnlimited{INT64_MAX};

  absl::StatusOr<Entry*> Insert(const BlockRecord& record, Bytes footprint);
  void MakeReady(Entry* entry);
  // As Erase, but the room stays taken.
  void Drop(Entry* entry);

  Bytes capacity_;
  Bytes used_;
  Bytes quarantined_;
  uint64_t ready_ = 0;
  absl::flat_hash_map<BlockKey, std::unique_ptr<Entry>> entries_;
  absl::flat_hash_map<std::string, Tenant> tenants_;
  // Of ready blocks.
  absl::btree_set<std::pair<absl::Time, BlockKey>> expiries_;
  std::vector<Entry*> removable_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_TIER_CATALOG_H_
