// The 8-bit floating-point format E4M3 (Micikevicius et al., arXiv:2209.05433): a sign, four bits
// of exponent with bias 7, three of mantissa; no infinity, and NaN where all other bits are set.
// The largest number is 448, the smallest above zero 2^-9.
#ifndef PALIMPSEST_COMMON_E4M3_H_
#define PALIMPSEST_COMMON_E4M3_H_

#include <bit>
#include <cstdint>

namespace palimpsest {

constexpr float E4m3ToFloat(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80u} << 24;
  const uint32_t rest = code & 0x7fu;
  if (rest == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  // Without an implicit one: a multiple of 2^-9.
  const float magnitude = rest < 8 ? static_cast<float>(rest) * 0x1p-9f
                                   : std::bit_cast<float>((rest << 20) + (120u << 23));
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

// Rounds to nearest, ties to even; what is beyond 448 becomes 448, and NaN stays NaN.
constexpr uint8_t FloatToE4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  if (magnitude != magnitude) return sign | 0x7f;
  if (magnitude >= 448.0f) return sign | 0x7e;
  if (magnitude < 0x1p-6f) {
    // Adding 2^14 leaves multiples of 2^-9, rounded as floats are.
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(magnitude + 0x1p14f) & 0xf);
  }
  // Half of the last place that is kept, less one bit unless what is kept is odd.
  const uint32_t rounded = (bits & 0x7fffffffu) + 0x7ffffu + (bits >> 20 & 1);
  return sign | static_cast<uint8_t>((rounded >> 20) - (120u << 3));
}

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_E4M3_H_
