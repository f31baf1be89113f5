// A round trip through one tier: blocks of random bytes go there, come back and are compared.
//
// Threads: the calls block, and may be made from several.
#ifndef PALIMPSEST_BROKER_BLOCKS_TIER_CHECK_H_
#define PALIMPSEST_BROKER_BLOCKS_TIER_CHECK_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "broker/tier/tier_store.h"
#include "common/bytes.h"
#include "common/clock.h"

namespace palimpsest {

struct TierCheck {
  // OK if every block came back with its bytes.
  absl::Status status;
  uint32_t blocks = 0;  // that did
  // All blocks at once, in bytes per second.
  double store_rate = 0;
  double load_rate = 0;
};

struct TierCheckOptions {
  Bytes block;
  uint32_t blocks = 0;
  absl::Duration patience;
  // Whose the blocks are: an enciphered tier keeps none of others.
  std::string tenant;
  // High half of their keys; the low one is random.
  uint64_t key_high = 0;
};

// A tier below T1. The blocks are removed afterwards, and expire if that is not possible.
TierCheck CheckStore(TierStore& store, const Clock& clock, const TierCheckOptions& options);

// T1: a chunk made for this alone, and given up again.
TierCheck CheckArena(const Clock& clock, const TierCheckOptions& options);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_TIER_CHECK_H_
