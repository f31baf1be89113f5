// Identifiers shared by the processes of a node. See ARCHITECTURE.md for the vocabulary.
#ifndef PALIMPSEST_COMMON_IDS_H_
#define PALIMPSEST_COMMON_IDS_H_

#include <cstdint>

#include "common/strong_int.h"

namespace palimpsest {

// A slab of the broker's pool: 0 .. pool size in slabs - 1. A retired slab keeps its id.
using SlabId = StrongInt<struct SlabIdTag, uint32_t>;

// One worker's attachment to the broker. Never reused, also not by the next broker generation.
using SessionId = StrongInt<struct SessionIdTag, uint64_t>;

// Counts the transitions of ownership of one pool; the high 32 bits are the broker's generation, so
// that an epoch of a broker that died is always smaller than one of its successor.
using Epoch = StrongInt<struct EpochTag, uint64_t>;

// One Grant or Revoke exchange of a session.
using GrantId = StrongInt<struct GrantIdTag, uint64_t>;
using RevokeId = StrongInt<struct RevokeIdTag, uint64_t>;
// One SetRotation exchange.
using RotationId = StrongInt<struct RotationIdTag, uint64_t>;
// One turn of a session under temporal sharing, from TakeTurn to its end.
using TurnId = StrongInt<struct TurnIdTag, uint64_t>;

// Index of a slab-sized place in a worker's parameter region or KV region.
using RegionIndex = StrongInt<struct RegionIndexTag, uint32_t>;

// A KV block of a worker's KV region (the unit of the block table). Block 0 is the null block.
using BlockId = StrongInt<struct BlockIdTag, uint32_t>;

// A token of a model's vocabulary.
using TokenId = int32_t;

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_IDS_H_
