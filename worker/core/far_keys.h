// Which keys count as far from a token: those that lie behind the first tile of the sequence, to
// which many heads give weight whatever it says (attention sinks: Xiao et al., arXiv:2309.17453),
// and before the tile in which the token's recent window begins. Both ends are ends of tiles, and
// depend on the token's position alone.
#ifndef PALIMPSEST_WORKER_CORE_FAR_KEYS_H_
#define PALIMPSEST_WORKER_CORE_FAR_KEYS_H_

#include <algorithm>
#include <cstdint>

namespace palimpsest {

inline constexpr int32_t kFarKeyTile = 64;

// Keys kFarKeyTile .. the result - 1 are far from the token at `position`, which counts among its
// `recent_tokens`.
constexpr int32_t FarKeysEnd(int32_t position, int32_t recent_tokens) {
  const int32_t recent = position < recent_tokens ? 0 : position - recent_tokens + 1;
  return std::max(kFarKeyTile, recent / kFarKeyTile * kFarKeyTile);
}

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_FAR_KEYS_H_
