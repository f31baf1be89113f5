// Matrix products with bfloat16 weights through cuBLASLt, which is loaded at run time.
//
// For each number of rows up to a limit there is one algorithm, chosen when the product is created:
// from the cache file, or else by measuring what cuBLASLt proposes. Proposals that reduce partial
// sums in an order that is not fixed are left out, so a product gives the same bits whenever it is
// run with the same algorithm.
//
// Threads: not thread-safe but for Run, which only enqueues and may be captured into a graph.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_GEMM_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "worker/compute/cuda/gemm_cache.h"

namespace palimpsest::cuda {

// output[r, o] = sum over i of input[r, i] * weights[o, i] (+ bias[o]) (+ output[r, o]).
struct GemmShape {
  int32_t outputs = 0;
  int32_t inputs = 0;
  bool bias = false;
  bool accumulate = false;
  bool float_output = false;  // float32 instead of bfloat16
  // Elements from one row to the next; 0: rows are adjacent.
  int64_t input_stride = 0;
  int64_t output_stride = 0;
  // Products that run as one: their weights are adjacent, their inputs and outputs so many elements
  // apart. Without bias.
  int32_t batch = 1;
  int64_t input_step = 0;
  int64_t output_step = 0;

  int64_t input_row() const { return input_stride > 0 ? input_stride : inputs; }
  int64_t output_row() const { return output_stride > 0 ? output_stride : outputs; }
  int64_t weight_bytes() const { return int64_t{batch} * outputs * inputs * 2; }
};

struct GemmCall {
  int32_t rows = 0;
  const void* weights = nullptr;
  const void* bias = nullptr;
  const void* input = nullptr;
  void* output = nullptr;
};

// cuBLASLt and what all products of a runner share.
class GemmLibrary {
 public:
  struct Options {
    cudaStream_t stream = nullptr;  // on which candidates are measured
    // Device memory that cuBLASLt may use while a product runs.
    void* workspace = nullptr;
    Bytes workspace_bytes;
    // Used until the last product is created. Device memory that measuring overwrites: inputs,
    // which are random then, and results.
    void* scratch = nullptr;
    Bytes scratch_bytes;
    // What stands in for weights; only read.
    const void* weights = nullptr;
    Bytes weights_bytes;
    std::string cache_file;  // empty: none
  };

  // NotFound, with what to install, if the library is missing.
  static absl::StatusOr<std::unique_ptr<GemmLibrary>> Load(const Options& options);
  ~GemmLibrary();

  // Writes the cache file if anything was measured since Load.
  absl::Status StoreCache();
  // Products whose algorithm was measured, not read.
  int measured() const { return measured_; }
  int version() const;

 private:
  friend class Gemm;
  struct Functions;
  GemmLibrary();

  Options options_;
  std::unique_ptr<Functions> functions_;
  void* handle_ = nullptr;  // cublasLtHandle_t
  std::string gpu_;
  GemmCache cache_;
  int measured_ = 0;
};

class Gemm {
 public:
  // `row_steps`, ascending: a product of r rows uses the algorithm chosen for the smallest step
  // that is not below r.
  static absl::StatusOr<std::unique_ptr<Gemm>> Create(GemmLibrary& library, const GemmShape& shape,
                                                      absl::Span<const int32_t> row_steps);
  ~Gemm();

  absl::Status Run(const GemmCall& call, cudaStream_t stream);

  const GemmShape& shape() const { return shape_; }
  // What was chosen for a number of rows.
  const GemmChoice& choice(int32_t rows) const;

 private:
  struct Descriptors;
  Gemm(GemmLibrary& library, const GemmShape& shape);

  absl::Status MakeDescriptors();
  absl::Status Choose(int32_t rows, GemmChoice& choice);
  absl::Status RunChoice(const GemmChoice& choice, const GemmCall& call, cudaStream_t stream);
  absl::StatusOr<std::vector<GemmChoice>> Candidates(int32_t rows);
  absl::StatusOr<double> Measure(const GemmChoice& choice, int32_t rows, int repeats);
  std::string Key(int32_t rows) const;
  int64_t OutputBytes(int32_t rows) const;

  GemmLibrary& library_;
  const GemmShape shape_;
  std::unique_ptr<Descriptors> descriptors_;
  std::vector<int32_t> steps_;
  std::vector<GemmChoice> choices_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_GEMM_H_
