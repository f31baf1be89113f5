// The blocks of the NVMe tier and their extents: who is in which state, what a snapshot has to
// hold, and how much is free. Pure logic, not thread-safe. A block is known by the first unit of
// its extent, its place.
//
//   kWriting ──► kQueued ◄──► kLogging ──► kDurable ──► kRemoving ──► gone
//     │   │        │ └────────────┴─────────────────────────▲
//     │   └────────┴──► kTransient ──► gone
//     └──► gone
//
// An extent is free again only in `gone`, so never while a record that names it may be durable.
#ifndef PALIMPSEST_BROKER_TIER_NVME_EXTENT_TABLE_H_
#define PALIMPSEST_BROKER_TIER_NVME_EXTENT_TABLE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "broker/tier/block_record.h"
#include "broker/tier/extent_allocator.h"
#include "broker/tier/nvme/nvme_format.h"

namespace palimpsest {

enum class ExtentState : uint8_t {
  kWriting,    // its bytes are on their way
  kQueued,     // written; its record waits, after an error perhaps not for the first time
  kLogging,    // its record is being written
  kDurable,    // served after a restart
  kRemoving,   // the record of its removal waits or is being written
  kTransient,  // it gets no record: it ends with this process
};

// What counts as using the device, in units. in_use + quarantined + free is the whole.
struct ExtentUsage {
  uint64_t in_use = 0;
  uint64_t quarantined = 0;  // not used again by this process
  uint64_t free = 0;
  uint64_t blocks = 0;
};

class ExtentTable {
 public:
  // `metadata_limit`: what the records of all blocks may take together.
  ExtentTable(uint64_t data_units, Bytes metadata_limit);

  // A block that was found at start; false if its extent is not free or its record has no room.
  bool Restore(const BlockRecord& record, uint64_t place);

  // Takes an extent, kWriting. ResourceExhausted, with what would have to be freed.
  absl::StatusOr<uint64_t> Begin(const BlockRecord& record);

  // Nothing if there is no such block.
  std::optional<ExtentState> StateOf(uint64_t place) const;

  // Legal transitions alone; others abort.
  void Move(uint64_t place, ExtentState to);

  // Ends a block. Aborts unless it is kWriting, kRemoving or kTransient.
  // `quarantine`: its extent is not used again.
  void End(uint64_t place, bool quarantine = false);

  // From now on no snapshot holds a block that the tenant has now.
  void Purge(const std::string& tenant);
  bool IsPurged(uint64_t place) const { return entries_.at(place).purged; }

  // The block's record as EncodePut made it.
  const std::string& EncodedOf(uint64_t place) const { return entries_.at(place).encoded; }
  const BlockKey& KeyOf(uint64_t place) const { return entries_.at(place).key; }

  // Adds records of durable blocks to a snapshot, from `*next` on in the order of places, at most
  // about `limit`; false when it has come to the end. `*next` is 0 at first.
  bool AddToSnapshot(uint64_t* next, Bytes limit, FrameWriter& writer) const;

  ExtentUsage usage() const;

  // Internal: whether the table's sums are those of its entries and of the allocator.
  absl::Status CheckConsistency() const;

 private:
  struct Entry {
    std::string encoded;
    BlockKey key;
    uint64_t units = 0;
    uint32_t tenant = 0;
    ExtentState state = ExtentState::kWriting;
    bool purged = false;
  };

  void Insert(const BlockRecord& record, Extent extent, ExtentState state, std::string encoded);
  uint32_t TenantNumber(const std::string& tenant);

  const uint64_t data_units_;
  const Bytes metadata_limit_;
  ExtentAllocator allocator_;
  absl::btree_map<uint64_t, Entry> entries_;
  absl::flat_hash_map<std::string, uint32_t> tenants_;
  Bytes metadata_;
  uint64_t used_units_ = 0;
  uint64_t quarantined_units_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_NVME_EXTENT_TABLE_H_
