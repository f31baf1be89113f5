// What the ranks of a tensor-parallel model do together on their GPUs, and how they give up
// together.
//
// Every rank calls the same functions with the same sizes in the same order, each on its own thread
// and with its own GPU current; the GPU work may run at different times, and waits for that of the
// others. Functions only enqueue on `stream` and may be captured into a graph. A graph must be
// destroyed before its collective.
//
// Failure: a rank that cannot go on calls Abort. Work that waits for it then ends on all GPUs, with
// undefined results, and so does each later call, with the same error; that is final.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_COLLECTIVE_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_COLLECTIVE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "worker/compute/cuda/summed_norm.h"

namespace palimpsest::cuda {

// One rank's part.
class Collective {
 public:
  virtual ~Collective() = default;

  virtual int rank() const = 0;
  virtual int ranks() const = 0;

  // `data`: `count` bfloat16 numbers, a multiple of 8, aligned to 16 bytes. They become their sums
  // over the ranks, with the same bits on all of them.
  virtual absl::Status AllReduce(void* data, int64_t count, cudaStream_t stream) = 0;

  // An all-reduce behind what is on `stream` now and beside what is enqueued there later, until
  // Join has `stream` wait for it. Only Join and more of these may come between.
  virtual absl::Status AllReduceBeside(void* data, int64_t count, cudaStream_t stream) = 0;
  virtual absl::Status Join(cudaStream_t stream) = 0;

  // Whether AllReduceNorm takes matrices of this shape.
  virtual bool JoinsNorm(int32_t rows, int32_t size) const = 0;
  // AllReduce of rows and then their RMS norm, in one.
  virtual absl::Status AllReduceNorm(void* data, const SummedNorm& norm, cudaStream_t stream) = 0;

  // Puts matrices side by side. `parts`: float [ranks, rows, columns], aligned to 16 bytes; this
  // rank's matrix is in its place, the others may be overwritten. `whole`: float [rows, width]; its
  // column c is column c % columns of rank c / columns. Columns beyond `width` are dropped.
  virtual absl::Status AllGather(float* parts, float* whole, int32_t rows, int32_t columns,
                                 int32_t width, cudaStream_t stream) = 0;

  // Any thread, any number of times: the first status counts.
  virtual void Abort(const absl::Status& status) = 0;
  // OK, or what it was aborted with.
  virtual absl::Status status() const = 0;
};

// All ranks of a model, in one process.
class CollectiveGroup {
 public:
  virtual ~CollectiveGroup() = default;

  virtual int ranks() const = 0;
  virtual Collective& rank(int rank) = 0;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_COLLECTIVE_H_
