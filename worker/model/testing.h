// Small model folders with random weights, for tests.
#ifndef PALIMPSEST_WORKER_MODEL_TESTING_H_
#define PALIMPSEST_WORKER_MODEL_TESTING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "worker/model/model_config.h"

namespace palimpsest {

// A Llama of two layers, hidden size 64, 4 heads over 2 KV heads, 320 tokens, 512 positions,
// untied, no end-of-sequence token. Change what a test needs.
ModelConfig TinyModelConfig();

// The config.json that ParseModelConfig reads back as `config`.
std::string ModelConfigJson(const ModelConfig& config);

struct RandomTensor {
  std::string name;
  std::vector<int64_t> shape;
  // Exact in bf16, f16 and f32 alike, so that a folder of any type gives the same image.
  std::vector<float> values;
};

// Every tensor of the model, in the names and order of the Hugging Face families. Matrices are
// scaled so that activations neither vanish nor explode.
std::vector<RandomTensor> RandomTensors(const ModelConfig& config, uint64_t seed);

// One .safetensors file of `dtype` "BF16", "F16" or "F32".
absl::Status WriteSafetensors(const std::string& path, const std::string& dtype,
                              const std::vector<RandomTensor>& tensors);

struct RandomModelOptions {
  uint64_t seed = 1;
  std::string dtype = "BF16";
  int shards = 1;  // more than 1: shards and model.safetensors.index.json
};

// Writes config.json and weights into `folder`, which exists.
absl::Status WriteRandomModel(const std::string& folder, const ModelConfig& config,
                              const RandomModelOptions& options = {});

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_TESTING_H_
