#include "worker/model/image_layout.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "worker/compute/cpu/packing.h"

namespace palimpsest {
namespace {

constexpr Bytes kPage(4096);
constexpr int64_t kBf16Bytes = 2;
// Keeps slab numbers within int32 and offsets far from overflow.
constexpr Bytes kMaxImage = GiB(int64_t{1} << 20);
constexpr int64_t kMaxSlabs = int64_t{1} << 24;

// Hands out places one after another.
class Cursor {
 public:
  Cursor(Bytes slab_bytes, WeightFormat format) : slab_bytes_(slab_bytes), format_(format) {}

  MatrixPlacement Matrix(int32_t rows, int32_t cols) {
    const Bytes size =
        row_major() ? Bytes(int64_t{rows} * cols * kBf16Bytes) : PackedMatrixBytes(rows, cols);
    return {.offset = Take(size), .rows = rows, .cols = cols};
  }

  VectorPlacement Vector(int32_t size) {
    const int64_t element = row_major() ? kBf16Bytes : static_cast<int64_t>(sizeof(float));
    return {.offset = Take(Bytes(size * element)), .size = size};
  }

  MatrixPlacement MatrixIf(bool present, int32_t rows, int32_t cols) {
    return present ? Matrix(rows, cols) : MatrixPlacement();
  }
  VectorPlacement VectorIf(bool present, int32_t size) {
    return present ? Vector(size) : VectorPlacement();
  }

  // Closes the stage that began at the end of the one before.
  void EndStage(std::string name, ImageLayout& layout) {
    const Bytes begin = layout.total;
    layout.total = RoundUp(end_, slab_bytes_);
    layout.stages.push_back(
        {.name = std::move(name),
         .first_slab = static_cast<int32_t>(begin / slab_bytes_),
         .slab_count = static_cast<int32_t>((layout.total - begin) / slab_bytes_)});
    end_ = layout.total;
  }

 private:
  bool row_major() const { return format_ == WeightFormat::kRowMajor; }

  Bytes Take(Bytes size) {
    const Bytes offset = RoundUp(end_, row_major() ? Bytes(256) : Bytes(64));
    end_ = offset + size;
    return offset;
  }

  const Bytes slab_bytes_;
  const WeightFormat format_;
  Bytes end_;
};

void PlaceAttention(const ModelConfig& config, Cursor& cursor, LayerPlacement& layer) {
  const int32_t q_rows = config.num_heads * config.head_dim;
  const int32_t qkv_rows = q_rows + 2 * config.num_kv_heads * config.head_dim;
  layer.qkv = cursor.Matrix(qkv_rows, config.hidden_size);
  layer.qkv_bias = cursor.VectorIf(config.qkv_bias, qkv_rows);
  layer.q_norm = cursor.VectorIf(config.qk_norm, config.head_dim);
  layer.k_norm = cursor.VectorIf(config.qk_norm, config.head_dim);
}

void PlaceLatentAttention(const ModelConfig& config, Cursor& cursor, LayerPlacement& layer) {
  const LatentAttention& latent = *config.latent;
  const int32_t heads = config.num_heads;
  const int32_t q_rows = heads * config.head_dim;
  const bool two_steps = latent.q_lora_rank > 0;
  layer.qkv = cursor.Matrix((two_steps ? latent.q_lora_rank : q_rows) + latent.cache_width(),
                            config.hidden_size);
  layer.q_norm = cursor.VectorIf(two_steps, latent.q_lora_rank);
  layer.k_norm = cursor.Vector(latent.kv_lora_rank);
  layer.q_up = cursor.MatrixIf(two_steps, q_rows, latent.q_lora_rank);
  layer.k_up = cursor.Matrix(heads * latent.kv_lora_rank, latent.qk_nope_head_dim);
  layer.v_up = cursor.Matrix(heads * latent.v_head_dim, latent.kv_lora_rank);
}

LayerPlacement PlaceLayer(const ModelConfig& config, Cursor& cursor) {
  const bool norm_bias = config.norm == NormKind::kLayer;
  const int32_t up_rows = (config.gated() ? 2 : 1) * config.intermediate_size;
  LayerPlacement layer;
  layer.attention_norm = cursor.Vector(config.hidden_size);
  layer.attention_norm_bias = cursor.VectorIf(norm_bias, config.hidden_size);
  if (config.latent.has_value()) {
    PlaceLatentAttention(config, cursor, layer);
  } else {
    PlaceAttention(config, cursor, layer);
  }
  layer.o = cursor.Matrix(config.hidden_size, config.num_heads * config.value_dim());
  layer.o_bias = cursor.VectorIf(config.o_bias, config.hidden_size);
  layer.post_attention_norm = cursor.VectorIf(config.post_norms, config.hidden_size);
  layer.mlp_norm = cursor.Vector(config.hidden_size);
  layer.mlp_norm_bias = cursor.VectorIf(norm_bias, config.hidden_size);
  layer.gate_up = cursor.Matrix(up_rows, config.hidden_size);
  layer.gate_up_bias = cursor.VectorIf(config.mlp_bias, up_rows);
  layer.down = cursor.Matrix(config.hidden_size, config.intermediate_size);
  layer.down_bias = cursor.VectorIf(config.mlp_bias, config.hidden_size);
  layer.post_mlp_norm = cursor.VectorIf(config.post_norms, config.hidden_size);
  return layer;
}

}  // namespace

absl::string_view WeightFormatName(WeightFormat format) {
  return format == WeightFormat::kRowMajor ? "row-major" : "cpu-panels";
}

absl::StatusOr<WeightFormat> ParseWeightFormat(absl::string_view name) {
  for (const WeightFormat format : {WeightFormat::kCpuPanels, WeightFormat::kRowMajor}) {
    if (name == WeightFormatName(format)) return format;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "weight format: expected cpu-panels or row-major, got '", name.substr(0, 80), "'"));
}

absl::StatusOr<ImageLayout> LayOutImage(const ModelConfig& config, Bytes slab_bytes,
                                        WeightFormat format) {
  if (slab_bytes <= Bytes(0) || slab_bytes.count() % kPage.count() != 0 || slab_bytes > GiB(64)) {
    return absl::InvalidArgumentError(
        absl::StrCat("slab size: expected a positive multiple of 4096 bytes up to 64 GiB, got ",
                     slab_bytes.count(), " bytes"));
  }
  ImageLayout layout;
  layout.format = format;
  layout.slab_bytes = slab_bytes;
  layout.ranks = config.ranks;
  Cursor cursor(slab_bytes, format);
  layout.embed = cursor.Matrix(config.vocab_size, config.hidden_size);
  if (config.position_table_offset.has_value()) {
    layout.positions =
        cursor.Matrix(config.max_position + *config.position_table_offset, config.hidden_size);
  }
  cursor.EndStage("embed", layout);
  for (int32_t i = 0; i < config.num_layers; ++i) {
    layout.layers.push_back(PlaceLayer(config, cursor));
    cursor.EndStage(absl::StrCat("layer.", i), layout);
  }
  layout.final_norm = cursor.Vector(config.hidden_size);
  layout.final_norm_bias = cursor.VectorIf(config.norm == NormKind::kLayer, config.hidden_size);
  layout.lm_head = config.tie_word_embeddings
                       ? layout.embed
                       : cursor.Matrix(config.head_rows(), config.hidden_size);
  cursor.EndStage("head", layout);
  if (layout.image_bytes() > kMaxImage || layout.image_bytes() / slab_bytes > kMaxSlabs) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter image of ", layout.image_bytes().ToString(), " in slabs of ",
                     slab_bytes.ToString(), ": expected at most ", kMaxImage.ToString(), " and ",
                     kMaxSlabs, " slabs"));
  }
  return layout;
}

}  // namespace palimpsest
