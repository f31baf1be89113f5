// What is known of a block that lies in a tier, and what a tier that outlives the broker stores
// with it.
#ifndef PALIMPSEST_BROKER_TIER_BLOCK_RECORD_H_
#define PALIMPSEST_BROKER_TIER_BLOCK_RECORD_H_

#include <cstdint>

#include "absl/time/time.h"
#include "common/block_identity.h"
#include "common/bytes.h"

namespace palimpsest {

struct BlockRecord {
  BlockIdentity id;
  // At least 1. Everything that a sequence needs to resume behind the block (every layer group,
  // scales, recurrent state), one after the other: all of it or none is there.
  Bytes length;
  // BlockChecksum of the key and the bytes.
  uint64_t checksum = 0;
  // From then on it is a miss.
  absl::Time expiry = absl::InfiniteFuture();

  friend bool operator==(const BlockRecord&, const BlockRecord&) = default;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_BLOCK_RECORD_H_
