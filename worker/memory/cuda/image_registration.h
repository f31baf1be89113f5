// Registers the pages of a mapped image with the driver, so that they are copied at the link's
// speed. For a large image that takes longer than copying it, so it goes on piece by piece on
// threads of its own: what comes first in the image can be copied while the rest is registered. In
// an image of several parts, which are copied side by side, each part's beginning comes first.
//
// Threads: thread-safe.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_IMAGE_REGISTRATION_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_IMAGE_REGISTRATION_H_

#include <cstddef>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/cuda/context.h"
#include "common/mutex.h"

namespace palimpsest {

class ImageRegistration {
 public:
  // Begins. `image` is mapped for reading as long as this lives, and pieces of `piece_bytes` begin
  // at page boundaries. It has `parts` parts of the same size.
  ImageRegistration(CudaContextPtr context, absl::Span<std::byte> image, size_t piece_bytes,
                    int threads, int parts = 1);
  // Nothing may be copied from the image any more. Blocks until every piece is let go.
  ~ImageRegistration();
  ImageRegistration(const ImageRegistration&) = delete;
  ImageRegistration& operator=(const ImageRegistration&) = delete;

  // Blocks until the piece that holds byte `offset` is registered; the driver's error if any was
  // refused. A copy must not reach over the end of a piece.
  absl::Status Await(size_t offset);

  size_t bytes() const { return image_.size(); }

  // `size` bytes of the image from `offset` on, cut where pieces end.
  std::vector<absl::Span<const std::byte>> Cut(size_t offset, size_t size) const;

 private:
  void Run();
  absl::Status Register(size_t piece) const;
  absl::Span<std::byte> Piece(size_t piece) const;

  const CudaContextPtr context_;
  const absl::Span<std::byte> image_;
  const size_t piece_bytes_;
  const std::vector<size_t> order_;

  Mutex mu_;
  CondVar changed_;
  size_t next_ ABSL_GUARDED_BY(mu_) = 0;  // in order_
  std::vector<bool> registered_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_IMAGE_REGISTRATION_H_
