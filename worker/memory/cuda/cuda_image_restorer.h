// Restores parameters in the memory of one GPU, or of several, each of which gets its rank's part
// of the image. On each GPU copies follow each other on one stream, in the order of the slabs, as
// fast as its link goes, or one by one where a pacer holds them back; checksums run behind them on
// another, chunk by chunk on the GPU (slab_checksum.cu), and are compared here. A stage is open to
// the compute streams as soon as its last copy was queued on every GPU.
//
// A slab with a wrong checksum is not copied again: kernels may have read it already.
//
// What a copy on another GPU has (KeepCopy, peer_image.h) is copied from there, and checked alike.
//
// Device memory: none but the slabs'. Host memory: a registered mapping of the image, and some KiB
// of hashes.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_IMAGE_RESTORER_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_IMAGE_RESTORER_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "common/cuda/context.h"
#include "common/mapping.h"
#include "common/mutex.h"
#include "worker/memory/cuda/image_registration.h"
#include "worker/memory/cuda/peer_image.h"
#include "worker/memory/cuda/rank_restorer.h"
#include "worker/memory/image_restorer.h"

namespace palimpsest {

class CudaImageRestorer : public ImageRestorer {
 public:
  // Maps the image and begins to register it, which goes on behind the call; a restore waits for
  // what it copies. Checking needs slabs of whole chunks. At most `window` bytes are under way at
  // once on each GPU, and at least two slabs.
  static absl::StatusOr<std::unique_ptr<CudaImageRestorer>> Open(
      const std::vector<CudaContextPtr>& contexts, UniqueFd image, const ImageShape& shape,
      Bytes window);
  ~CudaImageRestorer() override;

  absl::Status Restore(absl::Span<std::byte* const> bases, absl::Span<const RegionIndex> slabs,
                       const Progress& progress) override;
  void* StageEvent(int stage, int rank) override;
  std::vector<ImagePiece> Pieces(int rank) const override;
  absl::StatusOr<double> KeepCopy(std::vector<SlabDescriptors> slabs) override;
  void DropCopy() override;
  const UniqueFd& image() const override { return image_; }

 private:
  CudaImageRestorer(std::vector<CudaContextPtr> contexts, UniqueFd image, Mapping mapping,
                    ImageShape shape)
      : image_(std::move(image)),
        mapping_(std::move(mapping)),
        shape_(std::move(shape)),
        contexts_(std::move(contexts)) {}

  // On every GPU: queues the copy, or waits for it and compares its checksum.
  absl::Status Queue(absl::Span<std::byte* const> bases, RegionIndex slab, size_t slot);
  absl::Status Finish(RegionIndex slab, size_t slot) const;

  const UniqueFd image_;
  const Mapping mapping_;
  const ImageShape shape_;
  const std::vector<CudaContextPtr> contexts_;  // by rank
  std::unique_ptr<ImageRegistration> registration_;
  size_t slots_ = 0;
  std::vector<std::unique_ptr<RankRestorer>> ranks_;

  mutable Mutex mu_;
  std::unique_ptr<PeerImage> peer_ ABSL_GUARDED_BY(mu_);  // may be null
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_IMAGE_RESTORER_H_
