// What is known of a block when a request has used it, cut into classes: the inputs of the reuse
// predictor. Which features predict reuse, and what each is worth: docs/policies.md.
//
// Plain data. Threads: none.
#ifndef PALIMPSEST_BROKER_CORE_REUSE_REUSE_CLASS_H_
#define PALIMPSEST_BROKER_CORE_REUSE_REUSE_CLASS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/time/time.h"
#include "broker/core/cache/eviction_policy.h"

namespace palimpsest::reuse {

enum class Feature : uint8_t {
  kLeftBehind,  // how much of its request's path later requests took without it
  kFromTail,    // distance to the end of the path
  kUses,        // requests that used the block while it was known
  kOrigin,      // how the request began (Origin), and whether the block was new to it
  kEnding,      // how the request ended, and whether the client said that it was the last turn
  kOutput,      // length of the answer
  kLength,      // blocks of the path
  kGap,         // idle time before this use
  kTurns,       // requests of the conversation so far
  kNew,         // blocks that the request added
  kExpected,    // the client's hint of its idle time
  kType,        // what the text is (cache::BlockType)
};
inline constexpr size_t kFeatures = 12;
// Values of a feature are below this.
inline constexpr size_t kFeatureValues = 16;

class ReuseClass {
 public:
  uint8_t operator[](Feature feature) const { return values_[static_cast<size_t>(feature)]; }
  // Values beyond the last one are cut to it.
  void Set(Feature feature, uint64_t value) {
    values_[static_cast<size_t>(feature)] =
        static_cast<uint8_t>(value < kFeatureValues ? value : kFeatureValues - 1);
  }
  // 4 bits a feature.
  uint64_t Packed() const;

  friend bool operator==(const ReuseClass&, const ReuseClass&) = default;

 private:
  std::array<uint8_t, kFeatures> values_{};
};

// How a request's path relates to those before it.
enum class Origin : uint8_t {
  kNew,           // shares its first block at most
  kBranch,        // leaves an earlier path before its end
  kContinuation,  // goes on from an earlier path's end
};

// Distances to the path's end at which kFromTail changes: the last block, which a continuation
// rarely repeats (it is cut in the middle of a text), the one before, a few more, the rest.
inline constexpr std::array<uint32_t, 3> kFromTailSteps = {1, 2, 6};

uint64_t FromTailClass(uint32_t from_tail);
uint64_t UsesClass(uint32_t uses);
uint64_t GapClass(std::optional<absl::Duration> gap);
uint64_t OutputClass(int64_t tokens);
// Of a count of blocks: its power of two.
uint64_t CountClass(uint64_t blocks);
uint64_t TurnsClass(uint32_t turns);
uint64_t EndingClass(cache::Ending ending, bool last_turn);
uint64_t ExpectedClass(std::optional<absl::Duration> expected_idle);
// Of the blocks that remain of a path of `length` when requests took its first `taken`.
uint64_t LeftBehindClass(uint32_t taken, uint32_t length);

}  // namespace palimpsest::reuse

#endif  // PALIMPSEST_BROKER_CORE_REUSE_REUSE_CLASS_H_
