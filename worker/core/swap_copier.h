// Moves KV blocks between the KV region and host memory, beside the steps: an arena of the copier's
// own, or memory of a block store. One implementation per compute back-end.
//
// A transfer into the KV region goes layer by layer, so that a step may follow behind it: with
// `awaited`, AwaitLayer and LayerEvents hold steps up until a layer's KV is there.
//
// What goes to a block store gets a checksum, of the bytes in the KV region. What comes from one is
// checked in the KV region, before its last layer is let through.
//
// Ownership: until a transfer is reported as ended, nobody else writes the blocks and slots that it
// reads, or touches those that it writes, but for steps that the layers hold up.
// Threads: Start, TakeEnded and AwaitAll belong to the engine's thread; AwaitLayer and LayerEvents
// may be called from the runner's. Start does not wait for copies.
#ifndef PALIMPSEST_WORKER_CORE_SWAP_COPIER_H_
#define PALIMPSEST_WORKER_CORE_SWAP_COPIER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/block_key.h"
#include "common/ids.h"
#include "common/strong_int.h"

namespace palimpsest {

// A place of one KV block in the arena.
using SwapSlot = StrongInt<struct SwapSlotTag, uint32_t>;
// Counts the transfers of one scheduler from 1.
using SwapId = StrongInt<struct SwapIdTag, uint64_t>;

struct SwapMove {
  BlockId block;
  // Where the block lies in host memory: in this slot of the arena, unless `memory` is set.
  SwapSlot slot = {};
  // A block store's; with the block's key, and from there the checksum that it must have
  // (common/block_checksum.h).
  std::byte* memory = nullptr;
  BlockKey key = {};
  uint64_t checksum = 0;
};

struct SwapTransfer {
  SwapId id;
  enum class Direction : uint8_t { kOut, kIn };  // from the KV region, into it
  Direction direction = Direction::kOut;
  bool awaited = false;
  bool store = false;  // to or from a block store
  std::vector<SwapMove> moves;
};

struct SwapEnded {
  SwapId id;
  SwapTransfer::Direction direction = SwapTransfer::Direction::kOut;
  bool awaited = false;
  bool store = false;
  // Not OK: what the transfer wrote is worthless, but for `intact` blocks.
  absl::Status status;
  int32_t blocks = 0;
  absl::Duration took;
  // From the KV region to a block store: of each block.
  std::vector<uint64_t> checksums;
  // Into it from a block store: so many blocks, from the first on, have their checksums; DataLoss
  // if these are not all.
  int32_t intact = 0;
};

class SwapCopier {
 public:
  virtual ~SwapCopier() = default;

  virtual void Start(SwapTransfer transfer) = 0;
  // Those that ended since the last call. An awaited one is here before its last layer is passed.
  virtual std::vector<SwapEnded> TakeEnded() = 0;
  // Blocks until everything that was started has ended.
  virtual void AwaitAll() = 0;
  // `wakeup` is called on any thread when a transfer has ended; null: nobody.
  virtual void SetWakeup(std::function<void()> wakeup) = 0;
  // How long steps have waited for layers, as far as this is known here.
  virtual absl::Duration waited() const = 0;

  // Blocks until this layer's KV of all awaited transfers is there. The first failure of one that
  // TakeEnded has not told yet: the step must be abandoned.
  virtual absl::Status AwaitLayer(int layer) = 0;
  // The form for runners whose kernels run later than they are submitted, as
  // ParameterGate::StageEvents: events[r] is what kernels of rank r have to wait for, null for
  // nothing; an event that is there already is waited for, too.
  virtual absl::Status LayerEvents(int layer, absl::Span<void*> events) {
    (void)events;
    return AwaitLayer(layer);
  }
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SWAP_COPIER_H_
