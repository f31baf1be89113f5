// Copies between a GPU and the host that go to a stream together, in no order among themselves. By
// calls of the driver that take many (cuMemcpyBatchAsync): each copy begins while the one before it
// is on its way. One by one where the driver has no such call, or refuses it.
//
// Threads: a batch is one thread's.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_COPY_BATCH_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_COPY_BATCH_H_

#include <atomic>
#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "common/cuda/driver.h"
#include "worker/core/model_runner.h"

namespace palimpsest {

enum class CopyDirection { kToHost, kToDevice };

class CopyBatch {
 public:
  // The most copies in one call. Drivers of the 580 series were reported to crash or hang at tens
  // of thousands (https://github.com/vllm-project/vllm/issues/49276).
  static constexpr size_t kMostCopies = 256;

  // Of blocks in the KV region of `memory`, which is made of allocations of slab_bytes (0: of one):
  // no copy reaches over the end of one. `refused` is set, and the log told, when the driver first
  // refuses a batch; all batches of a copier share it.
  CopyBatch(const CudaDriver& driver, const ModelMemory& memory, CopyDirection direction,
            std::atomic<bool>* refused);

  // `size` bytes of the region from `device` on. All must stay as they are until the stream has
  // come past them.
  void Add(CUdeviceptr device, std::byte* host, size_t size);

  bool empty() const { return sizes_.empty(); }

  // Queues what was added since the last call. With the stream's context current; not on the
  // default stream.
  absl::Status Submit(CUstream stream);

 private:
  absl::Status SubmitPart(size_t first, size_t count, CUstream stream);
  absl::Status CopySingly(size_t first, size_t count, CUstream stream) const;

  const CudaDriver& driver_;
  const CUdeviceptr kv_;
  const size_t slab_bytes_;
  const CopyDirection direction_;
  std::atomic<bool>* const refused_;
  // Addresses of host memory are the driver's, too.
  std::vector<CUdeviceptr> to_;
  std::vector<CUdeviceptr> from_;
  std::vector<size_t> sizes_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_COPY_BATCH_H_
