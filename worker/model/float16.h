// Conversions between float32, bfloat16 and IEEE half precision, given as bit patterns.
#ifndef PALIMPSEST_WORKER_MODEL_FLOAT16_H_
#define PALIMPSEST_WORKER_MODEL_FLOAT16_H_

#include <bit>
#include <cstdint>

namespace palimpsest {

// Exact.
constexpr float FloatFromBf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds to nearest, ties to even; overflows to infinity. A NaN stays a (quiet) NaN.
constexpr uint16_t Bf16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

// Exact. Multiplying by 2^112 moves the exponent's bias, subnormals included; only infinities and
// NaNs need their exponent set.
constexpr float FloatFromF16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
  constexpr float kRebias = std::bit_cast<float>(uint32_t{(127 + 112) << 23});
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * kRebias);
  const uint32_t special = magnitude | 0x7f800000;
  return std::bit_cast<float>(sign | ((bits & 0x7c00) == 0x7c00 ? special : finite));
}

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_FLOAT16_H_
