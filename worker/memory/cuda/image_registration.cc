#include "worker/memory/cuda/image_registration.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

// In the headers of Linux 5.14 and newer.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace palimpsest {

namespace {

// All pieces of an image: the first of each part, then the second of each, and so on. One that lies
// in two parts comes when it is due in either.
std::vector<size_t> PieceOrder(size_t image_bytes, size_t piece_bytes, size_t parts) {
  const size_t pieces = (image_bytes + piece_bytes - 1) / piece_bytes;
  const size_t part_bytes = image_bytes / parts;
  std::vector<bool> listed(pieces, false);
  std::vector<size_t> order;
  for (size_t depth = 0; order.size() < pieces; ++depth) {
    for (size_t part = 0; part < parts; ++part) {
      const size_t piece = part * part_bytes / piece_bytes + depth;
      if (piece >= pieces || listed[piece]) continue;
      listed[piece] = true;
      order.push_back(piece);
    }
  }
  return order;
}

}  // namespace

ImageRegistration::ImageRegistration(CudaContextPtr context, absl::Span<std::byte> image,
                                     size_t piece_bytes, int threads, int parts)
    : context_(std::move(context)),
      image_(image),
      piece_bytes_(piece_bytes),
      order_(PieceOrder(image.size(), piece_bytes, static_cast<size_t>(parts))),
      registered_((image.size() + piece_bytes - 1) / piece_bytes, false) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

ImageRegistration::~ImageRegistration() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
  MutexLock lock(&mu_);
  if (!context_->MakeCurrent().ok()) return;
  for (size_t piece = 0; piece < registered_.size(); ++piece) {
    if (registered_[piece]) context_->driver().cuMemHostUnregister(Piece(piece).data());
  }
}

absl::Span<std::byte> ImageRegistration::Piece(size_t piece) const {
  return image_.subspan(piece * piece_bytes_, piece_bytes_);
}

std::vector<absl::Span<const std::byte>> ImageRegistration::Cut(size_t offset, size_t size) const {
  std::vector<absl::Span<const std::byte>> cut;
  for (const size_t end = offset + size; offset < end; offset += cut.back().size()) {
    const size_t next = (offset / piece_bytes_ + 1) * piece_bytes_;
    cut.push_back(
        absl::Span<const std::byte>(image_).subspan(offset, std::min(next, end) - offset));
  }
  return cut;
}

absl::Status ImageRegistration::Await(size_t offset) {
  const size_t piece = offset / piece_bytes_;
  MutexLock lock(&mu_);
  while (failure_.ok() && !registered_[piece]) changed_.Wait(&mu_);
  return failure_;
}

void ImageRegistration::Run() {
  for (;;) {
    size_t piece;
    {
      MutexLock lock(&mu_);
      if (stopping_ || !failure_.ok() || next_ == registered_.size()) return;
      piece = order_[next_++];
    }
    const absl::Status status = Register(piece);
    MutexLock lock(&mu_);
    registered_[piece] = status.ok();
    failure_.Update(status);
    changed_.SignalAll();
  }
}

absl::Status ImageRegistration::Register(size_t piece) const {
  const absl::Span<std::byte> bytes = Piece(piece);
  // The driver finds pages faster that are in the page table. Where the kernel does not know the
  // advice, it brings them in itself.
  (void)madvise(bytes.data(), bytes.size(), MADV_POPULATE_READ);
  if (absl::Status status = context_->MakeCurrent(); !status.ok()) return status;
  // Sealed pages can be pinned for reading alone; unregistered ones copy at a sixth of the speed.
  // Portable: pinned for every GPU.
  const CudaDriver& driver = context_->driver();
  return driver.Check(
      driver.cuMemHostRegister(bytes.data(), bytes.size(),
                               CU_MEMHOSTREGISTER_READ_ONLY | CU_MEMHOSTREGISTER_PORTABLE),
      "registering the parameter image with the GPU");
}

}  // namespace palimpsest
