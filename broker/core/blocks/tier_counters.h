// What happened to one tenant's blocks in one tier. All that the node says about blocks, metrics,
// status and tests alike, is read from these.
//
// Threads: none; plain data.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_TIER_COUNTERS_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_TIER_COUNTERS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/bytes.h"

namespace palimpsest::blocks {

// Why a block was not taken into a tier or not brought from it.
enum class Refusal : uint8_t {
  kNoRoom,     // the budget is used by what is worth more, or by what cannot go now
  kCollision,  // another block has the key
  kNoMemory,   // T1: the machine had no memory for a chunk
  kWorthless,  // keeping it there would save less than it costs
  kBusy,       // too many transfers are under way
  kBroken,     // the tier is not serving
  kLate,       // it would not arrive by the deadline
};
inline constexpr size_t kRefusals = 7;

// "no_room", "collision", "no_memory", "worthless", "busy", "broken", "late".
absl::string_view RefusalName(Refusal refusal);

struct TierCounters {
  // Now.
  Bytes used;            // with what rounding takes, and what is being written
  Bytes capacity;        // the tenant's budget
  Bytes retained;        // of those used in T1: what clients' hints keep there
  uint64_t blocks = 0;   // that can be had
  uint64_t foreign = 0;  // of them: another node's, in a tier that they share; not in `used`

  // Ever, with foreign ones as they were found and lost. stored - removed == blocks.
  uint64_t stored = 0;
  uint64_t removed = 0;
  uint64_t foreign_stored = 0;  // of `stored`: those that were found
  // Blocks that an Acquire asked for and got from here. T1: those that were there when it came; a
  // lower tier: those that were promoted for it in time.
  uint64_t hits = 0;
  Bytes hit_bytes;
  uint64_t foreign_hits = 0;  // of `hits`: of blocks that another node had there

  // Copies from here into T1. started == done + failed + under way.
  uint64_t promotions_started = 0;
  uint64_t promotions_done = 0;
  uint64_t promotions_failed = 0;
  Bytes promoted_bytes;
  absl::Duration promotion_time;  // of those done, from the decision to the end
  // Of those done: gone from T1 without one use. All is known once they are gone or used.
  uint64_t promotions_wasted = 0;
  Bytes wasted_bytes;

  // Copies into here from a tier above. started == done + failed + under way.
  uint64_t demotions_started = 0;
  uint64_t demotions_done = 0;
  uint64_t demotions_failed = 0;
  Bytes demoted_bytes;

  std::array<uint64_t, kRefusals> refusals{};

  // Seconds saved per byte-second that a block must be worth to be taken in.
  double price = 0;
};

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_TIER_COUNTERS_H_
