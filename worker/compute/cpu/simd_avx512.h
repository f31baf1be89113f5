// Sixteen floats in one AVX-512 register. See simd_generic.h for what each operation means.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_SIMD_AVX512_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_SIMD_AVX512_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define PALIMPSEST_INLINE static inline __attribute__((always_inline))

namespace palimpsest::avx512 {

// Vectors of accumulators that leave enough registers for weights and broadcasts.
inline constexpr int kAccumulators = 24;
// Shape of the attention micro-kernels: rows by vectors.
inline constexpr int kAttentionRows = 6;
inline constexpr int kAttentionVectors = 4;

struct F32x16 {
  __m512 v;
};

PALIMPSEST_INLINE F32x16 Zero() { return {_mm512_setzero_ps()}; }
PALIMPSEST_INLINE F32x16 Broadcast(float x) { return {_mm512_set1_ps(x)}; }
PALIMPSEST_INLINE F32x16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
PALIMPSEST_INLINE void Store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
PALIMPSEST_INLINE F32x16 Add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PALIMPSEST_INLINE F32x16 Sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PALIMPSEST_INLINE F32x16 Mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PALIMPSEST_INLINE F32x16 Div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PALIMPSEST_INLINE F32x16 Max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PALIMPSEST_INLINE F32x16 Min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
PALIMPSEST_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
PALIMPSEST_INLINE F32x16 SelectLess(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
PALIMPSEST_INLINE F32x16 AddExponent(F32x16 a, F32x16 n) {
  return {_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_castps_si512(n.v), 23)))};
}

PALIMPSEST_INLINE float ReduceAdd(F32x16 a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
PALIMPSEST_INLINE float ReduceMax(F32x16 a) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

PALIMPSEST_INLINE void Prefetch(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}

PALIMPSEST_INLINE void SplitWords(__m512i words, F32x16& low, F32x16& high) {
  low.v = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  high.v = _mm512_castsi512_ps(
      _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

PALIMPSEST_INLINE void LoadLine(const std::byte* line, F32x16& low, F32x16& high) {
  SplitWords(_mm512_load_si512(line), low, high);
}

PALIMPSEST_INLINE F32x16 LoadBf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

PALIMPSEST_INLINE F32x16 LoadE4m3(const uint8_t* p) {
  const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i rest = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
  const __m512i sign = _mm512_slli_epi32(_mm512_xor_si512(code, rest), 24);
  __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(rest, 20), _mm512_set1_epi32(120 << 23));
  // Without an implicit one: multiples of 2^-9.
  const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(rest), _mm512_set1_ps(0x1p-9f));
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmplt_epi32_mask(rest, _mm512_set1_epi32(8)),
                               _mm512_castps_si512(small));
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(rest, _mm512_set1_epi32(0x7f)),
                               _mm512_set1_epi32(0x7fc00000));
  return {_mm512_castsi512_ps(_mm512_or_si512(bits, sign))};
}

// Transposes sixteen vectors of sixteen words.
PALIMPSEST_INLINE void Transpose(__m512i (&m)[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(m[2 * i], m[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(m[2 * i], m[2 * i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    m[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    m[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    m[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    m[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(m[i], m[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(m[i], m[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(m[i + 8], m[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(m[i + 8], m[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    m[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    m[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    m[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    m[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

template <typename Sink>
PALIMPSEST_INLINE void TransposeBf16(const uint16_t* const* rows, int64_t first, int64_t dims,
                                     Sink sink) {
  for (int64_t d = 0; d < dims; d += 32) {
    const int64_t pairs = dims - d < 32 ? (dims - d) / 2 : 16;
    const __mmask16 mask = static_cast<__mmask16>((uint32_t{1} << pairs) - 1);
    __m512i m[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) m[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + first + d);
    Transpose(m);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      // 16 or 32 dimensions are left.
      if (i == 8 && pairs == 8) break;
      F32x16 even, odd;
      SplitWords(m[i], even, odd);
      sink(d + 2 * i, even);
      sink(d + 2 * i + 1, odd);
    }
  }
}

template <typename Sink>
PALIMPSEST_INLINE void TransposeE4m3(const uint8_t* const* rows, int64_t first, int64_t dims,
                                     Sink sink) {
  for (int64_t d = 0; d < dims; d += 16) {
    __m512i m[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) m[i] = _mm512_castps_si512(LoadE4m3(rows[i] + first + d).v);
    Transpose(m);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sink(d + i, F32x16{_mm512_castsi512_ps(m[i])});
  }
}

}  // namespace palimpsest::avx512

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_SIMD_AVX512_H_
