#include "worker/compute/cuda/layer_copies.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace palimpsest::cuda {
namespace {

constexpr int64_t kNumberBytes = 2;

}  // namespace

Bytes LayerBytes(const ImageLayout& layout, int32_t layer) {
  const LayerPlacement& at = layout.layers[static_cast<size_t>(layer)];
  const StagePlacement& stage = layout.stages[static_cast<size_t>(layer) + 1];
  const Bytes begin = layout.slab_bytes * stage.first_slab;
  Bytes end = begin;
  for (const MatrixPlacement* matrix :
       {&at.qkv, &at.q_up, &at.k_up, &at.v_up, &at.o, &at.gate_up, &at.down}) {
    if (matrix->rows == 0) continue;
    end = std::max(end, matrix->offset + Bytes(kNumberBytes * matrix->rows * matrix->cols));
  }
  for (const VectorPlacement* vector :
       {&at.attention_norm, &at.attention_norm_bias, &at.qkv_bias, &at.q_norm, &at.k_norm,
        &at.o_bias, &at.post_attention_norm, &at.mlp_norm, &at.mlp_norm_bias, &at.gate_up_bias,
        &at.down_bias, &at.post_mlp_norm}) {
    if (vector->size > 0) {
      end = std::max(end, vector->offset + Bytes(kNumberBytes * vector->size));
    }
  }
  return end - begin;
}

std::vector<LayerCopy> LayerCopies(const ImageLayout& layout, const ModelMemory& memory,
                                   int stage) {
  const StagePlacement& placement = layout.stages[static_cast<size_t>(stage)];
  const int64_t begin = (layout.slab_bytes * placement.first_slab).count();
  const int64_t end = begin + LayerBytes(layout, stage - 1).count();
  auto* parameters = const_cast<std::byte*>(memory.parameters);
  std::vector<LayerCopy> copies;
  int64_t at = 0;
  for (const ImagePiece& piece : memory.image) {
    const int64_t first = std::max(begin, at), last = std::min(end, at + piece.size.count());
    if (first < last) {
      copies.push_back(
          {parameters + first, piece.data + (first - at), static_cast<size_t>(last - first)});
    }
    at += piece.size.count();
  }
  return copies;
}

absl::Status CheckRotation(const ImageLayout& layout, const ModelMemory& memory,
                           const Rotation& rotation) {
  const auto stages = static_cast<int32_t>(layout.stages.size());
  absl::Status status = ValidateRotation(rotation, stages);
  if (!status.ok() || rotation.none()) return status;
  Bytes image;
  for (const ImagePiece& piece : memory.image) image += piece.size;
  if (image < layout.total) {
    return absl::FailedPreconditionError(
        absl::StrCat("layers can rotate only with an image to copy them from: it has ",
                     image.ToString(), " of ", layout.total.ToString()));
  }
  const auto slabs = [&](int32_t stage) {
    return layout.stages[static_cast<size_t>(stage)].slab_count;
  };
  for (const int32_t stage : rotation.stages) {
    if (stage == 0 || stage == stages - 1 || slabs(stage) != slabs(rotation.stages.front())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "stage ", layout.stages[static_cast<size_t>(stage)].name, " of ", slabs(stage),
          " slabs cannot rotate with layers of ", slabs(rotation.stages.front())));
    }
  }
  return absl::OkStatus();
}

}  // namespace palimpsest::cuda
