// Restores parameters in a GPU's memory: copies follow each other on one stream, in the order of
// the slabs, as fast as the link goes; checksums run behind them on another, chunk by chunk on the
// GPU (slab_checksum.cu), and are compared here. A stage is open to the compute stream as soon as
// its last copy was queued.
//
// A slab with a wrong checksum is not copied again: kernels may have read it already.
//
// Device memory: none but the slabs'. Host memory: a registered mapping of the image, and some KiB
// of hashes.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_IMAGE_RESTORER_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_IMAGE_RESTORER_H_

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/context.h"
#include "common/mapping.h"
#include "worker/memory/image_restorer.h"

namespace palimpsest {

class CudaImageRestorer : public ImageRestorer {
 public:
  // Maps and registers the image, which takes some 0.1 s for each GiB. Checking needs slabs of
  // whole chunks. At most `window` bytes are under way at once, and at least two slabs.
  static absl::StatusOr<std::unique_ptr<CudaImageRestorer>> Open(CudaContextPtr context,
                                                                 UniqueFd image,
                                                                 const ImageShape& shape,
                                                                 Bytes window);
  ~CudaImageRestorer() override;

  absl::Status Restore(std::byte* base, absl::Span<const RegionIndex> slabs,
                       const Progress& progress) override;
  void* StageEvent(int stage, int rank) override;
  const UniqueFd& image() const override { return image_; }

 private:
  // A copy that is under way, in one of the places of the ring.
  struct Flight {
    RegionIndex slab;
    size_t slot = 0;
  };

  CudaImageRestorer(CudaContextPtr context, UniqueFd image, Mapping mapping, ImageShape shape)
      : context_(std::move(context)),
        image_(std::move(image)),
        mapping_(std::move(mapping)),
        shape_(std::move(shape)) {}

  absl::Status Prepare(size_t slots);
  absl::Status LoadKernel();
  absl::Status Queue(std::byte* base, const Flight& flight);
  // Waits for the copy and compares its checksum.
  absl::Status Finish(const Flight& flight) const;
  absl::Status Hash(CUdeviceptr slab, size_t slot) const;
  size_t StageOf(RegionIndex slab) const;
  uint32_t chunks() const;

  const CudaContextPtr context_;
  const UniqueFd image_;
  const Mapping mapping_;
  const ImageShape shape_;

  bool registered_ = false;
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

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_IMAGE_RESTORER_H_
