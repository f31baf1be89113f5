// What is known of a block that lies in a tier, and what a tier that outlives the broker stores
// with it.
#ifndef PALIMPSEST_BROKER_TIER_BLOCK_RECORD_H_
#define PALIMPSEST_BROKER_TIER_BLOCK_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/block_key.h"
#include "common/bytes.h"
#include "common/ids.h"

namespace palimpsest {

inline constexpr size_t kMaxBlockTokens = 4096;
inline constexpr size_t kMaxTenantName = 128;

// Two blocks are the same only if all of this is equal. Keys alone may collide.
struct BlockIdentity {
  BlockKey key;
  // Of the block before it; all zero for the first of a sequence.
  BlockKey parent;
  // At most kMaxBlockTokens.
  std::vector<TokenId> tokens;
  // The tenant's name in the configuration, 1 .. kMaxTenantName bytes.
  std::string tenant;

  friend bool operator==(const BlockIdentity&, const BlockIdentity&) = default;
};

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
