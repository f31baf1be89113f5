// Restores parameters in host memory with memcpy, spread over several threads; the bytes that
// arrived are hashed while they are in the cache.
#ifndef PALIMPSEST_WORKER_MEMORY_HOST_IMAGE_RESTORER_H_
#define PALIMPSEST_WORKER_MEMORY_HOST_IMAGE_RESTORER_H_

#include <cstddef>
#include <cstdint>
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
#include "worker/memory/image_restorer.h"

namespace palimpsest {

class HostImageRestorer : public ImageRestorer {
 public:
  // Maps the image (MemoryBackend::OpenImage). The caller of Restore is one of the `threads`.
  static absl::StatusOr<std::unique_ptr<HostImageRestorer>> Open(UniqueFd image,
                                                                 const ImageShape& shape,
                                                                 int threads);
  ~HostImageRestorer() override;

  // A slab with a wrong checksum is copied a second time before it is given up.
  absl::Status Restore(absl::Span<std::byte* const> bases, absl::Span<const RegionIndex> slabs,
                       const Progress& progress) override;

  bool copies_slabs() const override { return true; }
  absl::Status CopySlab(std::byte* base, RegionIndex slab) const override;
  const UniqueFd& image() const override { return image_; }

 private:
  struct Job {
    std::byte* base = nullptr;
    absl::Span<const RegionIndex> slabs;
    const Progress* progress = nullptr;
    size_t next = 0;     // the next slab that nobody works on
    size_t working = 0;  // threads inside the job
    absl::Status status;
  };

  HostImageRestorer(UniqueFd image, Mapping mapping, const ImageShape& shape)
      : image_(std::move(image)),
        mapping_(std::move(mapping)),
        slab_bytes_(shape.slab_bytes),
        checksums_(shape.checksums),
        verify_(shape.verify) {}

  void HelperLoop();
  // Works on `job_` until no slab is left.
  void Work() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

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

#endif  // PALIMPSEST_WORKER_MEMORY_HOST_IMAGE_RESTORER_H_
