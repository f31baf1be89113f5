// What moves the bytes of one tier. A TierStore (tier_store.h) owns one and does all the rest: it
// knows what is stored, compares identities, verifies checksums, bounds and orders what is under
// way, counts, measures and gives up on a tier that fails. So a back-end
//   - keeps no map of blocks: it gives each one a place, which is handed back to it later;
//   - need not be correct about bytes: wrong ones are noticed by their checksum;
//   - never refuses for lack of budget, only for what its medium says.
//
// Order of calls: Open once, then anything, then Close once. Reads and writes of one place never
// overlap with each other nor with its Remove.
//
// Threads: one thread at a time calls; no call but Open and Close may wait for I/O. A `done` is
// called exactly once per operation, from any thread, also from within the call itself, and only
// when the medium can no longer touch the bytes or the place: the store keeps both pinned until
// then, however late that is. References and spans given to an operation are valid until its
// `done`.
#ifndef PALIMPSEST_BROKER_TIER_TIER_BACKEND_H_
#define PALIMPSEST_BROKER_TIER_TIER_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "broker/tier/block_record.h"
#include "common/block_key.h"
#include "common/bytes.h"
#include "common/strong_int.h"

namespace palimpsest {

// Where a block lies, in whatever way its back-end counts: an offset, or nothing if the key tells.
using TierPlace = StrongInt<struct TierPlaceTag, uint64_t>;

// Whose the scratch blocks are by which a store probes its tier. No tenant of a configuration has
// such a name.
inline constexpr char kProbeTenant[] = ".probe";

struct StoredBlock {
  BlockRecord record;
  TierPlace place;
};

// What a look at the blocks of other nodes in a shared tier told.
struct Discovery {
  struct Gone {
    std::string tenant;
    BlockKey key;

    friend bool operator==(const Gone&, const Gone&) = default;
  };
  // Not told before, or not as it is now.
  std::vector<StoredBlock> found;
  // Told before. They come first: one of `found` may stand in its place.
  std::vector<Gone> gone;
  // Everything has been looked at since the last look that said so.
  bool complete = false;
};

// Errors of operations: NotFound (it is not there any more: a miss, no fault of the tier),
// ResourceExhausted (the medium is full: no fault either), AlreadyExists (another node has stored
// the block in a shared tier: no fault either), FailedPrecondition (it takes no blocks of this
// tenant: no fault either), DataLoss (what is there is damaged: treated as a wrong checksum); all
// others count as a failure of the tier.
class TierBackend {
 public:
  enum class RemoveReason {
    kUnwanted,  // evicted, expired, purged or never published: the place may be used again
    kCorrupt,  // its bytes were not those written: the place must not be used again by this process
  };

  using Done = absl::AnyInvocable<void(absl::Status)>;
  using Written = absl::AnyInvocable<void(absl::StatusOr<TierPlace>)>;
  using Found = absl::AnyInvocable<void(absl::StatusOr<StoredBlock>)>;
  using Discovered = absl::AnyInvocable<void(absl::StatusOr<Discovery>)>;

  virtual ~TierBackend() = default;

  // For metrics, logs and `palctl`: "nvme", "file-system", "cxl (emulated)".
  virtual std::string name() const = 0;

  // What a block of this length takes of the tier's capacity: with padding and headers.
  virtual Bytes Footprint(Bytes length) const = 0;

  // Makes the tier ready and says what an earlier process left in it that is safe to serve: whole
  // blocks whose bytes reached the medium before their records did. May block.
  virtual absl::StatusOr<std::vector<StoredBlock>> Open() = 0;

  // Returns when every operation has called its `done`. May block.
  virtual void Close() = 0;

  // Stores record.length bytes. A tier that outlives the process forgets a block that was under way
  // when the process ended. After an error nothing of the block is left.
  virtual void Write(const BlockRecord& record, absl::Span<const std::byte> from, Written done) = 0;

  // Fills `to`, record.length bytes of any alignment. DataLoss if fewer are there.
  virtual void Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
                    Done done) = 0;

  // Forgets a block, also over a restart, before its place is used for another one. NotFound is a
  // success.
  virtual void Remove(const BlockRecord& record, TierPlace place, RemoveReason reason,
                      Done done) = 0;

  // After OK no block of the tenant whose Write began before this call is left after a restart,
  // even if the machine stops before the store has removed each of them.
  virtual void Purge(const std::string& tenant, Done done) = 0;

  // Whether other nodes store blocks in the same place, so that what the store does not know may be
  // there all the same.
  virtual bool shared() const { return false; }
  // Looks for such a block. NotFound if there is none. Only if shared().
  virtual void Find(const BlockIdentity& id, Found done) {
    (void)id;
    done(absl::NotFoundError("the tier is not shared"));
  }
  // Looks at some of what other nodes have stored, and goes on there the next time: a bounded
  // amount of work. What it tells is a hint; Read finds out. One at a time; only if shared().
  virtual void Discover(Discovered done) { done(absl::NotFoundError("the tier is not shared")); }
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_TIER_BACKEND_H_
