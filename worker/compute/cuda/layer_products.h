// The matrix products of a forward pass with what stands around them: norms, biases, activation,
// residual stream. A step of few rows takes the fused products of skinny_gemm.h, any other cuBLASLt
// with small kernels between.
//
// Functions only enqueue; they may be captured into a graph. Threads: as Forward.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_PRODUCTS_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_PRODUCTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/compute/cuda/forward_context.h"
#include "worker/compute/cuda/gemm.h"

namespace palimpsest::cuda {

// Numbers of rows for which a product's algorithms are chosen, if steps of up to `fused_rows` rows
// use another product.
std::vector<int32_t> RowSteps(const ForwardOptions& options, int32_t fused_rows);

class LayerProducts {
 public:
  // Chooses the algorithms of all products, which overwrites the workspace from the residual stream
  // on. `context` must outlive the object.
  static absl::StatusOr<std::unique_ptr<LayerProducts>> Create(const ForwardContext& context,
                                                               cudaStream_t stream);

  // Queries, keys and values of the residual stream, into `wide`; with latent attention queries
  // (into `queries`) and what is to be cached.
  absl::Status Qkv(const LayerPlacement& at, int32_t rows, cudaStream_t stream);
  // Adds the attention's output to the residual stream.
  absl::Status Output(const LayerPlacement& at, const ActivationRows& rows, cudaStream_t stream);
  // The layer whose Qkv comes next.
  struct NextLayer {
    const LayerPlacement* at;
    bool readable;  // whether its parameters may be read already
  };
  // Adds the MLP's output to the residual stream. `next` may be null.
  absl::Status Mlp(const LayerPlacement& at, const NextLayer* next, const ActivationRows& rows,
                   cudaStream_t stream);
  // Logits of `count` rows of the residual stream at offset `residual`: those that `indexes` names,
  // or the first if it is null.
  absl::Status Head(size_t residual, const int32_t* indexes, int32_t count, cudaStream_t stream);

  GemmLibrary& gemms() const { return *library_; }

 private:
  explicit LayerProducts(const ForwardContext& context) : context_(context) {}

  struct Norm {
    const VectorPlacement& weight;
    const VectorPlacement& bias;
    bool readable = true;
  };
  // The last product of a branch, with what comes behind it.
  struct BranchEnd {
    const MatrixPlacement& weights;
    const VectorPlacement& bias;
    const VectorPlacement& post_norm;
    const Norm* next;  // of the residual stream; may be null
  };

  absl::Status MakeProducts(cudaStream_t stream);
  // Adds up what the ranks have at a place of the workspace, [rows, hidden_size]. `next`, which may
  // be null, is the norm that is taken of it next.
  absl::Status AddRanks(size_t place, int32_t rows, const Norm* next, cudaStream_t stream);
  absl::Status JoinLogits(int32_t count, cudaStream_t stream);
  absl::Status NormalizeRows(const Norm& norm, size_t input, const int32_t* indexes, int32_t count,
                             size_t output, cudaStream_t stream, int32_t threads = 0);
  // All rows of the residual stream at `input`, into `normalized`; AddRanks may have done it.
  absl::Status NormalizeNext(const Norm& norm, size_t input, int32_t rows, cudaStream_t stream);
  absl::Status Multiply(Gemm& product, const MatrixPlacement& weights, const VectorPlacement& bias,
                        size_t input, size_t output, int32_t rows, cudaStream_t stream);
  absl::Status Activate(int32_t rows, cudaStream_t stream);
  // A product whose parts the ranks have, and its sum over them.
  absl::Status MultiplyAndAdd(Gemm& product, const BranchEnd& end, size_t input, size_t output,
                              int32_t rows, cudaStream_t stream);
  // The same for many rows: the sum of a piece is under way while the next is multiplied.
  absl::Status MultiplyInPieces(Gemm& product, const BranchEnd& end, size_t input, size_t output,
                                int32_t rows, cudaStream_t stream);
  // Adds the product to the residual stream, if there is a norm behind it by way of that.
  absl::Status MultiplyToResidual(Gemm& product, const BranchEnd& end, size_t input,
                                  const ActivationRows& rows, cudaStream_t stream);

  absl::Status QueriesOfLatent(const LayerPlacement& at, int32_t rows, cudaStream_t stream);

  // Steps of up to so many rows take the fused form of a product.
  int32_t FusedRows(int32_t outputs) const;
  bool Fused(const MatrixPlacement& weights, int32_t rows) const {
    return rows <= FusedRows(weights.rows);
  }
  struct Fusion {
    int64_t input_stride = 0;  // 0: rows are adjacent
    bool activation = false;
    bool residual = false;
    bool float_output = false;
  };
  // With `norm`: of the normed input, by way of `normalized` if the norm is not one that is fused.
  absl::Status MultiplyFused(const Fusion& fusion, const Norm* norm, const MatrixPlacement& weights,
                             const VectorPlacement& bias, size_t input, size_t output, int32_t rows,
                             cudaStream_t stream);
  // This rank's logits, in their place among those of `count` rows.
  absl::Status OwnHead(size_t residual, const int32_t* indexes, int32_t count, cudaStream_t stream);
  size_t own_logits(int32_t count) const;
  bool plain_norms() const {
    return context_.config.norm == NormKind::kRms && context_.config.norm_weight_offset == 0;
  }

  const ForwardContext& context_;
  std::unique_ptr<GemmLibrary> library_;
  std::unique_ptr<Gemm> qkv_, q_up_, o_, gate_up_, down_, head_;
  // Weight of the norm that `normalized` holds already.
  std::optional<Bytes> normalized_;
  // The next norm is one that could not be taken with a sum over ranks, and has the same bits.
  bool norm_left_ = false;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_PRODUCTS_H_
