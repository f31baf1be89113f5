// Where each tensor lies in a model's parameter image. A pure function of the model's config and
// the slab size, so that packer, broker and worker agree without exchanging it.
//
// The image of a tensor-parallel model holds the parts of its ranks one after another, all of the
// same layout: it is laid out by the config of one rank (tensor_parallel.h). Offsets, slabs and
// stages are those of a rank, whose part is its parameter region.
//
// Stages (in execution order): "embed", "layer.0" .. "layer.N-1", "head". Each stage starts on a
// slab boundary and fills whole slabs, so that a stage can be taken away and restored on its own.
// With tied word embeddings the head's matrix is the embedding matrix and stage "head" holds only
// the final norm. Within a stage tensors are aligned to 64 bytes (kRowMajor: 256).
#ifndef PALIMPSEST_WORKER_MODEL_IMAGE_LAYOUT_H_
#define PALIMPSEST_WORKER_MODEL_IMAGE_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/bytes.h"
#include "worker/model/model_config.h"

namespace palimpsest {

// How tensors are stored: what the kernels of a back-end read. Part of the fingerprint.
enum class WeightFormat {
  kCpuPanels,  // matrices in the order of worker/compute/cpu/packing.h, vectors as float32
  kRowMajor,   // bfloat16: matrices row by row without padding, vectors in order
};

// "cpu-panels", "row-major".
absl::string_view WeightFormatName(WeightFormat format);
absl::StatusOr<WeightFormat> ParseWeightFormat(absl::string_view name);

// A weight matrix of `rows` outputs by `cols` inputs (row-major in the source).
struct MatrixPlacement {
  Bytes offset;      // from the start of the image
  int32_t rows = 0;  // 0: the model has no such tensor
  int32_t cols = 0;
};

// `size` numbers (norm weights, biases) in order.
struct VectorPlacement {
  Bytes offset;
  int32_t size = 0;  // 0: the model has no such tensor
};

struct LayerPlacement {
  VectorPlacement attention_norm;  // input_layernorm
  VectorPlacement attention_norm_bias;
  // q, k, v rows one after another: (h + 2 h_kv) * d outputs. With latent attention the rows of
  // q_a_proj (or of q_proj, if queries have no latent), then those of kv_a_proj_with_mqa.
  MatrixPlacement qkv;
  VectorPlacement qkv_bias;
  VectorPlacement q_norm;  // of each query head, or of the query's latent
  VectorPlacement k_norm;  // of each key head, or of the cached latent
  // Latent attention. q_up: q_b_proj. k_up and v_up are the halves of kv_b_proj, head by head:
  // k_up has kv_lora_rank rows by qk_nope_head_dim columns a head (transposed, as it is applied to
  // the query), v_up has v_head_dim rows by kv_lora_rank columns a head.
  MatrixPlacement q_up;
  MatrixPlacement k_up;
  MatrixPlacement v_up;
  MatrixPlacement o;
  VectorPlacement o_bias;
  VectorPlacement post_attention_norm;  // of ModelConfig::post_norms
  VectorPlacement mlp_norm;             // post_attention_layernorm
  VectorPlacement mlp_norm_bias;
  MatrixPlacement gate_up;  // gate rows, then up rows; only up rows if there is no gate
  VectorPlacement gate_up_bias;
  MatrixPlacement down;
  VectorPlacement down_bias;
  VectorPlacement post_mlp_norm;
};

struct StagePlacement {
  std::string name;
  int32_t first_slab = 0;
  int32_t slab_count = 0;
};

struct ImageLayout {
  WeightFormat format = WeightFormat::kCpuPanels;
  Bytes slab_bytes;
  MatrixPlacement embed;      // vocab_size rows
  MatrixPlacement positions;  // learned positions: max_position + position_table_offset rows
  std::vector<LayerPlacement> layers;
  VectorPlacement final_norm;
  VectorPlacement final_norm_bias;
  MatrixPlacement lm_head;  // equal to `embed` when tied
  std::vector<StagePlacement> stages;
  Bytes total;        // of one rank; a multiple of slab_bytes
  int32_t ranks = 1;  // parts of the image

  // Of the whole image.
  Bytes image_bytes() const { return total * ranks; }
  int32_t slabs() const { return static_cast<int32_t>(total / slab_bytes); }
};

// Requires slab_bytes to be a positive multiple of 4096. `config` is the model's, or RankConfig's.
absl::StatusOr<ImageLayout> LayOutImage(const ModelConfig& config, Bytes slab_bytes,
                                        WeightFormat format = WeightFormat::kCpuPanels);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_IMAGE_LAYOUT_H_
