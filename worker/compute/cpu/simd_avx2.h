// Sixteen floats in two AVX2 registers. See simd_generic.h for what each operation means.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_SIMD_AVX2_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_SIMD_AVX2_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define PALIMPSEST_INLINE static inline __attribute__((always_inline))

namespace palimpsest::avx2 {

inline constexpr int kAccumulators = 6;
inline constexpr int kAttentionRows = 3;
inline constexpr int kAttentionVectors = 2;

struct F32x16 {
  __m256 a, b;
};

PALIMPSEST_INLINE F32x16 Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PALIMPSEST_INLINE F32x16 Broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PALIMPSEST_INLINE F32x16 Load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
PALIMPSEST_INLINE void Store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
PALIMPSEST_INLINE F32x16 Add(F32x16 x, F32x16 y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
PALIMPSEST_INLINE F32x16 Sub(F32x16 x, F32x16 y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
PALIMPSEST_INLINE F32x16 Mul(F32x16 x, F32x16 y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
PALIMPSEST_INLINE F32x16 Div(F32x16 x, F32x16 y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
PALIMPSEST_INLINE F32x16 Max(F32x16 x, F32x16 y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
PALIMPSEST_INLINE F32x16 Min(F32x16 x, F32x16 y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
PALIMPSEST_INLINE F32x16 Fma(F32x16 x, F32x16 y, F32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
PALIMPSEST_INLINE F32x16 SelectLess(F32x16 x, F32x16 y, F32x16 yes, F32x16 no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
PALIMPSEST_INLINE __m256 AddExponent(__m256 x, __m256 n) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
PALIMPSEST_INLINE F32x16 AddExponent(F32x16 x, F32x16 n) {
  return {AddExponent(x.a, n.a), AddExponent(x.b, n.b)};
}

PALIMPSEST_INLINE float ReduceAdd(F32x16 x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
PALIMPSEST_INLINE float ReduceMax(F32x16 x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

PALIMPSEST_INLINE void Prefetch(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

PALIMPSEST_INLINE void LoadLine(const std::byte* line, F32x16& low, F32x16& high) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i first = _mm256_load_si256(reinterpret_cast<const __m256i*>(line));
  const __m256i second = _mm256_load_si256(reinterpret_cast<const __m256i*>(line + 32));
  low.a = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
  low.b = _mm256_castsi256_ps(_mm256_slli_epi32(second, 16));
  high.a = _mm256_castsi256_ps(_mm256_and_si256(first, mask));
  high.b = _mm256_castsi256_ps(_mm256_and_si256(second, mask));
}

PALIMPSEST_INLINE __m256 WidenBf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
PALIMPSEST_INLINE F32x16 LoadBf16(const uint16_t* p) { return {WidenBf16(p), WidenBf16(p + 8)}; }

PALIMPSEST_INLINE __m256 WidenE4m3(const uint8_t* p) {
  const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i rest = _mm256_and_si256(code, _mm256_set1_epi32(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_xor_si256(code, rest), 24);
  __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(rest, 20), _mm256_set1_epi32(120 << 23));
  // Without an implicit one: multiples of 2^-9.
  const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(rest), _mm256_set1_ps(0x1p-9f));
  bits = _mm256_blendv_epi8(bits, _mm256_castps_si256(small),
                            _mm256_cmpgt_epi32(_mm256_set1_epi32(8), rest));
  bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000),
                            _mm256_cmpeq_epi32(rest, _mm256_set1_epi32(0x7f)));
  return _mm256_castsi256_ps(_mm256_or_si256(bits, sign));
}
PALIMPSEST_INLINE F32x16 LoadE4m3(const uint8_t* p) { return {WidenE4m3(p), WidenE4m3(p + 8)}; }

// Transposes eight vectors of eight floats.
PALIMPSEST_INLINE void Transpose(__m256 (&m)[8]) {
  __m256 t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(m[2 * i], m[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(m[2 * i], m[2 * i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 2; ++i) {
    m[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    m[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    m[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    m[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(m[i], m[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(m[i], m[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) m[i] = t[i];
}

template <typename Sink>
PALIMPSEST_INLINE void TransposeBf16(const uint16_t* const* rows, int64_t first, int64_t dims,
                                     Sink sink) {
  for (int64_t d = 0; d < dims; d += 8) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = WidenBf16(rows[i] + first + d);
    Transpose(a);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) b[i] = WidenBf16(rows[8 + i] + first + d);
    Transpose(b);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sink(d + i, F32x16{a[i], b[i]});
  }
}

template <typename Sink>
PALIMPSEST_INLINE void TransposeE4m3(const uint8_t* const* rows, int64_t first, int64_t dims,
                                     Sink sink) {
  for (int64_t d = 0; d < dims; d += 8) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = WidenE4m3(rows[i] + first + d);
    Transpose(a);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) b[i] = WidenE4m3(rows[8 + i] + first + d);
    Transpose(b);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sink(d + i, F32x16{a[i], b[i]});
  }
}

}  // namespace palimpsest::avx2

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_SIMD_AVX2_H_
