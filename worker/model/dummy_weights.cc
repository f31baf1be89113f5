#include "worker/model/dummy_weights.h"

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

// Calls sink(i, number rounded to bf16) for the elements first .. first + count - 1.
template <typename Sink>
void Generate(uint64_t key, float center, float spread, int64_t first, int64_t count, Sink sink) {
  const float step = spread / 32768.0f;
  int64_t i = first;
  while (i < first + count) {
    const int64_t group = i / 4;
    const uint64_t word = Mix(key + static_cast<uint64_t>(group) * 0x9e3779b97f4a7c15);
    for (; i < first + count && i / 4 == group; ++i) {
      const auto lane = static_cast<int16_t>(word >> (16 * (i % 4)));
      sink(i - first, Bf16FromFloat(center + step * static_cast<float>(lane)));
    }
  }
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
  Generate(key_, center_, spread_, first, static_cast<int64_t>(out.size()),
           [out](int64_t i, uint16_t number) { out[static_cast<size_t>(i)] = number; });
}

void DummyTensor::ReadFloats(int64_t first, absl::Span<float> out) const {
  Generate(
      key_, center_, spread_, first, static_cast<int64_t>(out.size()),
      [out](int64_t i, uint16_t number) { out[static_cast<size_t>(i)] = FloatFromBf16(number); });
}

}  // namespace palimpsest
