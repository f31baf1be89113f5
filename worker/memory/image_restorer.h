// Copies slabs of the parameter image into the parameter region and proves that they are the
// image's: the bytes that arrived are hashed while they are in the cache, and compared with the
// manifest.
//
// Threads: Restore may be called by one thread at a time and spreads the slabs over `threads`
// threads; it blocks until they are done.
#ifndef PALIMPSEST_WORKER_MEMORY_IMAGE_RESTORER_H_
#define PALIMPSEST_WORKER_MEMORY_IMAGE_RESTORER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/fd.h"
#include "common/ids.h"
#include "common/mapping.h"
#include "common/mutex.h"

namespace palimpsest {

class ImageRestorer {
 public:
  // Maps the image after checking that the descriptor is a sealed, read-only memfd of exactly as
  // many slabs as there are checksums. `verify` false skips the hashing.
  static absl::StatusOr<std::unique_ptr<ImageRestorer>> Open(UniqueFd image, Bytes slab_bytes,
                                                             std::vector<uint64_t> checksums,
                                                             int threads, bool verify);
  ~ImageRestorer();

  // Copies these slabs to their places of the region that starts at `base`. A slab for which
  // `wanted` says false when its turn comes is skipped; for the others `done` is called, in no
  // particular order and from several threads. DataLoss for a slab whose bytes do not have the
  // image's checksum, even when copied a second time; `done` is not called for it.
  absl::Status Restore(std::byte* base, absl::Span<const RegionIndex> slabs,
                       const std::function<bool(RegionIndex)>& wanted,
                       const std::function<void(RegionIndex)>& done);

  uint32_t slabs() const { return static_cast<uint32_t>(checksums_.size()); }
  // To return to the next broker process.
  const UniqueFd& image() const { return image_; }

 private:
  struct Job {
    std::byte* base = nullptr;
    absl::Span<const RegionIndex> slabs;
    const std::function<bool(RegionIndex)>* wanted = nullptr;
    const std::function<void(RegionIndex)>* done = nullptr;
    size_t next = 0;     // the next slab that nobody works on
    size_t working = 0;  // threads inside the job
    absl::Status status;
  };

  ImageRestorer(UniqueFd image, Mapping mapping, Bytes slab_bytes, std::vector<uint64_t> checksums,
                bool verify)
      : image_(std::move(image)),
        mapping_(std::move(mapping)),
        slab_bytes_(slab_bytes),
        checksums_(std::move(checksums)),
        verify_(verify) {}

  void HelperLoop();
  // Works on `job_` until no slab is left.
  void Work() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status RestoreOne(std::byte* base, RegionIndex slab) const;

  const UniqueFd image_;
  const Mapping mapping_;
  const Bytes slab_bytes_;
  const std::vector<uint64_t> checksums_;
  const bool verify_;

  Mutex mu_;
  CondVar changed_;
  Job* job_ ABSL_GUARDED_BY(mu_) = nullptr;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> helpers_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_IMAGE_RESTORER_H_
