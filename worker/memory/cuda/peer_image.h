// A copy of a parameter image, or of its first slabs, in the memory of another GPU of the host,
// from which this process's GPUs copy several times as fast as from host memory. The memory is the
// broker's; the image in host memory is what the copy is made from, and where everything is that
// the copy lacks.
//
// Each rank's slabs are mapped one behind the other in a range that the rank's GPU reads. Nothing
// runs on the other GPU, and no context is made there.
//
// Threads: thread-safe once it is filled.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_PEER_IMAGE_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_PEER_IMAGE_H_

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/cuda/context.h"
#include "common/cuda/virtual_memory.h"
#include "common/fd.h"
#include "worker/memory/cuda/image_registration.h"

namespace palimpsest {

class PeerImage {
 public:
  // Of slabs that another process created, each with a descriptor for each rank. An error if a
  // rank's GPU cannot reach their memory.
  static absl::StatusOr<std::unique_ptr<PeerImage>> Map(const std::vector<CudaContextPtr>& contexts,
                                                        const std::vector<SlabDescriptors>& slabs,
                                                        Bytes slab_bytes);
  // Nothing may be copied from it any more.
  ~PeerImage();
  PeerImage(const PeerImage&) = delete;
  PeerImage& operator=(const PeerImage&) = delete;

  // Copies it from the image's mapping in host memory; blocks until it is there.
  absl::Status Fill(const std::byte* image, ImageRegistration& registration);

  // Bytes per second of copies from here to the slowest rank's GPU, which need a slab of its memory
  // for a moment; 0 if it has none.
  double MeasureRate() const;

  // Of each rank, from the first of its part on.
  size_t slabs() const { return slabs_; }
  Bytes bytes() const { return slab_bytes_ * static_cast<int64_t>(slabs_); }
  // An address of the rank's GPU.
  const std::byte* part(size_t rank) const {
    return reinterpret_cast<const std::byte*>(ranks_[rank].range.base());
  }

 private:
  struct Rank {
    CudaContextPtr context;
    CudaAddressRange range;
    std::vector<CudaAllocation> slabs;
  };

  PeerImage(Bytes slab_bytes, size_t slabs) : slab_bytes_(slab_bytes), slabs_(slabs) {}

  absl::Status Add(const CudaContextPtr& context, const std::vector<SlabDescriptors>& slabs);
  absl::StatusOr<double> Rate(const Rank& rank) const;

  const Bytes slab_bytes_;
  const size_t slabs_;
  std::vector<Rank> ranks_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_PEER_IMAGE_H_
