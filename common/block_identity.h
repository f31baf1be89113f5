// What makes two KV blocks the same.
#ifndef PALIMPSEST_COMMON_BLOCK_IDENTITY_H_
#define PALIMPSEST_COMMON_BLOCK_IDENTITY_H_

#include <cstddef>
#include <string>
#include <vector>

#include "common/block_key.h"
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

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_BLOCK_IDENTITY_H_
