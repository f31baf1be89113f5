#include "worker/model/dummy_weights.h"

#include <bit>
#include <cmath>

#include "absl/strings/match.h"
#include "worker/model/float16.h"

namespace palimpsest {
namespace {

uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

uint64_t Fnv1a(absl::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

// Rounded to nearest even; never a NaN here.
uint16_t Round(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Writes the elements first .. first + count - 1 as Store makes them of bf16 numbers.
template <auto Store, typename T>
void Generate(uint64_t key, float center, float spread, int64_t first, T* out, int64_t count) {
  const float step = spread / 32768.0f;
  const auto number = [&](uint64_t word, uint64_t lane) {
    const auto value = static_cast<int16_t>(word >> (16 * lane));
    return Store(Round(center + step * static_cast<float>(value)));
  };
  auto i = static_cast<uint64_t>(first);
  const uint64_t end = i + static_cast<uint64_t>(count);
  const auto word = [key](uint64_t group) { return Mix(key + group * 0x9e3779b97f4a7c15); };
  for (; i < end && i % 4 != 0; ++i) *out++ = number(word(i / 4), i % 4);
  for (; i + 4 <= end; i += 4, out += 4) {
    const uint64_t bits = word(i / 4);
    for (uint64_t lane = 0; lane < 4; ++lane) out[lane] = number(bits, lane);
  }
  for (; i < end; ++i) *out++ = number(word(i / 4), i % 4);
}

}  // namespace

DummyTensor::DummyTensor(uint64_t seed, absl::string_view name, int64_t cols,
                         float norm_weight_offset)
    : key_(Mix(seed ^ Mix(Fnv1a(name)))) {
  if (cols == 0) {
    center_ = absl::EndsWith(name, ".bias") ? 0.0f : 1.0f - norm_weight_offset;
  } else if (!absl::StrContains(name, "embed_")) {
    spread_ = FloatFromBf16(Bf16FromFloat(std::sqrt(3.0f / static_cast<float>(cols))));
  }
}

void DummyTensor::ReadBf16(int64_t first, absl::Span<uint16_t> out) const {
  constexpr auto kAsIs = [](uint16_t number) { return number; };
  Generate<kAsIs>(key_, center_, spread_, first, out.data(), static_cast<int64_t>(out.size()));
}

void DummyTensor::ReadFloats(int64_t first, absl::Span<float> out) const {
  constexpr auto kWiden = [](uint16_t number) { return FloatFromBf16(number); };
  Generate<kWiden>(key_, center_, spread_, first, out.data(), static_cast<int64_t>(out.size()));
}

}  // namespace palimpsest
