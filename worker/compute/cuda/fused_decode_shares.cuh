// What the kernel behind fused_decode.h works on, and how that is shared out: blocks of heads among
// thread blocks and their warps, shared memory among warps.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_SHARES_CUH_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_SHARES_CUH_

#include <cstdint>

namespace palimpsest::cuda::fused_decode {

inline constexpr int kTokens = 16;  // of a block
inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kRowBytes = 128;
// Units of a warp, on average, below which fewer thread blocks share the work.
inline constexpr int kLeastUnits = 2;
// Units of a warp, on average, up to which heads are better not shared across thread blocks.
inline constexpr int kShortUnits = 6;
inline constexpr float kLog2E = 1.4426950408889634f;

template <int head_dim>
struct Shape {
  static constexpr int kHeadDim = head_dim;
  static constexpr int kSteps = head_dim / 16;   // of 16 dimensions
  static constexpr int kHalves = head_dim / 64;  // rows of 64 dimensions per token
  static constexpr int kPlaneBytes = kHalves * kTokens * kRowBytes;
  static constexpr int kSlotBytes = 2 * kPlaneBytes;
  static constexpr int kSlots = 192 * 1024 / kWarps / kSlotBytes;
  // A partial result: kSteps float4 of each lane, then largest scores and sums of two heads.
  static constexpr int kPartialVectors = (kSteps + 1) * 32;
  // Shared memory: slots, a partial result of each warp but the first, one barrier and one
  // description for each slot, then indptr.
  static constexpr int kHeadOffset = kWarps * kSlots * kSlotBytes;
  static constexpr int kBarrierOffset = kHeadOffset + (kWarps - 1) * kPartialVectors * 16;
  static constexpr int kUnitOffset = kBarrierOffset + kWarps * kSlots * 8;
  static constexpr int kIndptrOffset = kUnitOffset + kWarps * kSlots * 16;
};

// One block of one head of a sequence.
struct Unit {
  int32_t sequence;
  int16_t head;    // KV head
  int16_t absent;  // rows before the first token
  int32_t block;   // of the sequence
  int32_t blocks;
};

// How the list of units is shared out among thread blocks, and a block's share among its warps.
struct Shares {
  int64_t units;
  int32_t blocks;
  int32_t block;

  __device__ int64_t Begin(int32_t of_block) const { return units * of_block / blocks; }
  __device__ int64_t BeginOfWarp(int32_t warp) const {
    const int64_t begin = Begin(block);
    return begin + (Begin(block + 1) - begin) * warp / kWarps;
  }
  __device__ int32_t BlockOf(int64_t unit) const {
    return static_cast<int32_t>(((unit + 1) * blocks - 1) / units);
  }
};

// As many blocks as there are, if each has work for its warps. Fewer, so that each has whole heads,
// where heads are about as long as each other and that leaves few blocks idle or all with little.
__device__ inline int32_t BlocksFor(int64_t units, int32_t heads) {
  const auto most = static_cast<int32_t>(gridDim.x);
  const int64_t worth = units / (kWarps * kLeastUnits);
  const auto wanted = static_cast<int32_t>(min(max(worth, int64_t{1}), int64_t{most}));
  const int32_t each = (heads + most - 1) / most;
  const int32_t whole = (heads + each - 1) / each;
  const bool suits = whole * 8 >= wanted * 7 || units <= int64_t{whole} * kWarps * kShortUnits;
  return suits ? whole : wanted;
}

}  // namespace palimpsest::cuda::fused_decode

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_SHARES_CUH_
