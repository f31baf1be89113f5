// XXH3-64 of long inputs with the default secret and seed 0, split into its eight accumulators,
// which do not depend on each other until the end: eight threads of a GPU (or eight calls on a CPU,
// for tests) compute one lane each.
//
// The algorithm is XXH3's (Yann Collet,
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_XXH3_LANE_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_XXH3_LANE_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define PALIMPSEST_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PALIMPSEST_HOST_DEVICE inline
#endif

namespace palimpsest {
namespace xxh3 {

constexpr int kLanes = 8;
constexpr int kStripeBytes = 64;
constexpr int kStripesPerBlock = 16;
constexpr int kBlockBytes = kStripeBytes * kStripesPerBlock;
constexpr size_t kShortestInput = 241;

// The default secret, as little-endian words.
#define PALIMPSEST_XXH3_SECRET                                                                  \
  {                                                                                             \
    0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL, 0x1f67b3b7a4a44072ULL, \
        0x78e5c0cc4ee679cbULL, 0x2172ffcc7dd05a82ULL, 0x8e2443f7744608b8ULL,                    \
        0x4c263a81e69035e0ULL, 0xcb00c391bb52283cULL, 0xa32e531b8b65d088ULL,                    \
        0x4ef90da297486471ULL, 0xd8acdea946ef1938ULL, 0x3f349ce33f76faa8ULL,                    \
        0x1d4f0bc7c7bbdcf9ULL, 0x3159b4cd4be0518aULL, 0x647378d9c97e9fc8ULL,                    \
        0xc3ebd33483acc5eaULL, 0xeb6313faffa081c5ULL, 0x49daf0b751dd0d17ULL,                    \
        0x9e68d429265516d3ULL, 0xfca1477d58be162bULL, 0xce31d07ad1b8f88fULL,                    \
        0x280416958f3acb45ULL, 0x7e404bbbcafbd7afULL                                            \
  }

constexpr uint32_t kPrime32_1 = 0x9E3779B1U;
constexpr uint32_t kPrime32_2 = 0x85EBCA77U;
constexpr uint32_t kPrime32_3 = 0xC2B2AE3DU;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87ULL;
constexpr uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4FULL;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9ULL;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63ULL;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5ULL;

struct Words {
  uint64_t own;
  uint64_t neighbour;
};

// The lane's word of a stripe and the other one of its 16 bytes. `stripe` is aligned to 16 bytes.
PALIMPSEST_HOST_DEVICE Words Load(const unsigned char* stripe, int lane) {
#if defined(__CUDA_ARCH__)
  const ulonglong2 pair = *reinterpret_cast<const ulonglong2*>(stripe + 16 * (lane / 2));
  return lane % 2 == 0 ? Words{pair.x, pair.y} : Words{pair.y, pair.x};
#else
  Words words;
  memcpy(&words.own, stripe + 8 * lane, 8);
  memcpy(&words.neighbour, stripe + 8 * (lane ^ 1), 8);
  return words;
#endif
}

// What is hashed: stripes by their offset. All of it is there.
struct Whole {
  const unsigned char* data;

  PALIMPSEST_HOST_DEVICE Words Stripe(size_t offset, int lane) const {
    return Load(data + offset, lane);
  }
};

// Only the first `own` bytes are, a multiple of 16; zero bytes follow.
struct Padded {
  const unsigned char* data;
  size_t own;

  PALIMPSEST_HOST_DEVICE Words Stripe(size_t offset, int lane) const {
    return offset + 16 * (lane / 2) < own ? Load(data + offset, lane) : Words{0, 0};
  }
};

PALIMPSEST_HOST_DEVICE uint64_t Initial(int lane) {
  switch (lane) {
    case 0:
      return kPrime32_3;
    case 1:
      return kPrime64_1;
    case 2:
      return kPrime64_2;
    case 3:
      return kPrime64_3;
    case 4:
      return kPrime64_4;
    case 5:
      return kPrime32_2;
    case 6:
      return kPrime64_5;
    default:
      return kPrime32_1;
  }
}

PALIMPSEST_HOST_DEVICE uint64_t Step(uint64_t accumulator, const Words& words, uint64_t secret) {
  const uint64_t key = words.own ^ secret;
  return accumulator + words.neighbour + (key & 0xffffffff) * (key >> 32);
}

// Bytes offset .. offset + 8 of the secret.
PALIMPSEST_HOST_DEVICE uint64_t SecretAt(const uint64_t* secret, int offset) {
  const int shift = 8 * (offset % 8);
  const uint64_t low = secret[offset / 8] >> shift;
  return shift == 0 ? low : low | secret[offset / 8 + 1] << (64 - shift);
}

// What lane 0 .. 7 ends with. `size` is a multiple of 16 and at least kShortestInput, the bytes of
// `input` aligned to 16 bytes.
template <typename Input>
PALIMPSEST_HOST_DEVICE uint64_t Accumulate(const uint64_t* secret, const Input& input, size_t size,
                                           int lane) {
  uint64_t keys[kStripesPerBlock];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int s = 0; s < kStripesPerBlock; ++s) keys[s] = secret[lane + s];
  uint64_t accumulator = Initial(lane);
  const size_t blocks = (size - 1) / kBlockBytes;
  const uint64_t scramble = secret[kStripesPerBlock + lane];
  size_t offset = 0;
  for (size_t b = 0; b < blocks; ++b) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int s = 0; s < kStripesPerBlock; ++s) {
      accumulator = Step(accumulator, input.Stripe(offset + s * kStripeBytes, lane), keys[s]);
    }
    accumulator = (accumulator ^ (accumulator >> 47) ^ scramble) * kPrime32_1;
    offset += kBlockBytes;
  }
  const size_t rest = size - blocks * kBlockBytes;
  const int stripes = static_cast<int>((rest - 1) / kStripeBytes);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int s = 0; s < kStripesPerBlock; ++s) {
    if (s < stripes) {
      accumulator = Step(accumulator, input.Stripe(offset + s * kStripeBytes, lane), keys[s]);
    }
  }
  return Step(accumulator, input.Stripe(offset + rest - kStripeBytes, lane),
              SecretAt(secret, 121 + 8 * lane));
}

// The part of the hash that lanes 2 * pair and 2 * pair + 1 give.
PALIMPSEST_HOST_DEVICE uint64_t MergePair(const uint64_t* secret, uint64_t even, uint64_t odd,
                                          int pair) {
  const uint64_t a = even ^ SecretAt(secret, 11 + 16 * pair);
  const uint64_t b = odd ^ SecretAt(secret, 19 + 16 * pair);
#if defined(__CUDA_ARCH__)
  return (a * b) ^ __umul64hi(a, b);
#else
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}

// `pairs`: the sum of the four MergePair.
PALIMPSEST_HOST_DEVICE uint64_t Finish(uint64_t pairs, size_t size) {
  uint64_t hash = size * kPrime64_1 + pairs;
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9ULL;
  return hash ^ (hash >> 32);
}

}  // namespace xxh3
}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_XXH3_LANE_H_
