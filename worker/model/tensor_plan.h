// Which tensor of a Hugging Face checkpoint goes where in a parameter image. Pure.
#ifndef PALIMPSEST_WORKER_MODEL_TENSOR_PLAN_H_
#define PALIMPSEST_WORKER_MODEL_TENSOR_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/bytes.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest {

// In which order a piece of a tensor goes into the image.
enum class RowOrder {
  kPlain,
  // Rotary pairs that are neighbours become halves: of n rows, target row j is source row 2j, and
  // in the second half 2j + 1 - n.
  kPairsToHalves,
  // Rows become columns.
  kTransposed,
};

// Some rows of a source tensor (of a vector: elements) and their place in the image.
struct TensorPiece {
  std::string tensor;
  std::vector<int64_t> shape;  // of the whole tensor: one size or two
  int64_t first_row = 0;       // in the source
  int64_t rows = 0;
  RowOrder order = RowOrder::kPlain;  // of a vector always kPlain
  Bytes target;                       // start of the placement that the piece is a part of
  int64_t target_rows = 0;            // of that placement
  int64_t target_first_row = 0;       // where the piece begins in it

  bool is_vector() const { return shape.size() == 1; }
  int64_t cols() const { return is_vector() ? 1 : shape[1]; }
  // Of its source as bf16.
  Bytes SourceBytes() const { return Bytes(rows * cols() * 2); }
};

// Every number of the image is in exactly one piece, and every row of a tensor in exactly one. The
// pieces are in the order of the image. `layout` is LayOutImage's of `config`.
std::vector<TensorPiece> PlanTensors(const ModelConfig& config, const ImageLayout& layout);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_TENSOR_PLAN_H_
