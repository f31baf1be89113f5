// Random models for tests and benchmarks: weights, their packed image, a KV region, and a plain
// float64 forward pass to compare with.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_TEST_MODEL_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_TEST_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"
#include "worker/core/model_runner.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest {

// A small config in which every shape-dependent path can occur.
ModelConfig RandomConfig(std::mt19937& random);

// Families whose parts differ, and a small config of one.
enum class TestFamily { kLlama, kQwen3, kGemma2, kOpt, kLatent, kEightBitKv };
inline constexpr TestFamily kTestFamilies[] = {TestFamily::kLlama,  TestFamily::kQwen3,
                                               TestFamily::kGemma2, TestFamily::kOpt,
                                               TestFamily::kLatent, TestFamily::kEightBitKv};
ModelConfig RandomConfig(TestFamily family, std::mt19937& random);

// The shape of SmolLM2-135M.
ModelConfig SmolLm2Config();

// Zeroed, 2 MiB-aligned memory that asks for huge pages, as slab mappings do.
class Region {
 public:
  explicit Region(int64_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  int64_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

class TestModel {
 public:
  // Requires a config and a slab that LayOutImage accepts.
  TestModel(const ModelConfig& config, uint32_t seed, Bytes slab = Bytes(4096));

  const ModelConfig& config() const { return config_; }
  const ImageLayout& layout() const { return layout_; }
  const std::byte* image() const { return image_.data(); }
  std::byte* image() { return image_.data(); }

  // Logits after each token, computed in float64; keys and values are rounded as
  // the KV cache does.
  std::vector<std::vector<double>> ReferenceLogits(absl::Span<const TokenId> tokens) const;

 private:
  void FillMatrix(const MatrixPlacement& at, std::mt19937& random);
  void FillVector(const VectorPlacement& at, float middle, float spread, std::mt19937& random);
  void FillNorm(const VectorPlacement& at, std::mt19937& random);

  const ModelConfig config_;
  const ImageLayout layout_;
  Region image_;
};

// KV memory of `blocks` blocks, filled with NaN so that reading what was not written shows.
class TestKv {
 public:
  TestKv(const ModelConfig& config, int32_t block_tokens, int64_t blocks);

  std::byte* data() { return region_.data(); }
  Bytes block_bytes() const { return block_bytes_; }
  const std::byte* block(BlockId id) const {
    return region_.data() + id.value() * block_bytes_.count();
  }

 private:
  const Bytes block_bytes_;
  Region region_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_TEST_MODEL_H_
