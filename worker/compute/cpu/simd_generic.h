// Sixteen floats in plain C++, for x86 without AVX2, and the definition of what the operations in
// simd_avx512.h and simd_avx2.h mean: every build of the kernels gives the same bits.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_SIMD_GENERIC_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_SIMD_GENERIC_H_

#include <cstddef>
#include <cstdint>

#include "common/e4m3.h"

#define PALIMPSEST_INLINE static inline __attribute__((always_inline))

namespace palimpsest::generic {

inline constexpr int kAccumulators = 6;
inline constexpr int kAttentionRows = 3;
inline constexpr int kAttentionVectors = 2;

struct F32x16 {
  float v[16];
};

template <typename F>
PALIMPSEST_INLINE F32x16 Map(F f) {
  F32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = f(i);
  return out;
}

PALIMPSEST_INLINE uint32_t Bits(float x) { return __builtin_bit_cast(uint32_t, x); }
PALIMPSEST_INLINE float FromBits(uint32_t x) { return __builtin_bit_cast(float, x); }

PALIMPSEST_INLINE F32x16 Broadcast(float x) {
  return Map([&](int) { return x; });
}
PALIMPSEST_INLINE F32x16 Zero() { return Broadcast(0.0f); }
PALIMPSEST_INLINE F32x16 Load(const float* p) {
  return Map([&](int i) { return p[i]; });
}
PALIMPSEST_INLINE void Store(float* p, const F32x16& a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
PALIMPSEST_INLINE F32x16 Add(const F32x16& a, const F32x16& b) {
  return Map([&](int i) { return a.v[i] + b.v[i]; });
}
PALIMPSEST_INLINE F32x16 Sub(const F32x16& a, const F32x16& b) {
  return Map([&](int i) { return a.v[i] - b.v[i]; });
}
PALIMPSEST_INLINE F32x16 Mul(const F32x16& a, const F32x16& b) {
  return Map([&](int i) { return a.v[i] * b.v[i]; });
}
PALIMPSEST_INLINE F32x16 Div(const F32x16& a, const F32x16& b) {
  return Map([&](int i) { return a.v[i] / b.v[i]; });
}
// The second operand where either is NaN.
PALIMPSEST_INLINE F32x16 Max(const F32x16& a, const F32x16& b) {
  return Map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
PALIMPSEST_INLINE F32x16 Min(const F32x16& a, const F32x16& b) {
  return Map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
// a * b + c, rounded once.
PALIMPSEST_INLINE F32x16 Fma(const F32x16& a, const F32x16& b, const F32x16& c) {
  return Map([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
PALIMPSEST_INLINE F32x16 SelectLess(const F32x16& a, const F32x16& b, const F32x16& yes,
                                    const F32x16& no) {
  return Map([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
// Adds the integer in the low mantissa bits of n to the exponent of a.
PALIMPSEST_INLINE F32x16 AddExponent(const F32x16& a, const F32x16& n) {
  return Map([&](int i) { return FromBits(Bits(a.v[i]) + (Bits(n.v[i]) << 23)); });
}

// Halves are added until one number is left: lanes i and i + 8, then i and i + 4, ...
PALIMPSEST_INLINE float ReduceAdd(F32x16 a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] + a.v[i + width];
  }
  return a.v[0];
}
PALIMPSEST_INLINE float ReduceMax(F32x16 a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  }
  return a.v[0];
}

// Into the second-level cache, which tracks more lines on their way than the first and has room for
// a key tile of all heads: into the first, decoding eight sequences took 1.2 times as long or more.
PALIMPSEST_INLINE void Prefetch(const std::byte* p) { __builtin_prefetch(p, 0, 2); }

// The two halves of a line of a packed panel (packing.h), widened to float.
PALIMPSEST_INLINE void LoadLine(const std::byte* line, F32x16& low, F32x16& high) {
  const auto* words = reinterpret_cast<const uint32_t*>(line);
  low = Map([&](int i) { return FromBits(words[i] << 16); });
  high = Map([&](int i) { return FromBits(words[i] & 0xffff0000u); });
}

PALIMPSEST_INLINE F32x16 LoadBf16(const uint16_t* p) {
  return Map([&](int i) { return FromBits(uint32_t{p[i]} << 16); });
}

// Numbers of e4m3.
PALIMPSEST_INLINE F32x16 LoadE4m3(const uint8_t* p) {
  return Map([&](int i) { return E4m3ToFloat(p[i]); });
}

// Calls sink(d, v) for d = 0 .. dims - 1 in order, where lane i of v is rows[i][d] as a float; dims
// is a multiple of 16.
template <typename Sink>
PALIMPSEST_INLINE void TransposeBf16(const uint16_t* const* rows, int64_t first, int64_t dims,
                                     Sink sink) {
  for (int64_t d = 0; d < dims; ++d) {
    sink(d, Map([&](int i) { return FromBits(uint32_t{rows[i][first + d]} << 16); }));
  }
}

// The same for rows of e4m3.
template <typename Sink>
PALIMPSEST_INLINE void TransposeE4m3(const uint8_t* const* rows, int64_t first, int64_t dims,
                                     Sink sink) {
  for (int64_t d = 0; d < dims; ++d) {
    sink(d, Map([&](int i) { return E4m3ToFloat(rows[i][first + d]); }));
  }
}

}  // namespace palimpsest::generic

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_SIMD_GENERIC_H_
