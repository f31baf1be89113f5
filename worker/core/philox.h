// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (SC'11): a bijection of 128-bit counters for each 64-bit key. Pure; any draw of a stream
// can be made without the draws before it.
#ifndef PALIMPSEST_WORKER_CORE_PHILOX_H_
#define PALIMPSEST_WORKER_CORE_PHILOX_H_

#include <array>
#include <cstdint>

namespace palimpsest {

constexpr std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, uint64_t key) {
  auto low = static_cast<uint32_t>(key);
  auto high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ low, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ high, static_cast<uint32_t>(a)};
    low += 0x9E3779B9;
    high += 0xBB67AE85;
  }
  return counter;
}

// The draw number `index` of the stream `seed`, uniform in [0, 1), with 53 random bits.
constexpr double PhiloxUniform(uint64_t seed, uint64_t index) {
  const auto bits =
      Philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0, 0}, seed);
  const uint64_t word = (uint64_t{bits[1]} << 32) | bits[0];
  return static_cast<double>(word >> 11) * 0x1.0p-53;
}

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_PHILOX_H_
