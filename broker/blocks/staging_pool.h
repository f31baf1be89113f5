// Memory that blocks pass through on their way between tiers: a fixed amount, faulted in at the
// start, cut into buffers that are aligned to pages, so that disks transfer without copying.
//
// Thread-safe; Await alone blocks. Buffers, and the memory, may outlive the pool: a medium that
// never answers keeps what it may still touch.
#ifndef PALIMPSEST_BROKER_BLOCKS_STAGING_POOL_H_
#define PALIMPSEST_BROKER_BLOCKS_STAGING_POOL_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/tier/tier_store.h"
#include "common/bytes.h"

namespace palimpsest {

class StagingPool {
 public:
  // ResourceExhausted if there is not so much memory. `size` is a multiple of 2 MiB.
  static absl::StatusOr<std::unique_ptr<StagingPool>> Make(Bytes size);

  // A buffer of that many bytes, from 1 on, which goes back when the last copy of its pin does.
  // Waits for room; DeadlineExceeded after `patience`, Cancelled once the pool was closed,
  // ResourceExhausted for more than the whole pool.
  absl::StatusOr<PinnedBytes<std::byte>> Await(Bytes length, absl::Duration patience);

  // Ends all waiting, now and from now on.
  void Close();

  // What is not in use.
  Bytes free() const;
  Bytes size() const { return size_; }

 private:
  class Memory;

  StagingPool(Bytes size, std::shared_ptr<Memory> memory)
      : size_(size), memory_(std::move(memory)) {}

  const Bytes size_;
  const std::shared_ptr<Memory> memory_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_STAGING_POOL_H_
