#include "worker/memory/cuda/cuda_image_restorer.h"

#include <algorithm>
#include <deque>

#include "absl/strings/str_cat.h"
#include "common/memory_file.h"
#include "common/slab_checksum.h"

namespace palimpsest {
namespace {

// Registered at once by one thread.
constexpr Bytes kRegisteredPiece = MiB(256);
constexpr int kRegisteringThreads = 4;

}  // namespace

absl::StatusOr<std::unique_ptr<CudaImageRestorer>> CudaImageRestorer::Open(
    const std::vector<CudaContextPtr>& contexts, UniqueFd image, const ImageShape& shape,
    Bytes window) {
  if (absl::Status status = CheckImageFile(image.get(), shape.bytes()); !status.ok()) return status;
  if (shape.verify && shape.slab_bytes.count() % static_cast<int64_t>(kChecksumChunk) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("slabs of ", shape.slab_bytes.count(),
                                                   " bytes; checksums on a GPU need a multiple of ",
                                                   kChecksumChunk));
  }
  if (shape.ranks != static_cast<int>(contexts.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("an image of ", shape.ranks, " ranks for ", contexts.size(), " GPUs"));
  }
  absl::StatusOr<Mapping> mapping = Mapping::Map(image.get(), shape.bytes(), MapAccess::kRead);
  if (!mapping.ok()) return mapping.status();
  std::unique_ptr<CudaImageRestorer> restorer(
      new CudaImageRestorer(contexts, std::move(image), *std::move(mapping), shape));
  restorer->registration_ = std::make_unique<ImageRegistration>(
      contexts[0], absl::MakeSpan(restorer->mapping_.data(), restorer->mapping_.size()),
      static_cast<size_t>(RoundUp(kRegisteredPiece, shape.slab_bytes).count()), kRegisteringThreads,
      shape.ranks);
  restorer->slots_ = static_cast<size_t>(std::max<int64_t>(window / shape.slab_bytes, 2));
  const auto part = static_cast<size_t>(shape.bytes().count() / shape.ranks);
  for (size_t rank = 0; rank < contexts.size(); ++rank) {
    auto made = RankRestorer::Create(contexts[rank], static_cast<int>(rank),
                                     restorer->mapping_.data() + rank * part, restorer->shape_,
                                     restorer->slots_);
    if (!made.ok()) return made.status();
    restorer->ranks_.push_back(*std::move(made));
  }
  return restorer;
}

CudaImageRestorer::~CudaImageRestorer() { ranks_.clear(); }

void* CudaImageRestorer::StageEvent(int stage, int rank) {
  return ranks_[static_cast<size_t>(rank)]->stage_event(stage);
}

std::vector<ImagePiece> CudaImageRestorer::Pieces(int rank) const {
  const Bytes part = shape_.bytes() / shape_.ranks;
  std::vector<ImagePiece> pieces;
  Bytes kept;
  {
    MutexLock lock(&mu_);
    if (peer_ != nullptr) {
      kept = peer_->bytes();
      pieces.push_back({peer_->part(static_cast<size_t>(rank)), kept});
    }
  }
  for (const absl::Span<const std::byte> piece :
       registration_->Cut(static_cast<size_t>((part * rank + kept).count()),
                          static_cast<size_t>((part - kept).count()))) {
    pieces.push_back({piece.data(), Bytes(static_cast<int64_t>(piece.size()))});
  }
  return pieces;
}

absl::StatusOr<double> CudaImageRestorer::KeepCopy(std::vector<SlabDescriptors> slabs) {
  if (slabs.empty() || slabs.size() > shape_.slabs()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a copy of ", slabs.size(), " slabs of an image of ", shape_.slabs()));
  }
  auto peer = PeerImage::Map(contexts_, slabs, shape_.slab_bytes);
  if (!peer.ok()) return peer.status();
  absl::Status status = (*peer)->Fill(mapping_.data(), *registration_);
  if (!status.ok()) return status;
  const double rate = (*peer)->MeasureRate();
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank]->UsePeer((*peer)->part(rank), (*peer)->slabs());
  }
  MutexLock lock(&mu_);
  peer_ = *std::move(peer);
  return rate;
}

void CudaImageRestorer::DropCopy() {
  for (const auto& rank : ranks_) rank->UsePeer(nullptr, 0);
  std::unique_ptr<PeerImage> dropped;  // unmapped after the lock
  MutexLock lock(&mu_);
  dropped.swap(peer_);
}

absl::Status CudaImageRestorer::Queue(absl::Span<std::byte* const> bases, RegionIndex slab,
                                      size_t slot) {
  const Bytes part = shape_.bytes() / shape_.ranks;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const Bytes at = shape_.slab_bytes * slab.value();
    const Bytes in_image = part * static_cast<int64_t>(rank) + at;
    absl::Status status = registration_->Await(static_cast<size_t>(in_image.count()));
    if (status.ok()) status = ranks_[rank]->Queue(bases[rank] + at.count(), slab, slot);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CudaImageRestorer::Finish(RegionIndex slab, size_t slot) const {
  absl::Status status;
  for (const auto& rank : ranks_) status.Update(rank->Finish(slab, slot));
  return status;
}

absl::Status CudaImageRestorer::Restore(absl::Span<std::byte* const> bases,
                                        absl::Span<const RegionIndex> slabs,
                                        const Progress& progress) {
  // A copy that is under way, in one of the places of the ring.
  struct Flight {
    RegionIndex slab;
    size_t slot = 0;
  };
  absl::Status status;
  std::deque<Flight> flights;
  size_t next_slot = 0;
  const auto finish_oldest = [&] {
    const Flight oldest = flights.front();
    flights.pop_front();
    const absl::Status finished = Finish(oldest.slab, oldest.slot);
    if (finished.ok()) progress.done(oldest.slab);
    status.Update(finished);
  };
  for (const RegionIndex slab : slabs) {
    if (flights.size() == slots_) finish_oldest();
    if (!status.ok()) break;
    if (slab.value() >= shape_.slabs()) {
      status = absl::InvalidArgumentError(
          absl::StrCat("slab ", slab.ToString(), " of an image of ", shape_.slabs()));
      break;
    }
    if (!progress.wanted(slab)) continue;
    if (progress.pacer != nullptr && !ranks_.front()->FromPeer(slab)) {
      // Those before it are not to wait with it for their checksums.
      while (progress.pacer->limited() && !flights.empty()) finish_oldest();
      progress.pacer->AwaitTurn(LinkPacer::Kind::kRestore, shape_.slab_bytes);
    }
    if (!status.ok()) break;
    const Flight flight{slab, next_slot};
    next_slot = (next_slot + 1) % slots_;
    status = Queue(bases, flight.slab, flight.slot);
    if (!status.ok()) break;
    progress.queued(slab);
    flights.push_back(flight);
  }
  // Nothing is written any more when this returns, whatever went wrong.
  while (!flights.empty()) finish_oldest();
  if (!status.ok()) {
    for (const auto& rank : ranks_) rank->Drain();
  }
  return status;
}

}  // namespace palimpsest
