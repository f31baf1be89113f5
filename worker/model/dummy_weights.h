// Weights without a checkpoint (`load_format: dummy`): for measurements with models that are not at
// hand, and for tests that must build the same weights elsewhere (tests/reference/make_reference.py
// is a second implementation). Pure: a number depends on seed, tensor name, shape and index alone.
//
//   hash = 64-bit FNV-1a of the tensor's name in the Hugging Face checkpoint
//   key  = mix(seed ^ mix(hash)), mix being SplitMix64's finalizer
//   word = mix(key + floor(i / 4) * 0x9e3779b97f4a7c15)
//   lane = bits 16 (i mod 4) .. + 15 of the word as a signed number
//   x_i  = bf16(center + spread * lane / 32768), rounded to nearest even
//
// `spread` is a bf16 number, so that the product is exact in float32 and the sum is rounded once,
// whether or not a compiler fuses them.
//
//   a bias: 0 +- 1/4; a norm's weight: (1 - norm_weight_offset) +- 1/4
//   a table of embeddings or positions ("embed_" in the name): 0 +- 1/4
//   any other matrix: 0 +- bf16(sqrt(3 / columns)), which keeps activations at their size
#ifndef PALIMPSEST_WORKER_MODEL_DUMMY_WEIGHTS_H_
#define PALIMPSEST_WORKER_MODEL_DUMMY_WEIGHTS_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace palimpsest {

class DummyTensor {
 public:
  // `cols` is 0 for a vector.
  DummyTensor(uint64_t seed, absl::string_view name, int64_t cols, float norm_weight_offset);

  // Elements first .. first + out.size() - 1 in row-major order.
  void ReadBf16(int64_t first, absl::Span<uint16_t> out) const;
  // The same numbers.
  void ReadFloats(int64_t first, absl::Span<float> out) const;

  // What a generator elsewhere (on a GPU) needs.
  uint64_t key() const { return key_; }
  float center() const { return center_; }
  float spread() const { return spread_; }

 private:
  uint64_t key_;
  float center_ = 0;
  float spread_ = 0.25f;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_DUMMY_WEIGHTS_H_
