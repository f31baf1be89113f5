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

// Some rows of a source tensor (of a vector: elements), or some columns of these rows, and their
// place in the image.
struct TensorPiece {
  std::string tensor;
  std::vector<int64_t> shape;  // of the whole tensor: one size or two
  int64_t first_row = 0;       // in the source
  int64_t rows = 0;
  int64_t first_col = 0;
  int64_t width = 1;                  // columns; all of them unless the order is kPlain
  RowOrder order = RowOrder::kPlain;  // of a vector always kPlain
  Bytes target;                       // start of the placement that the piece is a part of
  int64_t target_rows = 0;            // of that placement
  int64_t target_first_row = 0;       // where the piece begins in it

  bool is_vector() const { return shape.size() == 1; }
  // Of the whole tensor.
  int64_t cols() const { return is_vector() ? 1 : shape[1]; }
  // Of its source as bf16.
  Bytes SourceBytes() const { return Bytes(rows * width * 2); }
};

// What rank `rank` of layout.ranks has of the model: `layout` is LayOutImage's of
// RankConfig(model, layout.ranks), and targets are offsets in the rank's part of the image. The
// pieces are in the order of the image.
//
// For one rank every number of the image is in exactly one piece, and every row of a tensor in
// exactly one. For more, numbers that are in no piece are zeros (tensor_parallel.h), and rank 0 has
// something of every tensor.
std::vector<TensorPiece> PlanTensors(const ModelConfig& model, const ImageLayout& layout,
                                     int32_t rank = 0);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_TENSOR_PLAN_H_
