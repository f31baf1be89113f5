// Copies slabs of the parameter image into the parameter region and proves that they are the
// image's by their checksums. One implementation for the host (host_image_restorer.h), one for GPUs
// (worker/memory/cuda).
//
// Threads: Restore may be called by one thread at a time, everything else from any.
#ifndef PALIMPSEST_WORKER_MEMORY_IMAGE_RESTORER_H_
#define PALIMPSEST_WORKER_MEMORY_IMAGE_RESTORER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/fd.h"
#include "common/ids.h"
#include "worker/core/model_runner.h"
#include "worker/memory/link_pacer.h"

namespace palimpsest {

// An image as its manifest describes it.
struct ImageShape {
  Bytes slab_bytes;
  // Of each slab, those of rank 0 first: common/slab_checksum.h.
  std::vector<uint64_t> checksums;
  // First slab of each stage; the first is 0.
  std::vector<uint32_t> stages;
  // Whether what was copied is hashed and compared.
  bool verify = true;
  // Parts of the image, one after another; stages and slabs are alike in each.
  int ranks = 1;

  // Of one rank.
  size_t slabs() const { return checksums.size() / static_cast<size_t>(ranks); }
  // Of the whole image.
  Bytes bytes() const { return slab_bytes * static_cast<int64_t>(checksums.size()); }
};

class ImageRestorer {
 public:
  // How a restore goes on. All functions may be called from several threads, and must not block.
  struct Progress {
    // Whether the slab is to be restored, asked when its turn comes.
    std::function<bool(RegionIndex)> wanted;
    // Only of restorers with events: the copy is under way on every GPU, and StageEvent covers it.
    std::function<void(RegionIndex)> queued;
    // The slab holds the image's bytes, on every GPU.
    std::function<void(RegionIndex)> done;
    // Whose turn each wanted slab awaits; null: nobody's.
    LinkPacer* pacer = nullptr;
  };

  virtual ~ImageRestorer() = default;

  // Copies these slabs, in this order or side by side, to their places of the region that starts at
  // `bases[rank]` on each GPU, and blocks until they are done or one failed. DataLoss for a slab
  // whose bytes do not have the image's checksum; `done` is not called for it.
  virtual absl::Status Restore(absl::Span<std::byte* const> bases,
                               absl::Span<const RegionIndex> slabs, const Progress& progress) = 0;

  // Ends the copies (and checks) into this stage of GPU `rank` that were queued so far: a CUevent,
  // for ParameterGate::StageEvents. Null where slabs are done when Restore says so.
  virtual void* StageEvent(int stage, int rank) {
    (void)stage, (void)rank;
    return nullptr;
  }

  // Whether CopySlab works: where slabs are host memory. Elsewhere the runner copies by itself.
  virtual bool copies_slabs() const { return false; }
  // Copies one slab to its place of the region at `base` on the calling thread, and checks it as
  // Restore does.
  virtual absl::Status CopySlab(std::byte* base, RegionIndex slab) const {
    (void)base, (void)slab;
    return absl::UnimplementedError("slabs are not host memory");
  }

  // For ModelMemory::image: what rank `rank` has of the image. A GPU may copy a slab from there
  // once it was restored. Empty where the gate copies rotating layers.
  virtual std::vector<ImagePiece> Pieces(int rank) const {
    (void)rank;
    return {};
  }

  // Fills memory of another GPU with the first slabs of each rank's part, and copies these from
  // there from now on, as do those who ask for Pieces. `slabs` holds a descriptor of each slab for
  // each rank. Blocks until it is filled, as fast as the link goes; as Restore, and not beside it.
  // Gives the bytes per second of copies from there, 0 if that is not known. On error, as when the
  // GPUs cannot reach that memory, nothing changes.
  virtual absl::StatusOr<double> KeepCopy(
      std::vector<SlabDescriptors> slabs) {  // NOLINT(performance-unnecessary-value-param)
    (void)slabs;
    return absl::UnimplementedError("slabs are host memory");
  }
  // Everything is copied from the image again, and the other GPU's memory unmapped, if there is
  // any. Nobody may be copying from it; not beside Restore.
  virtual void DropCopy() {}

  // To return to the next broker process.
  virtual const UniqueFd& image() const = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_IMAGE_RESTORER_H_
