// The name of a KV block: 128 bits of a hash that covers every token before and in the block. Two
// blocks may share a key by accident or by intent, so whoever finds one compares the parent's key
// and the tokens as well: a collision is a miss.
#ifndef PALIMPSEST_COMMON_BLOCK_KEY_H_
#define PALIMPSEST_COMMON_BLOCK_KEY_H_

#include <compare>
#include <cstdint>
#include <utility>

namespace palimpsest {

struct BlockKey {
  uint64_t high = 0;
  uint64_t low = 0;

  friend auto operator<=>(const BlockKey&, const BlockKey&) = default;

  template <typename H>
  friend H AbslHashValue(H state, const BlockKey& key) {
    return H::combine(std::move(state), key.high, key.low);
  }
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_BLOCK_KEY_H_
