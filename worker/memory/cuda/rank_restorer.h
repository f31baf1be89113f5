// One GPU's share of CudaImageRestorer: its streams and events, and the copies and checksums that
// run on them.
//
// Threads: as ImageRestorer, whose thread makes every call but stage_event's.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_RANK_RESTORER_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_RANK_RESTORER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/cuda/context.h"
#include "worker/memory/image_restorer.h"

namespace palimpsest {

class RankRestorer {
 public:
  // `part` is the rank's part of the image, which the driver knows by the time of the first copy;
  // it and `shape` must outlive the restorer. At most `slots` copies are under way at once.
  static absl::StatusOr<std::unique_ptr<RankRestorer>> Create(CudaContextPtr context, int rank,
                                                              const std::byte* part,
                                                              const ImageShape& shape,
                                                              size_t slots);
  // Waits for what is under way.
  ~RankRestorer();

  // Slabs below `slabs` are copied from `peer` (PeerImage) from now on, the others from the image.
  // While nothing is under way.
  void UsePeer(const std::byte* peer, size_t slabs) {
    peer_ = peer;
    peer_slabs_ = slabs;
  }

  bool FromPeer(RegionIndex slab) const { return slab.value() < peer_slabs_; }

  // Queues the copy of a slab to `to`, and its checksum. The slot must be free: finished, or never
  // used.
  absl::Status Queue(std::byte* to, RegionIndex slab, size_t slot);
  // Waits for the slot's copy and compares its checksum: DataLoss.
  absl::Status Finish(RegionIndex slab, size_t slot) const;
  // Waits for everything that was queued.
  void Drain() const;

  CUevent stage_event(int stage) const { return stages_[static_cast<size_t>(stage)].get(); }

 private:
  RankRestorer(CudaContextPtr context, int rank, const std::byte* part, const ImageShape& shape)
      : context_(std::move(context)), rank_(rank), part_(part), shape_(shape) {}

  absl::Status Prepare(size_t slots);
  absl::Status LoadKernel();
  absl::Status Copy(CUdeviceptr to, RegionIndex slab) const;
  absl::Status Hash(CUdeviceptr slab, size_t slot) const;
  size_t StageOf(RegionIndex slab) const;
  uint32_t chunks() const;

  const CudaContextPtr context_;
  const int rank_;
  const std::byte* const part_;
  const ImageShape& shape_;
  const std::byte* peer_ = nullptr;
  size_t peer_slabs_ = 0;

  CUmodule module_ = nullptr;
  CUfunction hash_chunks_ = nullptr;
  // chunks() hashes for each slot, written by the GPU.
  uint64_t* hashes_ = nullptr;
  CudaStream copies_;
  CudaStream checks_;
  std::vector<CudaEvent> copied_;    // by slot
  std::vector<CudaEvent> finished_;  // by slot
  std::vector<CudaEvent> stages_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_RANK_RESTORER_H_
